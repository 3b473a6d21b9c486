// Shared by all kernels: sizes, the randomised Hadamard transform as mlx_tq/rotation.py does it, and masks.
// TQ_THREADGROUP declares arrays in threadgroup memory, for which CUDA has another word than for pointers to it.

#ifndef TQ_FUNC  // cuda.h has its own
#define TQ_FUNC inline
#define TQ_THREADGROUP threadgroup
#endif

constant constexpr float LOG2E = 1.44269504088896340736f;
constant constexpr float LOWEST = -3.402823466e+38f;
// Scores may exceed the maximum that weights refer to by so much, base 2: weights up to 16.
constant constexpr float LAZY = 4.0f;
// 16 in a format's bits means rows that are not coded.
constant constexpr int RAW = 16;

// Consecutive coordinates of a row that one lane works on: few where it keeps those of many queries in registers. At
// least as many lanes as queries share a row.
constexpr int chunk(int d, int queries) { return d > 256 ? 32 : queries > 2 || d < 16 * queries ? 8 : 16; }

// Lanes that share a row, c coordinates each: a power of two, so that the last ones may be idle.
constexpr int lanes(int d, int c) {
  int n = 1;
  while (n * c < d) n *= 2;
  return n;
}

// Largest power of two p with d = m p; m is 1 or the order of a Paley matrix.
constexpr int power_part(int d) {
  int p = 1;
  while (d % (2 * p) == 0) p *= 2;
  return p == d ? d : p / 4;  // Paley orders are 4 times an odd number
}

constexpr int field_width(int bits) { return bits == 4 ? 4 : bits == 1 ? 1 : 2; }

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

// The stages of the transform of size P from coordinates H apart on, over those that lie 32 apart in v.
template <int H, int P, int N>
TQ_FUNC void own_butterflies(thread float* v) {
  if constexpr (H < P) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if (n & H / 32) continue;
      const float a = v[n], b = v[n + H / 32];
      v[n] = a + b;
      v[n + H / 32] = a - b;
    }
    own_butterflies<2 * H, P, N>(v);
  }
}

// The stage of coordinates h apart, which other lanes have.
template <int N>
TQ_FUNC void lane_butterflies(thread float* v, int h, uint lane) {
  const float sign = lane & h ? -1.0f : 1.0f;
#pragma unroll
  for (int n = 0; n < N; ++n) v[n] = fma(sign, v[n], simd_shuffle_xor(v[n], ushort(h)));
}

// All stages. LOOP makes those across lanes a loop: slower, but half of the code.
template <int P, int N, bool LOOP>
TQ_FUNC void butterflies(thread float* v, uint lane) {
  constexpr int END = P < 32 ? P : 32;
  if (LOOP) {
#pragma unroll 1
    for (int h = 1; h < END; h *= 2) lane_butterflies<N>(v, h, lane);
  } else {
#pragma unroll
    for (int h = 1; h < END; h *= 2) lane_butterflies<N>(v, h, lane);
  }
  own_butterflies<32, P, N>(v);
}

// How many values of a row a lane may hold, those at lane, lane + 32 and so on, and whether the row has the one at n.
constexpr int share(int d) { return (d + 31) / 32; }

TQ_FUNC bool holds(int d, int n, uint lane) { return 32 * n + 32 <= d || 32 * n + int(lane) < d; }

template <int D>
TQ_FUNC void load_row(threadgroup const float* row, thread float* v, uint lane) {
#pragma unroll
  for (int n = 0; n < share(D); ++n) v[n] = holds(D, n, lane) ? row[32 * n + lane] : 0.0f;
}

