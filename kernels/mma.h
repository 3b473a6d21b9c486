// Goes behind tq.h for attend_mma.metal: fragments of the tiles that matrix units multiply. cuda.h has mma_16x8x16 and
// transpose_8x8, which stand for instructions of NVIDIA GPUs.

// What sums of products of field_pair must be multiplied by.
constant constexpr float CODE_UNIT = 16777216.0f;

// Two numbers as T side by side in a word.
template <typename T>
TQ_FUNC uint pair_of(float low, float high) {
  return uint(as_type<ushort>(T(low))) | uint(as_type<ushort>(T(high))) << 16;
}

// The lower or the upper halves of two words side by side.
TQ_FUNC uint halves(uint a, uint b, bool upper) {
  return upper ? a >> 16 | (b & 0xFFFF0000u) : (a & 0xFFFFu) | b << 16;
}

// Field j of both halves of a word of codes, as float16 denormals; the factor of place j is in field_scale. Bit b of the
// halves of `plane` is the third bit of a 3-bit code.
template <int B>
TQ_FUNC uint field_pair(uint codes, uint plane, int j, int b) {
  constexpr int W = field_width(B);
  const int place = W * j % 8;
  uint pair = (W * j >= 8 ? codes >> 8 : codes) & ((1u << W) - 1u) * 0x00010001u << place;
  if (B == 3) {
    const int to = place + 2;
    pair |= (b < to ? plane << (to - b) : plane >> (b - to)) & 0x00010001u << to;
  }
  return pair;
}

// Part `index` of a row whose parts have N bits each.
template <int N>
TQ_FUNC void load_part(device const uint* row, int index, thread uint* out) {
  if (N == 8) {
    out[0] = ((device const uchar*)row)[index];
  } else if (N == 16) {
    out[0] = ((device const ushort*)row)[index];
  } else if (N == 32) {
    out[0] = row[index];
  } else if (N == 64) {
    const uint2 words = ((device const uint2*)row)[index];
    out[0] = words.x;
    out[N > 32 ? 1 : 0] = words.y;
  } else {
#pragma unroll
    for (int i = 0; i < N / 128; ++i) {
      const uint4 words = ((device const uint4*)row)[index * (N / 128) + i];
      out[4 * i] = words.x;
      out[4 * i + (N > 32 ? 1 : 0)] = words.y;
      out[4 * i + (N > 64 ? 2 : 0)] = words.z;
      out[4 * i + (N > 64 ? 3 : 0)] = words.w;
    }
  }
}

// A lane's parts of the 32 keys from `start` on, of rows 8 i + g.
template <int D, int B>
TQ_FUNC void load_keys(
    device const uint* rows, device const uint* planes, int start, uint lane, thread uint* words, thread uint* bits) {
  constexpr int W = field_width(B), N = D / 4 * W / 32;
  const int t = lane % 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int token = start + 8 * i + int(lane / 4);
    load_part<D / 4 * W>(rows + token * row_words(D, W), t, words + i * N);
#pragma unroll
    for (int w = 0; w < N; ++w)
      bits[i * N + w] = B == 3 ? load_bits<16>(planes + token * row_words(D, 1), t * N + w) : 0u;
  }
}

// A lane's parts of the 32 values from `start` on: of rows 2 t and 2 t + 1 of every 8.
template <int D, int B>
TQ_FUNC void load_values(
    device const uint* rows, device const uint* planes, int start, uint lane, thread uint* words, thread uint* bits) {
  constexpr int W = field_width(B), N = D / 8 * W < 32 ? 1 : D / 8 * W / 32;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int token = start + 8 * (i / 2) + 2 * int(lane % 4) + i % 2;
    load_part<D / 8 * W>(rows + token * row_words(D, W), lane / 4, words + i * N);
    bits[i] = 0u;
    if (B == 3) load_part<D / 8>(planes + token * row_words(D, 1), lane / 4, bits + i);
  }
}

// Adds the products of 16 rows with the queries; this lane reads parts of the rows `low` (row g) and `high` (g + 8).
template <int STEPS, typename T, typename P>
TQ_FUNC void plain_scores(P low, P high, threadgroup const float* fragments, uint lane, thread float* score) {
  device const uint* a = (device const uint*)low + lane % 4;
  device const uint* b = (device const uint*)high + lane % 4;
  constexpr int BATCH = STEPS < 8 ? STEPS : 8;  // that many steps wait for memory together
#pragma unroll
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

constant constexpr float LAZY = 4.0f;  // in powers of two: weights up to 16

// The largest of a lane's 8 numbers in each of its two columns.
TQ_FUNC void column_max(thread const float* x, thread float* most) {
#pragma unroll
  for (int i = 0; i < 2; ++i) most[i] = max(max(x[i], x[i + 2]), max(x[i + 4], x[i + 6]));
}

// Raises the maxima that weights refer to where a score is well above, and makes sums refer to the new ones: those of
// weights, and what the accumulators are multiplied by, or the accumulators themselves.
template <int TILES>
TQ_FUNC void raise_top(
    thread const float* score, thread float* top, thread float* denominator, thread float* unit, thread float* acc) {
  float most[2], shrink[2];
  column_max(score, most);
  if (!simd_any(most[0] > top[0] + LAZY || most[1] > top[1] + LAZY)) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float raised = max(top[i], over_tokens_max(most[i]));
    shrink[i] = exp2(top[i] - raised);
    top[i] = raised;
    denominator[i] *= shrink[i];
    unit[i] *= shrink[i];
  }
#pragma unroll
  for (int i = 0; i < TILES * 4; ++i) acc[i] *= shrink[i % 2];
}

// Raises the units of weights where a weight is well above, and gives their inverses.
template <int TILES>
TQ_FUNC void raise_unit(
    thread const float* weight, thread float* unit, thread float* inverse, thread float* weight_sum,
    thread float* acc) {
  float most[2];
  column_max(weight, most);
  const bool above = simd_any(most[0] > unit[0] * 16.0f || most[1] > unit[1] * 16.0f);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float before = unit[i];
    if (above) unit[i] = max(before, over_tokens_max(most[i]));
    inverse[i] = unit[i] > 1e-37f ? 1.0f / unit[i] : 0.0f;
    if (above) {
      const float smaller = before * inverse[i];
      weight_sum[i] *= smaller;
#pragma unroll
      for (int n = i; n < TILES * 4; n += 2) acc[n] *= smaller;
    }
  }
}
