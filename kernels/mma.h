// Goes behind common.h for attend_mma.metal: fragments of the tiles that matrix units multiply. cuda.h has mma_16x8x16,
// mma_16x8x32 and transpose_8x8, which stand for instructions of NVIDIA GPUs.

// Exponent of a power of two that brings numbers up to `largest` into the middle of float16 where they are divided by it.
TQ_FUNC int middle_exponent(float largest) { return clamp(int(as_type<uint>(largest) >> 23) - 127, -100, 100) - 13; }

TQ_FUNC float power_of_two(int exponent) { return as_type<float>(uint(127 + exponent) << 23); }

// Queries and weights as whole numbers: the largest query, two bytes of up to 127, and what four weights may add up to,
// two bytes of up to 255. MOST_SUM: the same before they are made whole.
constant constexpr float MOST_QUERY = 32639.0f, MOST_WEIGHT = 65000.0f, MOST_SUM = 16.0f;
// Finite, so that a weight of 0 stays 0, and above 0, so that a ratio is a number.
constant constexpr float MOST_GAIN = 1e36f, LEAST_GAIN = 1e-36f;

// Two numbers as T side by side in a word.
template <typename T>
TQ_FUNC uint pair_of(float low, float high) {
  return uint(as_type<ushort>(T(low))) | uint(as_type<ushort>(T(high))) << 16;
}

// The lower or the upper halves of two words side by side.
TQ_FUNC uint halves(uint a, uint b, bool upper) {
  return pick_bytes(a, b, upper ? 0x7632 : 0x5410);
}

// The coordinate of field `field` of byte `byte` of word `word` of `four_bits`.
template <int B>
constexpr int coordinate_of(int word, int byte, int field) {
  return B == 4 ? 8 * word + 2 * byte + field : word / 2 * 16 + 4 * byte + 2 * field + word % 2;
}

// Word w of a lane's part of a row with 4 bits to each code. Codes of 2 and 3 bits are spread over two words, those at
// even coordinates and those at odd ones.
template <int B>
TQ_FUNC uint four_bits(thread const uint* words, thread const uint* plane, int w) {
  if (B == 4) return words[w];
  const uint low = words[w / 2] >> w % 2 * 2 & 0x33333333u;
  if (B == 2) return low;
  uint third = pick_bytes(plane[w / 4], 0, w / 2 % 2 ? 0x4342 : 0x4140);
  third = (third | third << 4) & 0x0F0F0F0Fu;
  third = (third | third << 2) & 0x33333333u;
  return low | (third << (2 - w % 2) & 0x44444444u);
}

constant constexpr uint LOW_FIELDS = 0x0F0F0F0Fu;

// Selects the lowest bits of each byte.
constexpr uint fields_up_to(int bits) { return ((1u << bits) - 1u) * 0x01010101u; }

// Byte i of four words side by side in out[i].
TQ_FUNC void transpose_bytes(thread const uint* words, thread uint* out) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint a = pick_bytes(words[0], words[1], i ? 0x7362 : 0x5140);
    const uint b = pick_bytes(words[2], words[3], i ? 0x7362 : 0x5140);
    out[2 * i] = halves(a, b, false);
    out[2 * i + 1] = halves(a, b, true);
  }
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
  constexpr int W = field_width(B), N = D / 4 * W / 32, P = (D / 4 + 31) / 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    load_part<D / 4 * W>(rows + i * row_words(D, W) * 4, words + i * N);
    if (B == 3) load_part<D / 4>(planes + i * row_words(D, 1) * 4, bits + i * P);
  }
}

// A lane's parts of 8 neighbouring values, in the order in which transpose_8x8 leaves weights: 0 1 4 5 2 3 6 7.
template <int D, int B>
TQ_FUNC void load_values(device const uchar* rows, device const uchar* planes, thread uint* words, thread uint* bits) {
  constexpr int W = field_width(B), N = (D / 8 * W + 31) / 32;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = i / 4 * 2 + i / 2 % 2 * 4 + i % 2;
    load_part<D / 8 * W>(rows + row * row_words(D, W) * 4, words + i * N);
    if (B == 3) load_part<D / 8>(planes + row * row_words(D, 1) * 4, bits + i);
  }
}

// Scores of 16 rows; this lane reads parts of the rows `low` (row g) and `high` (g + 8), and gets their scores for
// query row t of each set. BATCH steps wait for memory together, and no more: unrolled, all would, which takes the
// registers of a threadgroup.
template <int STEPS, int BATCH, int S, typename T, typename P>
TQ_FUNC void plain_scores(P low, P high, threadgroup const float* fragments, uint lane, thread float* score) {
  device const uint* a = (device const uint*)low + lane % 4;
  device const uint* b = (device const uint*)high + lane % 4;
  float sums[4 * S];
#pragma unroll
  for (int i = 0; i < 4 * S; ++i) sums[i] = 0.0f;
#pragma unroll 1
  for (int from = 0; from < STEPS; from += BATCH) {
    uint rows[BATCH * 4];
#pragma unroll
    for (int i = 0; i < BATCH * 4; ++i) rows[i] = (i % 2 ? b : a)[8 * (from + i / 4) + i / 2 % 2 * 4];
#pragma unroll
    for (int i = 0; i < BATCH * S; ++i) {
      threadgroup const float* query = fragments + (from * S + i) * 64 + lane;
      const uint queries[2] = {as_type<uint>(query[0]), as_type<uint>(query[32])};
      mma_16x8x16<T>(sums + i % S * 4, rows + i / S * 4, queries);
    }
  }
#pragma unroll
  for (int i = 0; i < 2 * S; ++i) score[i] = sums[2 * i] + sums[2 * i + 1];
}