template <int D>
TQ_FUNC void store_row(thread const float* v, threadgroup float* row, uint lane) {
#pragma unroll
  for (int n = 0; n < share(D); ++n)
    if (holds(D, n, lane)) row[32 * n + lane] = v[n];
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

// H x over the D values that lanes hold, 0 past them, natural order, as mlx_tq/rotation.py adds them. mix: rows of the
// Paley matrix, bit b set where column b is +1. x: room for a row.
template <int D, bool LOOP = false>
TQ_FUNC void hadamard(thread float* v, threadgroup float* x, device const uint* mix, uint lane) {
  constexpr int P = power_part(D), M = D / P;
  butterflies<P, share(D), LOOP>(v, lane);
  if (M == 1) return;
  store_row<D>(v, x, lane);
#pragma unroll
  for (int n = 0; n < share(D); ++n) {
    if (!holds(D, n, lane)) continue;
    const int i = 32 * n + lane;
    const uint row = mix[i / P];
    float total = row & 1u ? x[i % P] : -x[i % P];
    for (int b = 1; b < M; ++b) {
      const float other = x[b * P + i % P];
      total += row >> b & 1u ? other : -other;
    }
    v[n] = total;
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

// The rotation of a row, and back: v becomes RHT(v). norm is 1 / sqrt(D).
template <int D, bool LOOP = false>
TQ_FUNC void rotate_held(
    thread float* v, threadgroup float* x, device const float* signs, device const uint* mix, float norm, uint lane) {
#pragma unroll
  for (int n = 0; n < share(D); ++n)
    if (holds(D, n, lane)) v[n] *= signs[32 * n + lane];
  hadamard<D, LOOP>(v, x, mix, lane);
#pragma unroll
  for (int n = 0; n < share(D); ++n) v[n] *= norm;
}

template <int D, bool LOOP = false>
TQ_FUNC void rotate_held_back(
    thread float* v, threadgroup float* x, device const float* signs, device const uint* mix, float norm, uint lane) {
  hadamard<D, LOOP>(v, x, mix, lane);
#pragma unroll
  for (int n = 0; n < share(D); ++n)
    if (holds(D, n, lane)) v[n] *= norm * signs[32 * n + lane];
}

// The same for rows in threadgroup memory, in small code. Lane i % 32 reads y[i]: what another lane wrote there needs a
// barrier before.
template <int D>
TQ_FUNC void rotate_row(threadgroup float* y, device const float* signs, device const uint* mix, float norm, uint lane) {
  float v[share(D)];
  load_row<D>(y, v, lane);
  rotate_held<D, true>(v, y, signs, mix, norm, lane);
  store_row<D>(v, y, lane);
}

template <int D>
TQ_FUNC void rotate_row_back(
    threadgroup float* y, device const float* signs, device const uint* mix, float norm, uint lane) {
  float v[share(D)];
  load_row<D>(y, v, lane);
  rotate_held_back<D, true>(v, y, signs, mix, norm, lane);
  store_row<D>(v, y, lane);
}

// A float as T; float16 saturates where finite values would overflow.
template <typename T>
TQ_FUNC T narrow(float x, float top) {
  return T(isfinite(x) ? min(max(x, -top), top) : x);
}

// ---------------------------------------------------------------- who reads which tokens

// Where query row `row` of a KV head is, in rows: query `row / G` of head `row % G`.
TQ_FUNC uint query_at(uint slot, int row, int G, int L) {
  return (slot * G + row % G) * L + row / G;
}

// Where maxima and sums of the softmax begin in partial results, behind all sums of values.
TQ_FUNC size_t softmax_at(device const int* params, int value_dim) {
  return size_t(params[13] * params[5]) * value_dim;
}

// What `params` says of a batch row from `row` on.
struct Tokens {
  int pad, first, packed, exact;  // columns of padding; tokens: the first ones, those packed, all exact ones
  int coders, packed_share, exact_share;
};

TQ_FUNC Tokens tokens_of(device const int* row) {
  Tokens tokens;
  tokens.pad = row[0];
  tokens.first = row[1];
  tokens.packed = row[2];
  tokens.exact = row[1] + row[3];
  tokens.coders = row[4];
  tokens.packed_share = row[5];
  tokens.exact_share = row[6];
  return tokens;
}

// Blocks of 32 tokens that one of several workers reads: the first `coders` workers packed ones, the others exact ones.
struct Range {
  bool coded;
  int begin, end;
};

TQ_FUNC Range range_of(int worker, Tokens tokens) {
  Range range;
  range.coded = worker < tokens.coders;
  const int blocks = ((range.coded ? tokens.packed : tokens.exact) + 31) / 32;
  const int share = range.coded ? tokens.packed_share : tokens.exact_share;
  range.begin = min((range.coded ? worker : worker - tokens.coders) * share, blocks);
  range.end = min(range.begin + share, blocks);
  return range;
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
