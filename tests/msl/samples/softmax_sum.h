constant constexpr float LOWEST = -3.402823466e+38f;
inline float code_value(uint word, uint k) { return float((word >> (4u * k)) & 15u) - 7.5f; }
