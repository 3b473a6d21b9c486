// Attention of 8 query rows to a range of tokens by a threadgroup, on matrix units that multiply tiles of 16 x 16 by
// 16 x 8: partial results for merge.metal. It does what attend.metal does, for uniform codes and 16-bit rows.
//
// Each simdgroup walks a part of the range, 32 tokens at a time. The left factors are keys (token x coordinate) and
// transposed values (coordinate x token), made from codes in registers; the right factors queries and weights, one
// column a query row. Lane 4 g + t holds, of a tile's rows, g and g + 8, and of a result's columns, 2 t and 2 t + 1. The
// order of coordinates in a product is free, so a lane takes those that lie side by side in memory.

constexpr int C = D / 4, CV = DV / 8;  // coordinates of a key, and of a value, that a lane holds
constexpr int KF = 16 / field_width(KB), VF = 16 / field_width(VB);  // fields of half a word
constexpr int KW = C / (2 * KF), VW = CV < 2 * VF ? 1 : CV / (2 * VF);  // words that they lie in
constexpr int STEPS = D / 16, TILES = DV / 16, PAIRS = CV / 2;
const int G = params[0], L = params[1], columns = params[2], capacity = params[3], exact_capacity = params[4];
const int splits = params[5], tiles = params[6], mean_pages = params[7];

const uint lane = thread_index_in_simdgroup, sg = simdgroup_index_in_threadgroup;
const int g = lane / 4, t = lane % 4;
const int kv_head = threadgroup_position_in_grid.y, batch = threadgroup_position_in_grid.z;
const int tile = threadgroup_position_in_grid.x % tiles, split = threadgroup_position_in_grid.x / tiles;
const int first_row = tile * 8, rows = G * L;
const size_t slot = batch * size_t(params[12]) + kv_head;  // which sequence of tokens

// First the rotated queries and behind them their fragments, in the end the sums of all simdgroups.
constexpr int ROTATED = 8 * D, FRAGMENTS = STEPS * 128, SUMS = NSG * DV * 8;
threadgroup float scratch[ROTATED + FRAGMENTS > SUMS ? ROTATED + FRAGMENTS : SUMS];
threadgroup float row_unit[8], row_sum[8], tops[NSG * 8], totals[NSG * 8];
threadgroup float* rotated = scratch;
threadgroup float* fragments = scratch + ROTATED;

// Rotate the queries. Each row is divided by a power of two, row_unit, that brings it into the middle of float16.
for (int r = sg; r < 8; r += NSG) {
  const int row = min(first_row + r, rows - 1);
  const size_t head = batch * size_t(params[12]) * G + kv_head * G + row % G;
  device const T* from = query + (head * L + row / G) * D;
  threadgroup float* y = rotated + r * D;
  for (int i = lane; i < D; i += 32) y[i] = float(from[i]) * k_signs[i] * consts[0];
  hadamard<D>(y, k_mix, lane);
  float largest = 0.0f, sum = 0.0f;
  for (int i = lane; i < D; i += 32) {
    largest = max(largest, abs(y[i]));
    sum += y[i];
  }
  largest = simd_max(largest);
  sum = simd_sum(sum);
  const int exponent = clamp(int(as_type<uint>(largest) >> 23) - 127, -100, 100) - 13;
  for (int i = lane; i < D; i += 32) y[i] *= as_type<float>(uint(127 - exponent) << 23);
  if (lane == 0) {
    row_unit[r] = as_type<float>(uint(127 + exponent) << 23);
    row_sum[r] = sum;
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

// Fragments of the queries: for codes in registers, for uncoded rows in two parts that add up to more digits.
uint q[STEPS * 2];
#pragma unroll
for (int s = 0; s < STEPS; ++s) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int j = (2 * s + i) % KF, at = t * C + (2 * s + i) / KF * 2 * KF + j;
    const float factor = field_scale<field_width(KB), true>(j) / field_scale<field_width(KB), true>(0);
    q[2 * s + i] = pair_of<float16_t>(rotated[g * D + at] * factor, rotated[g * D + at + KF] * factor);
  }
}
for (int s = sg; s < STEPS; s += NSG) {
  for (int i = 0; i < 2; ++i) {
    const float low = rotated[g * D + 16 * s + 8 * i + 2 * t], high = rotated[g * D + 16 * s + 8 * i + 2 * t + 1];
    fragments[s * 128 + i * 32 + lane] = as_type<float>(pair_of<T>(low, high));
    fragments[s * 128 + i * 32 + 64 + lane] = as_type<float>(pair_of<T>(low - float(T(low)), high - float(T(high))));
  }
}
float unit[2], start_sum[2];
for (int i = 0; i < 2; ++i) {
  unit[i] = row_unit[2 * t + i];
  start_sum[i] = -row_sum[2 * t + i] * code_offset<KB, false>();  // makes the codes symmetric
}
threadgroup_barrier(mem_flags::mem_threadgroup);

