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

// First the rotated queries and behind them fragments of the plain ones, in the end the sums of all simdgroups.
constexpr int ROTATED = 8 * D, FRAGMENTS = STEPS * 128, SUMS = NSG * DV * 8;
threadgroup float scratch[ROTATED + FRAGMENTS > SUMS ? ROTATED + FRAGMENTS : SUMS];
threadgroup float row_unit[8], plain_unit[8], start_sum[8], tops[NSG * 8], totals[NSG * 8];
threadgroup float* rotated = scratch;
threadgroup float* fragments = scratch + ROTATED;

const Tokens tokens = tokens_of(params + 16 + batch * 8);
const int pad = tokens.pad, first = tokens.first, n_packed = tokens.packed, n_exact = tokens.exact;
const size_t at_packed = slot * capacity;
// Where this lane reads the first block of keys, values and scales.
constexpr int K_ROW = row_words(D, field_width(KB)) * 4, V_ROW = row_words(DV, field_width(VB)) * 4;  // bytes
constexpr int K_PLANE = KB == 3 ? D / 8 : 0, V_PLANE = VB == 3 ? DV / 8 : 0;
const size_t k_token = at_packed + 4 * g, v_token = at_packed + 8 * t;
device const uchar* k_rows = (device const uchar*)k_codes + k_token * K_ROW + t * (K_ROW / 4);
device const uchar* v_rows = (device const uchar*)v_codes + v_token * V_ROW + g * (V_ROW / 8);
device const uchar* k_planes = (device const uchar*)k_plane + k_token * K_PLANE + t * (K_PLANE / 4);
device const uchar* v_planes = (device const uchar*)v_plane + v_token * V_PLANE + g * (V_PLANE / 8);
device const uchar* k_scales = (device const uchar*)(k_scale + k_token);
device const uchar* v_scales = (device const uchar*)(v_scale + k_token);
const auto k_means = k_mean + (CENTERED ? slot * mean_pages * D : 0);

const Range blocks = range_of(split * NSG + sg, tokens);
const int begin = blocks.begin, coded_end = blocks.coded ? blocks.end : begin;
const int last_seen = columns - L + min(first_row + 7, rows - 1) / G;

// The words of a block are read while the one before it is worked on, of the first block while queries are rotated.
uint k_words[4 * KW], k_bits[4 * KW], v_words[8 * VW], v_bits[8];
if (begin < coded_end) {
  const int start = begin * 32;
  load_keys<D, KB>(k_rows + start * K_ROW, k_planes + start * K_PLANE, k_words, k_bits);
  load_values<DV, VB>(v_rows + start * V_ROW, v_planes + start * V_PLANE, v_words, v_bits);
}

// Scores of packed rows without mask and cap are in base 2 from the start.
constexpr bool PLAIN = MASK == 0 && !SOFTCAP;
constexpr float BASE = PLAIN ? LOG2E : 1.0f;

