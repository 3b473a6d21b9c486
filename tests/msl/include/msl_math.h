// Arithmetic. Scalars are real overloads, so that calls Metal finds ambiguous are ambiguous here. Inside namespace metal.

#define MSL_F1(name, expr) \
  MSL_RT float name(float x) { return expr; } \
  MSL_RT half name(half h) { float x = (float)h; return (half)(expr); } \
  MSL_RT bfloat name(bfloat b) { float x = (float)b; return (bfloat)(expr); } \
  template <typename V, MSL_IF_VECTOR> MSL_RT V name(V v) { \
    for (int i = 0; i < vsize<V>; ++i) v[i] = name((vscalar<V>)v[i]); \
    return v; \
  }
#define MSL_F2(name, expr) \
  MSL_RT float name(float x, float y) { return expr; } \
  MSL_RT half name(half a, half b) { float x = (float)a, y = (float)b; return (half)(expr); } \
  MSL_RT bfloat name(bfloat a, bfloat b) { float x = (float)a, y = (float)b; return (bfloat)(expr); } \
  template <typename V, MSL_IF_VECTOR> MSL_RT V name(V v, V w) { \
    for (int i = 0; i < vsize<V>; ++i) v[i] = name((vscalar<V>)v[i], (vscalar<V>)w[i]); \
    return v; \
  }
