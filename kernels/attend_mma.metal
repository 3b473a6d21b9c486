// Attention of R query rows, 4 or 8, to a range of tokens by a threadgroup, on matrix units: partial results for
// merge.metal. It does what attend.metal does, for uniform codes and 16-bit rows.
//
// Each simdgroup walks a part of the range, 32 tokens at a time. The left factors are keys (token x coordinate) and
// transposed values (coordinate x token), the right factors queries and weights. Packed rows are multiplied as the
// whole numbers that codes are, 16 x 32 by 32 x 8, exact ones as they came, 16 x 16 by 16 x 8. A query and a weight
// take two neighbouring columns, which add up to more digits than one holds: of whole numbers the higher and the lower
// byte, of others the number and what its rounding leaves. So 8 columns are a set of 4 query rows; S sets share what is
// made of codes. Lane 4 g + t holds, of a tile's rows, g and g + 8, and of a result's columns those of query row t of a
// set. The order of coordinates in a product is free, so a lane takes those that lie side by side in memory.

constexpr int S = R / 4;
constexpr int C = D / 4, CV = DV / 8;  // coordinates of a key, and of a value, that a lane holds
constexpr int KL = C * field_width(KB) / 32, VL = (CV * field_width(VB) + 31) / 32;  // words that their fields lie in
constexpr int KP = (C + 31) / 32;  // words of a key's third bits
constexpr int KW = C / 8;  // words of 4 bits a code
constexpr int VF = VB == 2 ? 4 : 2, VBYTES = VB != 4 && CV == 8 ? 2 : 4, VW = CV / (VF * VBYTES);  // fields of a byte
constexpr int STEPS = D / 16, TILES = DV / 16, PAIRS = CV / 2;
const int G = params[0], L = params[1], columns = params[2], capacity = params[3], exact_capacity = params[4];
const int splits = params[5], tiles = params[6], mean_pages = params[7];

const uint lane = thread_index_in_simdgroup, sg = simdgroup_index_in_threadgroup;
const int g = lane / 4, t = lane % 4;
const int kv_head = threadgroup_position_in_grid.y, batch = threadgroup_position_in_grid.z;
const int tile = threadgroup_position_in_grid.x % tiles, split = threadgroup_position_in_grid.x / tiles;
const int first_row = tile * R, rows = G * L;
const size_t slot = batch * size_t(params[12]) + kv_head;  // which sequence of tokens

// First the rotated queries, behind them fragments of the plain ones and then of the rotated ones, in the end the sums
// of all simdgroups.
constexpr int ROTATED = R * D, FRAGMENTS = S * STEPS * 64, DIGITS = S * KW * 64;
// A row of sums has a gap behind each lane's, so that neither writing nor reading meets a bank twice.
constexpr int SUM_ROW = DV + 8, SUMS = NSG * R * SUM_ROW, QUERIES = ROTATED + FRAGMENTS + DIGITS;
TQ_THREADGROUP float scratch[QUERIES > SUMS ? QUERIES : SUMS];
TQ_THREADGROUP float row_unit[R], plain_unit[R], start_sum[R], tops[NSG * R], totals[NSG * R];
threadgroup float* rotated = scratch;
threadgroup float* fragments = scratch + ROTATED;
threadgroup float* digits = fragments + FRAGMENTS;

const Tokens tokens = tokens_of(params + 16 + batch * 8);
const int pad = tokens.pad, first = tokens.first, n_packed = tokens.packed, n_exact = tokens.exact;
const size_t at_packed = slot * capacity;
// Where this lane reads the first block of keys, values and scales.
constexpr int K_ROW = row_words(D, field_width(KB)) * 4, V_ROW = row_words(DV, field_width(VB)) * 4;  // bytes
constexpr int K_PLANE = KB == 3 ? D / 8 : 0, V_PLANE = VB == 3 ? DV / 8 : 0;
const Range blocks = range_of(split * NSG + sg, tokens);
const int begin = blocks.begin, coded_end = blocks.coded ? blocks.end : begin;
const size_t k_token = at_packed + begin * 32 + 4 * g, v_token = at_packed + begin * 32 + 8 * t;
device const uchar* k_rows = (device const uchar*)k_codes + k_token * K_ROW + t * (K_ROW / 4);
device const uchar* v_rows = (device const uchar*)v_codes + v_token * V_ROW + g * (V_ROW / 8);
device const uchar* k_planes = (device const uchar*)k_plane + k_token * K_PLANE + t * (K_PLANE / 4);
device const uchar* v_planes = (device const uchar*)v_plane + v_token * V_PLANE + g * (V_PLANE / 8);
device const uchar* k_scales = (device const uchar*)(k_scale + k_token);
device const uchar* v_scales = (device const uchar*)(v_scale + k_token);
const auto k_means = k_mean + (CENTERED ? slot * mean_pages * D : 0);

