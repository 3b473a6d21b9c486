// Goes behind common.h for attend_mma.metal: fragments of the tiles that matrix units multiply. cuda.h has mma_16x8x16
// and transpose_8x8, which stand for instructions of NVIDIA GPUs.

// Exponent of a power of two that brings numbers up to `largest` into the middle of float16 where they are divided by it.
TQ_FUNC int middle_exponent(float largest) { return clamp(int(as_type<uint>(largest) >> 23) - 127, -100, 100) - 13; }

TQ_FUNC float power_of_two(int exponent) { return as_type<float>(uint(127 + exponent) << 23); }

// What sums of products of field_pair must be multiplied by.
constant constexpr float CODE_UNIT = 16777216.0f;

// Two numbers as T side by side in a word.
template <typename T>
TQ_FUNC uint pair_of(float low, float high) {
  return uint(as_type<ushort>(T(low))) | uint(as_type<ushort>(T(high))) << 16;
}

// The lower or the upper halves of two words side by side.
TQ_FUNC uint halves(uint a, uint b, bool upper) {
  return pick_bytes(a, b, upper ? 0x7632 : 0x5410);
}

// Where field j of half a word lies in its byte.
template <int B>
constexpr int field_place(int j) {
  return field_width(B) * j % 8;
}

// Field j of both halves of a word of codes as float16 denormals, times 2 to the power of its place. But for 3-bit codes
// the fields below it in its byte come along, so that the last one of a byte needs no mask; queries and sums make up for
// them. Bit b of the halves of `plane` is the third bit of a 3-bit code.
template <int B>
TQ_FUNC uint field_pair(uint codes, uint plane, int j, int b) {
  constexpr int W = field_width(B);
  const int place = field_place<B>(j), to = place + 2;
  const uint bytes = W * j >= 8 ? pick_bytes(codes, 0, 0x4341) : codes & 0x00FF00FFu;
  const uint third = (b < to ? plane << (to - b) : plane >> (b - to)) & 0x00010001u << to;
  if (B == 3) return (bytes & 0x00030003u << place) | third;
  return place + W == 8 ? bytes : bytes & ((1u << (place + W)) - 1u) * 0x00010001u;
}

// N bits of a row.
template <int N>
TQ_FUNC void load_part(device const uchar* from, thread uint* out) {
  if (N == 8) {
    out[0] = *from;
  } else if (N == 16) {
    out[0] = *(device const ushort*)from;
  } else if (N == 32) {
    out[0] = *(device const uint*)from;
  } else if (N == 64) {
    const uint2 words = *(device const uint2*)from;
    out[0] = words.x;
    out[N > 32 ? 1 : 0] = words.y;
  } else {
#pragma unroll
    for (int i = 0; i < N / 128; ++i) {
      const uint4 words = ((device const uint4*)from)[i];
      out[4 * i] = words.x;
      out[4 * i + (N > 32 ? 1 : 0)] = words.y;
      out[4 * i + (N > 64 ? 2 : 0)] = words.z;
      out[4 * i + (N > 64 ? 3 : 0)] = words.w;
    }
  }
}

// A lane's parts of 4 neighbouring keys.
template <int D, int B>
TQ_FUNC void load_keys(device const uchar* rows, device const uchar* planes, thread uint* words, thread uint* bits) {
  constexpr int W = field_width(B), N = D / 4 * W / 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint third[N];
    load_part<D / 4 * W>(rows + i * row_words(D, W) * 4, words + i * N);
    if (B == 3) load_part<D / 4>(planes + i * row_words(D, 1) * 4, third);
#pragma unroll
    for (int w = 0; w < N; ++w) {
      const uint x = B == 3 ? third[w / 2] >> w % 2 * 16 : 0u;
      bits[i * N + w] = (x & 0xFFu) | (x & 0xFF00u) << 8;
    }
  }
}

// A lane's parts of 8 neighbouring values, in the order in which transpose_8x8 leaves weights: 0 4 1 5 2 6 3 7.
template <int D, int B>
TQ_FUNC void load_values(device const uchar* rows, device const uchar* planes, thread uint* words, thread uint* bits) {
  constexpr int W = field_width(B), N = D / 8 * W < 32 ? 1 : D / 8 * W / 32;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = i % 2 * 4 + i / 2;
    load_part<D / 8 * W>(rows + row * row_words(D, W) * 4, words + i * N);
    bits[i] = 0u;
    if (B == 3) load_part<D / 8>(planes + row * row_words(D, 1) * 4, bits + i);
  }
}