const int pad = params[16 + batch * 4], first = params[17 + batch * 4], n_packed = params[18 + batch * 4];
const int n_exact = first + params[19 + batch * 4];
const size_t at_packed = slot * capacity, at_exact = slot * exact_capacity;
device const uint* k_rows = k_codes + at_packed * row_words(D, field_width(KB));
device const uint* v_rows = v_codes + at_packed * row_words(DV, field_width(VB));
device const uint* k_planes = k_plane + (KB == 3 ? at_packed * row_words(D, 1) : 0);
device const uint* v_planes = v_plane + (VB == 3 ? at_packed * row_words(DV, 1) : 0);
const auto k_scales = k_scale + at_packed;
const auto v_scales = v_scale + at_packed;
device const T* k_kept = k_exact + at_exact * D;
device const T* v_kept = v_exact + at_exact * DV;
const auto k_means = k_mean + (CENTERED ? slot * mean_pages * D : 0);

const int packed_blocks = (n_packed + 31) / 32, blocks = packed_blocks + (n_exact + 31) / 32;
const int share = (blocks + splits * NSG - 1) / (splits * NSG);
const int begin = (split * NSG + sg) * share, end = min(begin + share, blocks);
const int last_seen = columns - L + min(first_row + 7, rows - 1) / G;

// Accumulators, coordinate 2 i + h of this lane's in acc[i][2 h] and acc[i][2 h + 1]; value_unit: what a column's
// weights of codes are divided by, so that the largest fit float16 whatever the scales of the values are.
float acc[TILES * 4], top[2], denominator[2], weight_sum[2], mean_score[2], value_unit[2];
#pragma unroll
for (int i = 0; i < TILES * 4; ++i) acc[i] = 0.0f;
for (int i = 0; i < 2; ++i) {
  top[i] = LOWEST;
  denominator[i] = weight_sum[i] = mean_score[i] = value_unit[i] = 0.0f;
}

// The words of a block are read while the one before it is worked on: keys after its scores, values after its sums.
const int coded_end = min(end, packed_blocks);
uint k_words[4 * KW], k_bits[4 * KW], v_words[8 * VW], v_bits[8];
if (begin < coded_end) {
  load_keys<D, KB>(k_rows, k_planes, begin * 32, lane, k_words, k_bits);
  load_values<DV, VB>(v_rows, v_planes, begin * 32, lane, v_words, v_bits);
}
for (int block = begin; block < coded_end; ++block) {
  const int start = block * 32, next = min(block + 1, coded_end - 1) * 32;
  if (MASK == 1 && pad + first + start > last_seen) break;
  float k_factor[4], v_factor[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int token = start + 8 * i + g;
    k_factor[i] = float(k_scales[token]);
    v_factor[i] = token < n_packed ? float(v_scales[token]) : 0.0f;
  }
  if (CENTERED && (block == begin || start % PAGE == 0)) {
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    const auto mean = k_means + start / PAGE * D;
    plain_scores<STEPS, T>(mean, mean, fragments, lane, sums);
    mean_score[0] = sums[0] * unit[0];
    mean_score[1] = sums[1] * unit[1];
  }

  // Scores of token 8 i + g in score[2 i] and score[2 i + 1].
  float score[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) score[i] = 0.0f;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const int w = 2 * m * KW + 2 * s / KF, j = 2 * s % KF;
      uint keys[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        keys[i] = field_pair<KB>(k_words[w + i % 2 * KW], k_bits[w + i % 2 * KW], j + i / 2, j + i / 2);
      mma_16x8x16<float16_t>(score + 4 * m, keys, q + 2 * s);
    }
  }
  load_keys<D, KB>(k_rows, k_planes, next, lane, k_words, k_bits);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int token = start + 8 * (i / 2) + g, row = min(first_row + 2 * t + i % 2, rows - 1);
    float s = k_factor[i / 2] * fma(score[i], unit[i % 2] * CODE_UNIT, start_sum[i % 2]) + mean_score[i % 2];
    const bool seen = see<MASK, SOFTCAP>(
        s, token < n_packed, row, pad + first + token, mask, batch, kv_head, params, consts[1]);
    score[i] = seen ? s : -INFINITY;
  }
  raise_top<0>(score, top, denominator, value_unit, acc);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float p = exp2(score[i] - top[i % 2]);
    denominator[i % 2] += p;
    score[i] = p == 0.0f ? 0.0f : p * v_factor[i / 2];
  }
  float inverse[2];
  raise_unit<TILES>(score, value_unit, inverse, weight_sum, acc);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    uint weights[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float w[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        w[i] = float(float16_t(score[4 * m + 2 * h + i] * inverse[i]));
        weight_sum[i] += w[i];
      }
      weights[h] = transpose_8x8(pair_of<float16_t>(w[0], w[1]));
    }
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      const int e = 2 * i, w = e / (2 * VF), j = e % VF;
      uint values[4];
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        const int token = 4 * m + 2 * p;
        const uint codes = halves(v_words[token * VW + w], v_words[(token + 1) * VW + w], e / VF % 2);
        const uint bits = halves(v_bits[token], v_bits[token + 1], e / 16 % 2);
        values[2 * p] = field_pair<VB>(codes, bits, j, e % 16);
        values[2 * p + 1] = field_pair<VB>(codes, bits, j + 1, e % 16 + 1);
      }
      mma_16x8x16<float16_t>(acc + 4 * i, values, weights);
    }
  }
  load_values<DV, VB>(v_rows, v_planes, next, lane, v_words, v_bits);
}