const int last_seen = columns - L + min(first_row + R - 1, rows - 1) / G;

// The words of a block are read while the one before it is worked on, of the first block while queries are rotated.
uint k_words[4 * KL], k_bits[4 * KP], k_scale_words[2], v_words[8 * VL], v_bits[8], v_scale_words[2];
if (begin < coded_end) {
  load_keys<D, KB>(k_rows, k_planes, k_words, k_bits);
  load_part<64>(k_scales, k_scale_words);
  load_part<64>(v_scales, v_scale_words);
  load_values<DV, VB>(v_rows, v_planes, v_words, v_bits);
}

// Scores of packed rows without mask and cap are in base 2 from the start.
constexpr bool PLAIN = MASK == 0 && !SOFTCAP;
constexpr float BASE = PLAIN ? LOG2E : 1.0f;

// Queries as they came for exact rows and means, in units that bring each row into the middle of float16; rotated for
// codes, in units that make whole numbers of 16 bits of them.
for (int r = sg; r < R; r += NSG) {
  const bool there = first_row + r < rows;
  device const T* from = query + size_t(query_at(slot, there ? first_row + r : 0, G, L)) * D;
  threadgroup float* y = rotated + r * D;
  const int set = r / 4, column = r % 4 * 2;
  float largest = 0.0f, sum = 0.0f;
  for (int i = lane; i < D; i += 32) {
    y[i] = there ? float(from[i]) * consts[0] : 0.0f;
    largest = max(largest, abs(y[i]));
  }
  const int plain = middle_exponent(simd_max(largest));
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (int p = lane; p < D / 2; p += 32) {
    const float low = y[2 * p] * power_of_two(-plain), high = y[2 * p + 1] * power_of_two(-plain);
    threadgroup float* to = fragments + (p / 8 * S + set) * 64 + p / 4 % 2 * 32 + 4 * column + p % 4;
    to[0] = as_type<float>(pair_of<T>(low, high));
    to[4] = as_type<float>(pair_of<T>(low - float(T(low)), high - float(T(high))));
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  rotate_row<D>(y, k_signs, k_mix, consts[4], lane);
  largest = 0.0f;
  for (int i = lane; i < D; i += 32) largest = max(largest, abs(y[i]));
  const float unit = max(simd_max(largest), 1e-33f) / MOST_QUERY;
  for (int p = lane; p < D / 4; p += 32) {
    const int word = p / 8, field = p / 4 % 2;
    uint high = 0, low = 0;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const float x = rint(y[p % 4 * C + coordinate_of<KB>(word, b, field)] / unit);
      const int whole = isfinite(x) ? int(x) : 0;
      sum += x;
      high |= uint((whole + 128) >> 8 & 0xFF) << 8 * b;
      low |= uint(whole & 0xFF) << 8 * b;
    }
    threadgroup float* to = digits + (set * KW + word / 2 * 2 + field) * 64 + word % 2 * 32 + 4 * column + p % 4;
    to[0] = as_type<float>(high);
    to[4] = as_type<float>(low);
  }
  sum = simd_sum(sum);
  if (lane == 0) {
    plain_unit[r] = power_of_two(plain);
    row_unit[r] = unit * (BASE / 16);  // sums of keys are 16 times as large
    start_sum[r] = -sum * unit * (code_offset<KB, false>() * BASE);  // makes the codes symmetric
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

// Bytes of the rotated queries, for the lower fields of two words and then for the higher ones.
uint q[S * KW * 2];
#pragma unroll
for (int i = 0; i < S * KW * 2; ++i) q[i] = as_type<uint>(digits[i * 32 + lane]);
float unit[S], sum[S], mean_score[S], top[S], denominator[S], gain[S];
#pragma unroll
for (int s = 0; s < S; ++s) {
  unit[s] = row_unit[4 * s + t];
  sum[s] = start_sum[4 * s + t];
  mean_score[s] = 0.0f;
  top[s] = LOWEST;
  denominator[s] = 0.0f;
  gain[s] = MOST_GAIN;
}

// Sums of weights times fields of bytes, each with the fields below it, two fields a tile: of tile i in whole[4 i] (the
// lower field, the higher digit), [4 i + 1] (the lower digit), [4 i + 2] and [4 i + 3]; and sums of weights. gain: the
// factor of a row's weights, so that the largest fit 16 bits whatever the scales of the values; carry: what their
// rounding has left. A simdgroup reads at most 32768 packed tokens (kernels._MMA_SHARE), so that 32 bits hold the sums.
int whole[S * TILES * 4];
uint total[S];
float carry[S];
#pragma unroll
for (int i = 0; i < S * TILES * 4; ++i) whole[i] = 0;
for (int s = 0; s < S; ++s) {
  total[s] = 0;
  carry[s] = first_carry(g);
}

// The scores of 16 pages' means are made at a time, and kept where the rotated queries were.
threadgroup float* mean_scores = rotated + sg * (16 * R);
const int last_page = (coded_end * 32 - 1) / PAGE;
for (int block = begin; block < coded_end; ++block) {
  const int start = block * 32;
  const size_t step = uint(min(1, coded_end - 1 - block));
  if (MASK == 1 && pad + first + start > last_seen) break;
  if (CENTERED && (block == begin || uint(start) % PAGE == 0)) {
    const uint page = uint(start) / PAGE, at = (page - uint(begin) * 32 / PAGE) % 16;
    if (at == 0) {
      const int low = min(int(page) + g, last_page), high = min(int(page) + g + 8, last_page);
      float scores[2 * S];
      plain_scores<STEPS, 4, S, T>(k_means + low * D, k_means + high * D, fragments, lane, scores);
      simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
      for (int i = 0; i < 2 * S; ++i) {
        const int row = i / 2 * 4 + t;
        mean_scores[(g + i % 2 * 8) * R + row] = scores[i] * (plain_unit[row] * BASE);
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);
    }
#pragma unroll
    for (int s = 0; s < S; ++s) mean_score[s] = mean_scores[at * R + 4 * s + t];
  }

  // Scores of token 4 g + i and set s in score[4 s + i].
  float score[4 * S];
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    int low[4 * S], high[4 * S];
#pragma unroll
    for (int i = 0; i < 4 * S; ++i) low[i] = high[i] = 0;
#pragma unroll
    for (int w = 0; w < KW; w += 2) {
      uint low_fields[4], high_fields[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = 2 * m + i % 2;
        const uint word = four_bits<KB>(k_words + token * KL, k_bits + token * KP, w + i / 2);
        low_fields[i] = word & LOW_FIELDS;
        high_fields[i] = without(word, low_fields[i]);
      }
#pragma unroll
      for (int s = 0; s < S; ++s) {
        mma_16x8x32<char>(low + 4 * s, low_fields, q + (s * KW + w) * 2);
        mma_16x8x32<char>(high + 4 * s, high_fields, q + (s * KW + w) * 2 + 2);
      }
    }
#pragma unroll
    for (int i = 0; i < 2 * S; ++i) {
      const int even = 16 * low[2 * i] + high[2 * i], odd = 16 * low[2 * i + 1] + high[2 * i + 1];
      score[i / 2 * 4 + 2 * m + i % 2] = float(256 * even + odd);
    }
  }
  float factor[4];
  scales_of(k_scale, k_scale_words, factor);
  k_rows += step * (32 * K_ROW);
  k_planes += step * (32 * K_PLANE);
  k_scales += step * 64;
  load_keys<D, KB>(k_rows, k_planes, k_words, k_bits);
  load_part<64>(k_scales, k_scale_words);
#pragma unroll
  for (int i = 0; i < 4 * S; ++i)
    score[i] = fma(factor[i % 4], fma(score[i], unit[i / 4], sum[i / 4]), mean_score[i / 4]);
  scales_of(v_scale, v_scale_words, factor);
  v_scales += step * 64;
  load_part<64>(v_scales, v_scale_words);
  if (!PLAIN || block >= n_packed / 32) {
    simdgroup_barrier(mem_flags::mem_none);  // keeps this a branch, else all blocks would take its instructions
#pragma unroll
    for (int i = 0; i < 4 * S; ++i) {
      const int token = start + 4 * g + i % 4, row = min(first_row + i / 4 * 4 + t, rows - 1);
      const bool live = token < n_packed;
      const bool seen = PLAIN ? live
                              : see<MASK, SOFTCAP>(
                                    score[i], live, row, pad + first + token, mask, batch, kv_head, params, consts[1]);
      if (!seen) score[i] = -INFINITY;
      if (!live) factor[i % 4] = 0.0f;
    }
  }
  float weight[4 * S], sums[S];
  if (simd_any(weigh<S, MASK>(score, factor, top, gain, weight, sums))) {
    float shrink[S];
    raise_top<S>(score, top, denominator, shrink);
    weigh<S, MASK>(score, factor, top, gain, weight, sums);
    choose_gain<S, 2 * TILES>(weight, shrink, g, gain, carry, total, whole);
  }
#pragma unroll
  for (int s = 0; s < S; ++s) denominator[s] += sums[s];
  uint weights[2 * S];
#pragma unroll
  for (int s = 0; s < S; ++s) whole_weights(weight + 4 * s, gain[s], carry + s, total + s, weights + 2 * s);
#pragma unroll
  for (int i = 0; i < 2 * S; ++i) weights[i] = transpose_8x8(weights[i]);
#pragma unroll
  for (int w = 0; w < VW; ++w) {
    uint bytes[8];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        thread const uint* from = v_words + (4 * h + i) * VL;
        words[i] = VB == 2 ? from[w] : four_bits<VB>(from, v_bits + 4 * h + i, w);
      }
      transpose_bytes(words, bytes + 4 * h);
    }
#pragma unroll
    for (int i = 0; i < VBYTES * VF / 2; ++i) {
      uint values[4];
#pragma unroll
      for (int h = 0; h < 4; ++h)
        values[h] = bytes[i / (VF / 2) + h / 2 * 4] & fields_up_to(8 / VF * (2 * i % VF + h % 2 + 1));
#pragma unroll
      for (int s = 0; s < S; ++s)
        mma_16x8x32<uchar>(whole + (s * TILES + w * VBYTES * VF / 2 + i) * 4, values, weights + 2 * s);
    }
  }
  v_rows += step * (32 * V_ROW);
  v_planes += step * (32 * V_PLANE);
  load_values<DV, VB>(v_rows, v_planes, v_words, v_bits);
}