#define MSL_TEST(name) \
  MSL_RT bool name(float x) { return __builtin_##name(x); } \
  MSL_RT bool name(half x) { return __builtin_##name((float)x); } \
  MSL_RT bool name(bfloat x) { return __builtin_##name((float)x); } \
  template <typename V, MSL_IF_VECTOR> MSL_RT vec<bool, vsize<V>> name(V v) { \
    vec<bool, vsize<V>> r{}; \
    for (int i = 0; i < vsize<V>; ++i) r[i] = name((vscalar<V>)v[i]); \
    return r; \
  }

MSL_F1(exp, __builtin_expf(x))
MSL_F1(exp2, __builtin_exp2f(x))
MSL_F1(exp10, __builtin_powf(10.0f, x))
MSL_F1(log, __builtin_logf(x))
MSL_F1(log2, __builtin_log2f(x))
MSL_F1(log10, __builtin_log10f(x))
MSL_F1(sqrt, __builtin_sqrtf(x))
MSL_F1(rsqrt, 1.0f / __builtin_sqrtf(x))
MSL_F1(sin, __builtin_sinf(x))
MSL_F1(cos, __builtin_cosf(x))
MSL_F1(tan, __builtin_tanf(x))
MSL_F1(asin, __builtin_asinf(x))
MSL_F1(acos, __builtin_acosf(x))
MSL_F1(atan, __builtin_atanf(x))
MSL_F1(sinh, __builtin_sinhf(x))
MSL_F1(cosh, __builtin_coshf(x))
MSL_F1(tanh, __builtin_tanhf(x))
MSL_F1(asinh, __builtin_asinhf(x))
MSL_F1(acosh, __builtin_acoshf(x))
MSL_F1(atanh, __builtin_atanhf(x))
MSL_F1(fabs, __builtin_fabsf(x))
MSL_F1(floor, __builtin_floorf(x))
MSL_F1(ceil, __builtin_ceilf(x))
MSL_F1(round, __builtin_roundf(x))
MSL_F1(rint, __builtin_rintf(x))
MSL_F1(trunc, __builtin_truncf(x))
MSL_F1(fract, x - __builtin_floorf(x))
MSL_F1(saturate, x < 0.0f ? 0.0f : (x > 1.0f ? 1.0f : x))
MSL_F1(sign, x > 0.0f ? 1.0f : (x < 0.0f ? -1.0f : 0.0f))
MSL_F2(pow, __builtin_powf(x, y))
MSL_F2(powr, __builtin_powf(x, y))
MSL_F2(fmod, __builtin_fmodf(x, y))
MSL_F2(atan2, __builtin_atan2f(x, y))
MSL_F2(copysign, __builtin_copysignf(x, y))
MSL_F2(fmax, __builtin_fmaxf(x, y))
MSL_F2(fmin, __builtin_fminf(x, y))
MSL_F2(divide, x / y)
MSL_F2(step, y < x ? 0.0f : 1.0f)
MSL_TEST(isnan)
MSL_TEST(isinf)
MSL_TEST(isfinite)
MSL_TEST(signbit)
MSL_RT float ldexp(float x, int k) { return __builtin_ldexpf(x, k); }
MSL_RT float mix(float a, float b, float t) { return a + (b - a) * t; }

MSL_RT float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
MSL_RT half fma(half a, half b, half c) { return (half)__builtin_fma((double)a, (double)b, (double)c); }
template <typename V, MSL_IF_VECTOR> MSL_RT V fma(V a, V b, V c) {
  for (int i = 0; i < vsize<V>; ++i) a[i] = fma((vscalar<V>)a[i], (vscalar<V>)b[i], (vscalar<V>)c[i]);
  return a;
}

// Of floats: where one operand is NaN the other is returned.
#define MSL_MINMAX(T, greater, less) \
  MSL_RT constexpr T max(T a, T b) { return greater; } \
  MSL_RT constexpr T min(T a, T b) { return less; } \
  MSL_RT constexpr T max3(T a, T b, T c) { return max(max(a, b), c); } \
  MSL_RT constexpr T min3(T a, T b, T c) { return min(min(a, b), c); } \
  MSL_RT constexpr T clamp(T x, T a, T b) { return min(max(x, a), b); }
#define MSL_MINMAX_INT(T) MSL_MINMAX(T, a < b ? b : a, b < a ? b : a)
#define MSL_MINMAX_FLOAT(T) MSL_MINMAX(T, (T)__builtin_fmaxf((float)a, (float)b), (T)__builtin_fminf((float)a, (float)b))
#define MSL_INTEGERS(F) F(char) F(int8_t) F(uchar) F(short) F(ushort) F(int) F(uint) F(long) F(ulong)
#define MSL_FLOATS(F) F(float) F(half) F(bfloat)
MSL_INTEGERS(MSL_MINMAX_INT)
MSL_FLOATS(MSL_MINMAX_FLOAT)
#define MSL_ABS_INT(T) MSL_RT constexpr T abs(T x) { return x < 0 ? T(-x) : x; }
#define MSL_ABS_FLOAT(T) MSL_RT T abs(T x) { return (T)__builtin_fabsf((float)x); }
MSL_ABS_INT(char) MSL_ABS_INT(int8_t) MSL_ABS_INT(short) MSL_ABS_INT(int) MSL_ABS_INT(long)
MSL_FLOATS(MSL_ABS_FLOAT)
#define MSL_EACH2(name) \
  template <typename V, MSL_IF_VECTOR> MSL_RT V name(V a, V b) { \
    for (int i = 0; i < vsize<V>; ++i) a[i] = name((vscalar<V>)a[i], (vscalar<V>)b[i]); \
    return a; \
  }
#define MSL_EACH1(name) \
  template <typename V, MSL_IF_VECTOR> MSL_RT V name(V v) { \
    for (int i = 0; i < vsize<V>; ++i) v[i] = name((vscalar<V>)v[i]); \
    return v; \
  }
MSL_EACH2(max)
MSL_EACH2(min)
MSL_EACH1(abs)
template <typename V, MSL_IF_VECTOR> MSL_RT V clamp(V x, vscalar<V> a, vscalar<V> b) {
  for (int i = 0; i < vsize<V>; ++i) x[i] = clamp((vscalar<V>)x[i], a, b);
  return x;
}
template <typename V, MSL_IF_VECTOR> MSL_RT V clamp(V x, V a, V b) { return min(max(x, a), b); }

template <typename T, typename C> MSL_RT T select(T a, T b, C c) {
  static_assert(!vsize<T> == !vsize<C>, "select: the condition is a scalar or a vector as the values are");
  if constexpr (vsize<T> == 0) return c ? b : a;
  else {
    for (int i = 0; i < vsize<T>; ++i) a[i] = c[i] ? b[i] : a[i];
    return a;
  }
}
template <typename V> MSL_RT bool any(V v) {
  bool r = false;
  for (int i = 0; i < vsize<V>; ++i) r |= v[i] != 0;
  return r;
}
template <typename V> MSL_RT bool all(V v) {
  bool r = true;
  for (int i = 0; i < vsize<V>; ++i) r &= v[i] != 0;
  return r;
}
template <typename V, MSL_IF_VECTOR> MSL_RT vscalar<V> dot(V a, V b) {
  vscalar<V> s = 0;
  for (int i = 0; i < vsize<V>; ++i) s += a[i] * b[i];
  return s;
}

// ---------------------------------------------------------------- integers

#define MSL_INT(T, U) \
  MSL_RT T popcount(T x) { return (T)__builtin_popcountll((ulong)(U)x); } \
  MSL_RT T clz(T x) { return x ? (T)(__builtin_clzll((ulong)(U)x) - (64 - 8 * (int)sizeof(T))) : (T)(8 * sizeof(T)); } \
  MSL_RT T ctz(T x) { return x ? (T)__builtin_ctzll((ulong)(U)x) : (T)(8 * sizeof(T)); } \
  MSL_RT T mulhi(T a, T b) { return (T)(((__int128)a * b) >> (8 * sizeof(T))); } \
  MSL_RT T mul24(T a, T b) { return (T)(a * b); } \
  MSL_RT T reverse_bits(T x) { \
    U r = 0, u = (U)x; \
    for (unsigned i = 0; i < 8 * sizeof(T); ++i, u = (U)(u >> 1)) r = (U)((r << 1) | (u & 1)); \
    return (T)r; \
  } \
  MSL_RT T rotate(T x, T k) { \
    unsigned bits = 8 * sizeof(T), s = (unsigned)k % bits; \
    return s ? (T)(U)(((U)x << s) | ((U)x >> (bits - s))) : x; \
  } \
  MSL_RT T extract_bits(T x, uint offset, uint bits) { \
    constexpr uint width = 8 * sizeof(T); \
    if (offset + bits > width) { msl_fail("extract_bits beyond the width", __builtin_LINE()); return x; } \
    if (!bits) return 0; \
    U u = (U)((U)x << (width - offset - bits)); \
    return is_signed_v<T> ? (T)((T)u >> (width - bits)) : (T)(u >> (width - bits)); \
  } \
  MSL_RT T insert_bits(T base, T insert, uint offset, uint bits) { \
    constexpr uint width = 8 * sizeof(T); \
    if (offset + bits > width) { msl_fail("insert_bits beyond the width", __builtin_LINE()); return base; } \
    U m = bits == width ? (U)~(U)0 : (U)((((U)1 << bits) - 1) << offset); \
    return (T)(((U)base & (U)~m) | (((U)insert << offset) & m)); \
  }
MSL_INT(uchar, uchar)
MSL_INT(char, uchar)
MSL_INT(ushort, ushort)
MSL_INT(short, ushort)
MSL_INT(uint, uint)
MSL_INT(int, uint)
MSL_INT(ulong, ulong)
MSL_INT(long, ulong)
MSL_EACH1(popcount)