// Queries as they came for exact rows and means, rotated for codes. Each row is divided by a power of two, plain_unit and
// row_unit, that brings it into the middle of float16. Fragments of the plain ones have two parts that add up to more
// digits.
for (int r = sg; r < 8; r += NSG) {
  const bool there = first_row + r < rows;
  device const T* from = query_row(query, slot, there ? first_row + r : 0, G, L, D);
  threadgroup float* y = rotated + r * D;
  float largest = 0.0f, sum = 0.0f;
  for (int i = lane; i < D; i += 32) {
    y[i] = there ? float(from[i]) * consts[0] : 0.0f;
    largest = max(largest, abs(y[i]));
  }
  const int plain = middle_exponent(simd_max(largest));
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (int p = lane; p < D / 2; p += 32) {
    const float low = y[2 * p] * power_of_two(-plain), high = y[2 * p + 1] * power_of_two(-plain);
    threadgroup float* to = fragments + p / 8 * 128 + p / 4 % 2 * 32 + 4 * r + p % 4;
    to[0] = as_type<float>(pair_of<T>(low, high));
    to[64] = as_type<float>(pair_of<T>(low - float(T(low)), high - float(T(high))));
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  rotate_row<D>(y, k_signs, k_mix, consts[4], lane);
  largest = 0.0f;
  for (int i = lane; i < D; i += 32) {
    largest = max(largest, abs(y[i]));
    sum += y[i];
  }
  const int exponent = middle_exponent(simd_max(largest));
  sum = simd_sum(sum);
  for (int i = lane; i < D; i += 32) y[i] *= power_of_two(-exponent);
  if (lane == 0) {
    plain_unit[r] = power_of_two(plain);
    row_unit[r] = power_of_two(exponent);
    start_sum[r] = -sum * (code_offset<KB, false>() * BASE);  // makes the codes symmetric
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

// Fragments of the rotated queries, each less the share that the next field of its byte brings along.
uint q[STEPS * 2];
#pragma unroll
for (int s = 0; s < STEPS; ++s) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int j = (2 * s + i) % KF, place = field_place<KB>(j);
    threadgroup const float* y = rotated + g * D + t * C + (2 * s + i) / KF * 2 * KF + j;
    const float factor = 1.0f / (1 << place), next = factor / (1 << field_width(KB));
    const bool alone = KB == 3 || place + field_width(KB) == 8;
    q[2 * s + i] = pair_of<float16_t>(
        y[0] * factor - (alone ? 0.0f : y[1] * next), y[KF] * factor - (alone ? 0.0f : y[KF + 1] * next));
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

// Accumulators, coordinate 2 i + h of this lane's in acc[4 i + 2 h] and acc[4 i + 2 h + 1], behind them the sums of the
// weights; gain: the factor of a column's weights, so that the largest fit float16 whatever the scales of the values.
float acc[TILES * 4 + 4], top[2], denominator[2], gain[2];
#pragma unroll
for (int i = 0; i < TILES * 4 + 4; ++i) acc[i] = 0.0f;
for (int i = 0; i < 2; ++i) {
  top[i] = LOWEST;
  denominator[i] = 0.0f;
  gain[i] = MOST_GAIN;
}
const uint ones[4] = {0x3C003C00u, 0x3C003C00u, 0x3C003C00u, 0x3C003C00u};

// The scores of 16 pages' means are made at a time, and kept where the rotated queries were.
threadgroup float* mean_scores = rotated + sg * 128;
const int last_page = (coded_end * 32 - 1) / PAGE;
for (int block = begin; block < coded_end; ++block) {
  const int start = block * 32, next = min(block + 1, coded_end - 1) * 32;
  if (MASK == 1 && pad + first + start > last_seen) break;
  const uint page = uint(start) / PAGE, at = (page - uint(begin) * 32 / PAGE) % 16;
  if (CENTERED && at == 0 && (block == begin || uint(start) % PAGE == 0)) {
    const int low = min(int(page) + g, last_page), high = min(int(page) + g + 8, last_page);
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    plain_scores<STEPS, 4, T>(k_means + low * D, k_means + high * D, fragments, lane, sums);
    simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      mean_scores[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = sums[i] * (plain_unit[2 * t + i % 2] * BASE);
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }

  uint k_scale_words[2], v_scale_words[2];
  load_part<64>(k_scales + start * 2, k_scale_words);
  load_part<64>(v_scales + start * 2, v_scale_words);

  // Scores of token 4 g + i in score[2 i] and score[2 i + 1].
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
  load_keys<D, KB>(k_rows + next * K_ROW, k_planes + next * K_PLANE, k_words, k_bits);
  float factor[4], unit[2], sum[2], mean_score[2];
  for (int i = 0; i < 2; ++i) {
    unit[i] = row_unit[2 * t + i] * (CODE_UNIT * BASE);
    sum[i] = start_sum[2 * t + i];
    mean_score[i] = CENTERED ? mean_scores[at * 8 + 2 * t + i] : 0.0f;
  }
  scales_of(k_scale, k_scale_words, factor);
#pragma unroll
  for (int i = 0; i < 8; ++i)
    score[i] = fma(factor[i / 2], fma(score[i], unit[i % 2], sum[i % 2]), mean_score[i % 2]);
  scales_of(v_scale, v_scale_words, factor);
  if (!PLAIN || start + 32 > n_packed) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int token = start + 4 * g + i / 2, row = min(first_row + 2 * t + i % 2, rows - 1);
      const bool live = token < n_packed;
      const bool seen = PLAIN ? live
                              : see<MASK, SOFTCAP>(
                                    score[i], live, row, pad + first + token, mask, batch, kv_head, params, consts[1]);
      if (!seen) score[i] = -INFINITY;
      if (!live) factor[i / 2] = 0.0f;
    }
  }
  raise_top<0>(score, top, denominator, gain, acc);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float p = exp2(score[i] - top[i % 2]);
    denominator[i % 2] += p;
    score[i] = MASK != 0 && p == 0.0f ? 0.0f : p * factor[i / 2];
  }
  lower_gain<TILES + 1>(score, gain, acc);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    uint weights[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int i = 4 * m + 2 * h;
      weights[h] = transpose_8x8(pair_of<float16_t>(score[i] * gain[0], score[i + 1] * gain[1]));
    }
    mma_16x8x16<float16_t>(acc + 4 * TILES, ones, weights);
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
  load_values<DV, VB>(v_rows + next * V_ROW, v_planes + next * V_PLANE, v_words, v_bits);
}

// From here on the accumulators are plain numbers, each without the fields below it.
const float inverse[2] = {1.0f / gain[0], 1.0f / gain[1]};
#pragma unroll
for (int i = TILES * 4 - 1; i >= 0; --i) {
  const int place = field_place<VB>(i / 2);
  const float sum = VB == 3 || place == 0 ? acc[i] : acc[i] - acc[i >= 2 ? i - 2 : 0];
  acc[i] = fma(sum, CODE_UNIT / (1 << place), -acc[4 * TILES + i % 2] * code_offset<VB, false>()) * inverse[i % 2];
}

// Exact rows: a number that 16 bits do not hold is multiplied as the sum of two that they hold. Rows past the live ones
// may hold anything, so none of those is read.
device const T* k_kept = k_exact + slot * exact_capacity * D;
device const T* v_kept = v_exact + slot * exact_capacity * DV;
for (int block = coded_end; block < blocks.end; ++block) {
  const int start = block * 32;
  if (MASK == 1 && pad + (start < first ? start : n_packed + start) > last_seen) break;
  float score[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) score[i] = 0.0f;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const int token = start + 16 * m + g;
    plain_scores<STEPS, STEPS < 8 ? STEPS : 8, T>(
        k_kept + min(token, n_exact - 1) * D, k_kept + min(token + 8, n_exact - 1) * D, fragments, lane, score + 4 * m);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int token = start + 8 * (i / 2) + g, row = min(first_row + 2 * t + i % 2, rows - 1);
    float s = score[i] * plain_unit[2 * t + i % 2];
    const bool seen = see<MASK, SOFTCAP>(
        s, token < n_exact, row, pad + (token < first ? token : n_packed + token), mask, batch, kv_head, params,
        consts[1]);
    score[i] = seen ? s : -INFINITY;
  }
  raise_top<TILES>(score, top, denominator, gain, acc);
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
      load_part<CV * 16>((device const uchar*)(v_kept + min(token, n_exact - 1) * DV + g * CV), words + p * PAIRS);
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

// Add up the simdgroups. Row r of 8 columns lies at 8 r in scratch, its columns shuffled so that neither writing nor
// reading meets a bank twice.
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
constexpr int N = DV / (4 * NSG);  // sums of a lane
const int coders = clamp(tokens.coders - split * NSG, 0, NSG), columns_here = min(8, rows - first_row);
float coded_sum[N], exact_sum[N];
#pragma unroll
for (int n = 0; n < N; ++n) {
  const int i = (n * NSG + sg) * 32 + lane, column = i / DV, d = i % DV, r = d % CV;
  const int from = (8 * r + d / CV) * 8 + (column ^ (r & 7));
  coded_sum[n] = exact_sum[n] = 0.0f;
  for (int m = 0; m < NSG; ++m) (m < coders ? coded_sum[n] : exact_sum[n]) += scratch[m * DV * 8 + from];
}
threadgroup_barrier(mem_flags::mem_threadgroup);

// Rotate back what codes gave, and write.
#pragma unroll
for (int n = 0; n < N; ++n) scratch[(n * NSG + sg) * 32 + lane] = coded_sum[n];
threadgroup_barrier(mem_flags::mem_threadgroup);
for (int column = sg; column < (coders > 0 ? columns_here : 0); column += NSG)
  rotate_row_back<DV>(scratch + column * DV, v_signs, v_mix, consts[3], lane);
threadgroup_barrier(mem_flags::mem_threadgroup);
const size_t out_row = slot * rows + first_row;
#pragma unroll
for (int n = 0; n < N; ++n) {
  const int i = (n * NSG + sg) * 32 + lane, column = i / DV;
  if (column < columns_here) partial[((out_row + column) * splits + split) * DV + i % DV] = scratch[i] + exact_sum[n];
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