// From here on the accumulators are plain numbers.
weight_sum[0] = over_tokens_sum(weight_sum[0]);
weight_sum[1] = over_tokens_sum(weight_sum[1]);
#pragma unroll
for (int i = 0; i < TILES * 4; ++i) {
  const float scale = field_scale<field_width(VB), true>(i / 2 % VF);
  acc[i] = fma(acc[i], scale, -weight_sum[i % 2] * code_offset<VB, false>()) * value_unit[i % 2];
}

// Exact rows: a number that 16 bits do not hold is multiplied as the sum of two that they hold. Rows past the live ones
// may hold anything, so none of those is read.
for (int block = max(begin, packed_blocks); block < end; ++block) {
  const int start = (block - packed_blocks) * 32;
  if (MASK == 1 && pad + (start < first ? start : n_packed + start) > last_seen) break;
  float score[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) score[i] = 0.0f;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const int token = start + 16 * m + g;
    plain_scores<STEPS, T>(
        k_kept + min(token, n_exact - 1) * D, k_kept + min(token + 8, n_exact - 1) * D, fragments, lane, score + 4 * m);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int token = start + 8 * (i / 2) + g, row = min(first_row + 2 * t + i % 2, rows - 1);
    float s = score[i] * unit[i % 2];
    const bool seen = see<MASK, SOFTCAP>(
        s, token < n_exact, row, pad + (token < first ? token : n_packed + token), mask, batch, kv_head, params,
        consts[1]);
    score[i] = seen ? s : -INFINITY;
  }
  raise_top<TILES>(score, top, denominator, value_unit, acc);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    uint weights[2], rest[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float low = exp2(score[4 * m + 2 * h] - top[0]), high = exp2(score[4 * m + 2 * h + 1] - top[1]);
      denominator[0] += low;
      denominator[1] += high;
      weights[h] = transpose_8x8(pair_of<T>(low, high));
      rest[h] = transpose_8x8(pair_of<T>(low - float(T(low)), high - float(T(high))));
    }
    uint words[4 * PAIRS];
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const int token = start + 16 * m + 8 * (p / 2) + 2 * t + p % 2;
      load_part<CV * 16>((device const uint*)(v_kept + min(token, n_exact - 1) * DV), g, words + p * PAIRS);
    }
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      uint values[4];
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        const uint a = words[2 * p * PAIRS + i], b = words[(2 * p + 1) * PAIRS + i];
        values[2 * p] = halves(a, b, false);
        values[2 * p + 1] = halves(a, b, true);
      }
      mma_16x8x16<T>(acc + 4 * i, values, weights);
      mma_16x8x16<T>(acc + 4 * i, values, rest);
    }
  }
}

// Add up the simdgroups and write, still rotated. Row r of 8 columns lies at 8 r in scratch, its columns shuffled so
// that neither writing nor reading meets a bank twice.
if (g == 0) {
  tops[sg * 8 + 2 * t] = top[0];
  tops[sg * 8 + 2 * t + 1] = top[1];
}
denominator[0] = over_tokens_sum(denominator[0]);
denominator[1] = over_tokens_sum(denominator[1]);
threadgroup_barrier(mem_flags::mem_threadgroup);
for (int i = 0; i < 2; ++i) {
  const int column = 2 * t + i;
  float most = top[i];
  for (int n = 0; n < NSG; ++n) most = max(most, tops[n * 8 + column]);
  const float shrink = exp2(top[i] - most);
#pragma unroll
  for (int r = 0; r < 2 * TILES; ++r)
    scratch[(sg * DV + 8 * r + g) * 8 + (column ^ (r & 7))] = acc[2 * r + i] * shrink;
  if (g == 0) totals[sg * 8 + column] = denominator[i] * shrink;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
const size_t out_row = slot * rows + first_row;
for (int i = sg * 32 + lane; i < 8 * DV; i += NSG * 32) {
  const int column = i / DV, d = i % DV, r = d % CV, from = (8 * r + d / CV) * 8 + (column ^ (r & 7));
  float sum = 0.0f;
  for (int n = 0; n < NSG; ++n) sum += scratch[n * DV * 8 + from];
  if (first_row + column < rows) partial[((out_row + column) * splits + split) * DV + d] = sum;
}
if (sg == 0 && lane < 8 && first_row + int(lane) < rows) {
  float most = LOWEST, total = 0.0f;
  for (int n = 0; n < NSG; ++n) {
    most = max(most, tops[n * 8 + lane]);
    total += totals[n * 8 + lane];
  }
  const size_t at = (out_row + lane) * splits + split;
  softmax[at * 2] = most;
  softmax[at * 2 + 1] = total;
}