// Adds the products of 16 rows with the queries; this lane reads parts of the rows `low` (row g) and `high` (g + 8).
// BATCH steps wait for memory together, and no more: unrolled, all would, which takes the registers of a threadgroup.
template <int STEPS, int BATCH, typename T, typename P>
TQ_FUNC void plain_scores(P low, P high, threadgroup const float* fragments, uint lane, thread float* score) {
  device const uint* a = (device const uint*)low + lane % 4;
  device const uint* b = (device const uint*)high + lane % 4;
#pragma unroll 1
  for (int from = 0; from < STEPS; from += BATCH) {
    uint rows[BATCH * 4];
#pragma unroll
    for (int i = 0; i < BATCH * 4; ++i) rows[i] = (i % 2 ? b : a)[8 * (from + i / 4) + i / 2 % 2 * 4];
#pragma unroll
    for (int s = 0; s < BATCH; ++s) {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        threadgroup const float* query = fragments + (from + s) * 128 + part * 64 + lane;
        const uint queries[2] = {as_type<uint>(query[0]), as_type<uint>(query[32])};
        mma_16x8x16<T>(score, rows + 4 * s, queries);
      }
    }
  }
}

// The four scales of type S in two words.
template <typename S>
TQ_FUNC void scales_of(device const S*, thread const uint* words, thread float* scale) {
#pragma unroll
  for (int i = 0; i < 4; ++i) scale[i] = float(as_type<S>(ushort(words[i / 2] >> i % 2 * 16)));
}

// Over the tokens of a tile's rows, which lie in lanes 4 g + t.
TQ_FUNC float over_tokens_max(float x) {
  x = max(x, simd_shuffle_xor(x, ushort(4)));
  x = max(x, simd_shuffle_xor(x, ushort(8)));
  return max(x, simd_shuffle_xor(x, ushort(16)));
}

TQ_FUNC float over_tokens_sum(float x) {
  x += simd_shuffle_xor(x, ushort(4));
  x += simd_shuffle_xor(x, ushort(8));
  return x + simd_shuffle_xor(x, ushort(16));
}

constant constexpr float MOST_GAIN = 1e36f;  // finite, so that a weight of 0 stays 0

// The largest of a lane's 8 numbers in each of its two columns.
TQ_FUNC void column_max(thread const float* x, thread float* most) {
#pragma unroll
  for (int i = 0; i < 2; ++i) most[i] = max(max(x[i], x[i + 2]), max(x[i + 4], x[i + 6]));
}

// Raises the maxima that weights refer to where a score is well above, and makes sums refer to the new ones: those of
// weights, and the factor of weights in the accumulators, or the accumulators themselves.
template <int TILES>
TQ_FUNC void raise_top(
    thread const float* score, thread float* top, thread float* denominator, thread float* gain, thread float* acc) {
  float most[2], shrink[2];
  column_max(score, most);
  if (!simd_any(most[0] > top[0] + LAZY || most[1] > top[1] + LAZY)) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float raised = max(top[i], over_tokens_max(most[i]));
    shrink[i] = exp2(top[i] - raised);
    gain[i] = min(gain[i] * exp2(raised - top[i]), MOST_GAIN);
    top[i] = raised;
    denominator[i] *= shrink[i];
  }
#pragma unroll
  for (int i = 0; i < TILES * 4; ++i) acc[i] *= shrink[i % 2];
}

// Lowers the factors of weights where a weight times its factor is well above 1.
template <int TILES>
TQ_FUNC void lower_gain(thread const float* weight, thread float* gain, thread float* acc) {
  float most[2];
  column_max(weight, most);
  if (!simd_any(most[0] * gain[0] > 16.0f || most[1] * gain[1] > 16.0f)) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float lowered = min(gain[i], 1.0f / over_tokens_max(most[i])), smaller = lowered / gain[i];
    gain[i] = lowered;
#pragma unroll
    for (int n = i; n < TILES * 4; n += 2) acc[n] *= smaller;
  }
}