// From here on accumulators are plain numbers: a row's sum for coordinate i of this lane's is acc[2 i] + acc[2 i + 1].
float acc[S * TILES * 4];
#pragma unroll
for (int s = 0; s < S; ++s) {
  const float inverse = 1.0f / gain[s], offset = float(over_tokens_sum(total[s])) * code_offset<VB, false>();
  denominator[s] += carry[s] * 0.0f;  // where a weight is no number, its row is none
#pragma unroll
  for (int i = 0; i < 2 * TILES; ++i) {
    thread const int* sums = whole + s * TILES * 4 + 2 * i;
    const int field = i % VF;  // comes with the lower fields of its byte
    const float high = float(sums[0] - (field ? sums[-2] : 0)), low = float(sums[1] - (field ? sums[-1] : 0));
    const int coordinate = VB == 2 ? i : coordinate_of<VB>(i / 2 / VBYTES, i / 2 % VBYTES, field);
    acc[s * TILES * 4 + 2 * coordinate] = (fma(256.0f, high, low) / (1 << 8 / VF * field) - offset) * inverse;
    acc[s * TILES * 4 + 2 * coordinate + 1] = 0.0f;
  }
}

// Exact rows. Those past the live ones may hold anything, so none of those is read.
device const T* k_kept = k_exact + slot * exact_capacity * D;
device const T* v_kept = v_exact + slot * exact_capacity * DV;
for (int block = coded_end; block < blocks.end; ++block) {
  const int start = block * 32;
  if (MASK == 1 && pad + (start < first ? start : n_packed + start) > last_seen) break;
  // Scores of token 8 i + g and set s in score[4 s + i].
  float score[4 * S];
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const int token = start + 16 * m + g;
    float scores[2 * S];
    plain_scores<STEPS, STEPS < 8 ? STEPS : 8, S, T>(
        k_kept + min(token, n_exact - 1) * D, k_kept + min(token + 8, n_exact - 1) * D, fragments, lane, scores);
#pragma unroll
    for (int i = 0; i < 2 * S; ++i) score[i / 2 * 4 + 2 * m + i % 2] = scores[i];
  }
