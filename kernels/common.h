// Shared by all kernels: sizes, the randomised Hadamard transform as mlx_tq/rotation.py does it, and masks.

#ifndef TQ_FUNC
#define TQ_FUNC inline
#endif

constant constexpr float LOG2E = 1.44269504088896340736f;
constant constexpr float LOWEST = -3.402823466e+38f;
// Scores may exceed the maximum that weights refer to by so much, base 2: weights up to 16.
constant constexpr float LAZY = 4.0f;
// 16 in a format's bits means rows that are not coded.
constant constexpr int RAW = 16;

// Consecutive coordinates of a row that one lane works on.
constexpr int chunk(int d) { return d > 256 ? 32 : 16; }

// Lanes that share a row: a power of two, so that the last ones may be idle.
constexpr int lanes(int d) {
  int n = 1;
  while (n * chunk(d) < d) n *= 2;
  return n;
}

// Largest power of two p with d = m p; m is 1 or the order of a Paley matrix.
constexpr int power_part(int d) {
  int p = 1;
  while (d % (2 * p) == 0) p *= 2;
  return p == d ? d : p / 4;  // Paley orders are 4 times an odd number
}

constexpr int field_width(int bits) { return bits == 4 ? 4 : 2; }

constexpr int row_words(int d, int width) { return (d * width + 31) / 32; }

// Elements of a row of the codes region.
constexpr int row_size(int d, int bits) { return bits == RAW ? d : row_words(d, field_width(bits)); }

// Words that encode.metal writes for a row: codes, plane and signs.
constexpr int encoded_words(int d, int bits, bool qjl) {
  return row_words(d, field_width(bits)) + (bits == 3 ? row_words(d, 1) : 0) + (qjl ? row_words(d, 1) : 0);
}

// What is to be subtracted from a code.
template <int B, bool LLOYD>
constexpr float code_offset() {
  return B == RAW || LLOYD ? 0.0f : ((1 << B) - 1) * 0.5f;
}

// ---------------------------------------------------------------- the transform, by one simdgroup

// H x in place over D values, natural order, as mlx_tq/rotation.py adds them. mix: rows of the Paley matrix, bit b set
// where column b is +1.
template <int D>
TQ_FUNC void hadamard(threadgroup float* x, device const uint* mix, uint lane) {
  constexpr int P = power_part(D), M = D / P;
  for (int h = 1; h < P; h *= 2) {
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = lane; i < D / 2; i += 32) {
      const int j = i / h * 2 * h + i % h;
      const float a = x[j], b = x[j + h];
      x[j] = a + b;
      x[j + h] = a - b;
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  if (M > 1) {
    float mixed[(D + 31) / 32];
    for (int n = 0, i = lane; i < D; ++n, i += 32) {
      const uint row = mix[i / P];
      float total = row & 1u ? x[i % P] : -x[i % P];
      for (int b = 1; b < M; ++b) {
        const float v = x[b * P + i % P];
        total += row >> b & 1u ? v : -v;
      }
      mixed[n] = total;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (int n = 0, i = lane; i < D; ++n, i += 32) x[i] = mixed[n];
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// A float as T; float16 saturates where finite values would overflow.
template <typename T>
TQ_FUNC T narrow(float x, float top) {
  return T(isfinite(x) ? min(max(x, -top), top) : x);
}

// Rotates a row into y, rounded to T as codec.rotate does.
template <int D, typename T>
TQ_FUNC void rotate_row(
    device const T* row, device const float* signs, device const uint* mix, threadgroup float* y, float norm, float top,
    uint lane) {
  for (int i = lane; i < D; i += 32) y[i] = float(row[i]) * signs[i];
  hadamard<D>(y, mix, lane);
  for (int i = lane; i < D; i += 32) y[i] = float(narrow<T>(y[i] * norm, top));
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

// ---------------------------------------------------------------- masks

// Soft-cap, mask and change to base 2 of a score; whether query row `row` of its group sees the token at `column`.
template <int MASK, bool SOFTCAP, typename M>
TQ_FUNC bool see(
    thread float& s, bool live, int row, int column, device const M* mask, int batch, int kv_head,
    device const int* params, float softcap) {
  const int G = params[0], columns = params[2];
  bool seen = live;
  if (SOFTCAP) s = softcap * tanh(s / softcap);
  if (MASK == 1) seen = seen && column <= columns - params[1] + row / G;
  if (MASK >= 2) {
    const size_t at = batch * size_t(params[8]) + (kv_head * G + row % G) * size_t(params[9]) +
        (row / G) * size_t(params[10]) + min(column, columns - 1) * size_t(params[11]);
    if (MASK == 2) seen = seen && bool(mask[at]);
    if (MASK == 3) s += float(mask[at]);
  }
  seen = seen && !(s == -INFINITY);
  s *= LOG2E;
  if (s < LOWEST) s = LOWEST;  // a NaN stays, so that it shows
  return seen;
}