// The four scales of type S in two words.
template <typename S>
TQ_FUNC void scales_of(device const S*, thread const uint* words, thread float* scale) {
#pragma unroll
  for (int i = 0; i < 4; ++i) scale[i] = float(as_type<S>(ushort(words[i / 2] >> i % 2 * 16)));
}

TQ_FUNC void scales_of(device const bfloat16_t*, thread const uint* words, thread float* scale) {
#pragma unroll
  for (int i = 0; i < 4; ++i) scale[i] = as_type<float>(i % 2 ? words[i / 2] & 0xFFFF0000u : words[i / 2] << 16);
}

// Over the tokens of a tile's rows, which lie in lanes 4 g + t.
TQ_FUNC float over_tokens_max(float x) {
  x = max(x, simd_shuffle_xor(x, ushort(4)));
  x = max(x, simd_shuffle_xor(x, ushort(8)));
  return max(x, simd_shuffle_xor(x, ushort(16)));
}

template <typename X>
TQ_FUNC X over_tokens_sum(X x) {
  x += simd_shuffle_xor(x, ushort(4));
  x += simd_shuffle_xor(x, ushort(8));
  return x + simd_shuffle_xor(x, ushort(16));
}

// Whether one of the four scores of a set is well above the maximum that weights refer to.
template <int S>
TQ_FUNC bool any_above(thread const float* score, thread const float* top) {
  bool above = false;
#pragma unroll
  for (int i = 0; i < 4 * S; ++i) above = above || score[i] > top[i / 4] + LAZY;
  return above;
}

// Raises the maxima that weights refer to as far as the scores, and makes the sums of weights refer to the new ones;
// `shrink` is what weights of before are multiplied by.
template <int S>
TQ_FUNC void raise_top(thread const float* score, thread float* top, thread float* denominator, thread float* shrink) {
#pragma unroll
  for (int s = 0; s < S; ++s) {
    thread const float* x = score + 4 * s;
    const float raised = max(top[s], over_tokens_max(max(max(x[0], x[1]), max(x[2], x[3]))));
    shrink[s] = exp2(top[s] - raised);
    top[s] = raised;
    denominator[s] *= shrink[s];
  }
}

// What a lane's carry starts from: another share of a unit in each group g, so that equal weights are not rounded up at
// the same tokens everywhere.
TQ_FUNC float first_carry(int g) { return (float(g) - 3.5f) / 8; }

TQ_FUNC float sum_of_four(thread const float* x) { return (x[0] + x[1]) + (x[2] + x[3]); }

// Weights of the four tokens of a set times the scales of their values, and the sums of the weights. Whether they ask
// for a higher maximum or a lower factor: told by sums, because those are made by other units than fields of codes.
template <int S, int MASK>
TQ_FUNC bool weigh(
    thread const float* score, thread const float* factor, thread const float* top, thread const float* gain,
    thread float* weight, thread float* sums) {
  bool beyond = false;
#pragma unroll
  for (int s = 0; s < S; ++s) {
    float p[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      p[i] = exp2(score[4 * s + i] - top[s]);
      weight[4 * s + i] = MASK != 0 && p[i] == 0.0f ? 0.0f : p[i] * factor[i];
    }
    sums[s] = sum_of_four(p);
    beyond = beyond || sums[s] > MOST_SUM || sum_of_four(weight + 4 * s) * gain[s] > MOST_WEIGHT;
  }
  return beyond;
}

// Factors of weights after raise_top, and what was summed up with the old ones. Weights of before are smaller now, so
// their factor is larger; it is lowered, with room for twice the weights, where those of a set are beyond 16 bits. Sums
// lie in pairs: 256 times the first, and the second.
template <int S, int PAIRS>
TQ_FUNC void choose_gain(
    thread const float* weight, thread const float* shrink, int g, thread float* gain, thread float* carry,
    thread uint* total, thread int* sums) {
#pragma unroll
  for (int s = 0; s < S; ++s) {
    const float most = over_tokens_max(sum_of_four(weight + 4 * s)), old = gain[s] / shrink[s];
    gain[s] = max(min(min(old, MOST_WEIGHT / 2 / most), MOST_GAIN), LEAST_GAIN);
    const float smaller = gain[s] / old;
    carry[s] = fma(carry[s], 0.0f, first_carry(g));  // a NaN stays
    total[s] = uint(rint(float(total[s]) * smaller));
#pragma unroll
    for (int i = s * PAIRS; i < (s + 1) * PAIRS; ++i) {
      const float sum = fma(256.0f, float(sums[2 * i]), float(sums[2 * i + 1])) * smaller, high = rint(sum / 256);
      sums[2 * i] = int(high);
      sums[2 * i + 1] = int(rint(fma(-256.0f, high, sum)));
    }
  }
}

// The factors of four tokens' weights as whole numbers of 16 bits, in two words of the bytes high, high, low, low. What
// rounding leaves is carried on to the next weight: many small ones would all be rounded the same way.
TQ_FUNC void whole_weights(
    thread const float* weight, float gain, thread float* carry, thread uint* total, thread uint* out) {
  constexpr float WHOLE = 12582912.0f;  // added to a number, leaves no place behind the point
  float sum = *carry;
  uint last = as_type<uint>(WHOLE), digits[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum = fma(weight[i], gain, sum);
    const uint rounded = as_type<uint>(sum + WHOLE);
    digits[i] = rounded - last;
    last = rounded;
  }
  *total += last - as_type<uint>(WHOLE);
  *carry = sum - (as_type<float>(last) - WHOLE);
#pragma unroll
  for (int i = 0; i < 2; ++i) out[i] = pick_bytes(digits[2 * i], digits[2 * i + 1], 0x4051);
}