#pragma unroll
  for (int i = 0; i < 4 * S; ++i) {
    const int token = start + 8 * (i % 4) + g, column = i / 4 * 4 + t, row = min(first_row + column, rows - 1);
    float s = score[i] * plain_unit[column];
    const bool seen = see<MASK, SOFTCAP>(
        s, token < n_exact, row, pad + (token < first ? token : n_packed + token), mask, batch, kv_head, params,
        consts[1]);
    score[i] = seen ? s : -INFINITY;
  }
  float shrink[S];
  if (simd_any(any_above<S>(score, top))) {
    raise_top<S>(score, top, denominator, shrink);
#pragma unroll
    for (int i = 0; i < S * TILES * 4; ++i) acc[i] *= shrink[i / (TILES * 4)];
  }
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    uint weights[2 * S];
#pragma unroll
    for (int i = 0; i < 2 * S; ++i) {
      const float p = exp2(score[i / 2 * 4 + 2 * m + i % 2] - top[i / 2]);
      denominator[i / 2] += p;
      weights[i] = transpose_8x8(pair_of<T>(p, p - float(T(p))));
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
#pragma unroll
      for (int s = 0; s < S; ++s) mma_16x8x16<T>(acc + (s * TILES + i) * 4, values, weights + 2 * s);
    }
  }
}

// Add up the simdgroups.
#pragma unroll
for (int s = 0; s < S; ++s) {
  denominator[s] = over_tokens_sum(denominator[s]);
  if (g == 0) tops[sg * R + 4 * s + t] = top[s];
}
threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
for (int s = 0; s < S; ++s) {
  const int row = 4 * s + t;
  float most = top[s];
  for (int n = 0; n < NSG; ++n) most = max(most, tops[n * R + row]);
  const float shrink = exp2(top[s] - most);
  threadgroup float* to = scratch + (sg * R + row) * SUM_ROW + g * (CV + 1);
#pragma unroll
  for (int i = 0; i < CV; ++i)
    to[i] = (acc[s * TILES * 4 + 2 * i] + acc[s * TILES * 4 + 2 * i + 1]) * shrink;
  if (g == 0) totals[sg * R + row] = denominator[s] * shrink;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
constexpr int N = DV * R / (32 * NSG);  // sums of a lane
const int coders = clamp(tokens.coders - split * NSG, 0, NSG), rows_here = min(R, rows - first_row);
float coded_sum[N], exact_sum[N];
#pragma unroll
for (int n = 0; n < N; ++n) {
  const int i = (n * NSG + sg) * 32 + lane, d = i % DV, from = i / DV * SUM_ROW + d + d / CV;
  coded_sum[n] = exact_sum[n] = 0.0f;
  for (int m = 0; m < NSG; ++m) (m < coders ? coded_sum[n] : exact_sum[n]) += scratch[m * R * SUM_ROW + from];
}
threadgroup_barrier(mem_flags::mem_threadgroup);

// Rotate back what codes gave, and write.
#pragma unroll
for (int n = 0; n < N; ++n) scratch[(n * NSG + sg) * 32 + lane] = coded_sum[n];
threadgroup_barrier(mem_flags::mem_threadgroup);
for (int row = sg; row < (coders > 0 ? rows_here : 0); row += NSG)
  rotate_row_back<DV>(scratch + row * DV, v_signs, v_mix, consts[3], lane);
threadgroup_barrier(mem_flags::mem_threadgroup);
const size_t out_row = slot * rows + first_row;
#pragma unroll
for (int n = 0; n < N; ++n) {
  const int i = (n * NSG + sg) * 32 + lane, row = i / DV;
  if (row < rows_here) partial[((out_row + row) * splits + split) * DV + i % DV] = scratch[i] + exact_sum[n];
}
if (sg == 0 && int(lane) < rows_here) {
  float most = LOWEST, sum_of_all = 0.0f;
  for (int n = 0; n < NSG; ++n) {
    most = max(most, tops[n * R + lane]);
    sum_of_all += totals[n * R + lane];
  }
  device float* softmax = partial + softmax_at(params, DV);
  const size_t at = (out_row + lane) * splits + split;
  softmax[at * 2] = most;
  softmax[at * 2 + 1] = sum_of_all;
}
