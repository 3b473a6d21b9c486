// Attention of R query rows to a range of tokens, by one simdgroup: a partial result for merge.metal.
//
// The tokens are walked 32 at a time. LK lanes share a key, C coordinates each; a transposing butterfly then gives each
// lane the score of one key, for the softmax; values are read as keys are. A decoded row serves all R query rows.

constexpr int C = chunk(D), LK = lanes(D), CV = chunk(DV), LV = lanes(DV);
const int G = params[0], L = params[1], columns = params[2], capacity = params[3], exact_capacity = params[4];
const int splits = params[5], tiles = params[6], mean_pages = params[7];

const uint lane = thread_index_in_simdgroup, sg = simdgroup_index_in_threadgroup;
const int item = threadgroup_position_in_grid.x * NSG + sg;
const int kv_head = threadgroup_position_in_grid.y, batch = threadgroup_position_in_grid.z;
const int tile = item % tiles, split = item / tiles;
const size_t slot = batch * size_t(params[12]) + kv_head;  // which sequence of tokens

threadgroup float scratch[NSG * R * D];
threadgroup float levels[32];
if (sg == 0) levels[lane] = consts[8 + lane];
threadgroup_barrier(mem_flags::mem_threadgroup);
if (split >= splits) return;

// Read the queries, rotate them, and keep this lane's coordinates.
threadgroup float* rotated = scratch + sg * R * D;
const int first_row = tile * R, rows = G * L;
for (int r = 0; r < R; ++r) {
  const int row = min(first_row + r, rows - 1);
  const size_t head = batch * size_t(params[12]) * G + kv_head * G + row % G;
  device const T* from = query + (head * L + row / G) * D;
  for (int i = lane; i < D; i += 32) rotated[r * D + i] = float(from[i]) * k_signs[i] * consts[0];
  hadamard<D>(rotated + r * D, k_mix, lane);
}
const int kl = lane % LK, kg = lane / LK, vl = lane % LV, vg = lane / LV;
const int k_chunk = min(kl, D / C - 1), v_chunk = min(vl, DV / CV - 1);
float q[R * C], start_sum[QJL ? 2 * R : R];
#pragma unroll
for (int r = 0; r < R; ++r) {
  float sum = 0.0f;
#pragma unroll
  for (int e = 0; e < C; ++e) {
    const float x = kl * C < D ? rotated[r * D + k_chunk * C + e] : 0.0f;
    sum += x;
    q[r * C + e] = x * coordinate_scale<KB, LLOYD, DENORMAL>(e);
  }
  start_sum[r] = -sum * code_offset<KB, LLOYD>();  // makes the codes symmetric
}
float q_jl[QJL ? R * C : 1];
if (QJL) {
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (int r = 0; r < R; ++r) {
    for (int i = lane; i < D; i += 32) rotated[r * D + i] *= k_jl_signs[i] * consts[2];
    hadamard<D>(rotated + r * D, k_mix, lane);
  }
#pragma unroll
  for (int r = 0; r < R; ++r) {
    float sum = 0.0f;
#pragma unroll
    for (int e = 0; e < C; ++e) {
      const float x = kl * C < D ? rotated[r * D + k_chunk * C + e] : 0.0f;
      sum += x;
      q_jl[QJL ? r * C + e : 0] = x * 2.0f * field_scale<1, DENORMAL>(e % (C / 2));
    }
    start_sum[QJL ? R + r : 0] = -sum;  // a bit that is not set counts -1
  }
}

// Where the tokens of this batch row are. Offsets within a sequence have 32 bits, those of sequences 64.
const int pad = params[16 + batch * 4], first = params[17 + batch * 4], n_packed = params[18 + batch * 4];
const int n_exact = first + params[19 + batch * 4];
const size_t at_packed = slot * capacity, at_exact = slot * exact_capacity;
const auto k_rows = k_codes + at_packed * row_size(D, KB);
const auto v_rows = v_codes + at_packed * row_size(DV, VB);
const auto k_planes = k_plane + (KB == 3 ? at_packed * row_words(D, 1) : 0);
const auto v_planes = v_plane + (VB == 3 ? at_packed * row_words(DV, 1) : 0);
const auto k_sketches = k_jl + (QJL ? at_packed * row_words(D, 1) : 0);
const auto k_scales = k_scale + at_packed;
const auto k_residuals = k_residual + at_packed;
const auto v_scales = v_scale + at_packed;
const auto k_kept = k_exact + at_exact * D;
const auto v_kept = v_exact + at_exact * DV;
const auto k_means = k_mean + slot * mean_pages * D;

const int packed_blocks = (n_packed + 31) / 32, blocks = packed_blocks + (n_exact + 31) / 32;
const int share = (blocks + splits - 1) / splits;
const int begin = split * share, end = min(begin + share, blocks);
const int last_seen = columns - L + min(first_row + R - 1, rows - 1) / G;

float acc[R * CV], top[R], denominator[R], mean_score[R];
#pragma unroll
for (int r = 0; r < R; ++r) {
  top[r] = LOWEST;
  denominator[r] = mean_score[r] = 0.0f;
#pragma unroll
  for (int e = 0; e < CV; ++e) acc[r * CV + e] = 0.0f;
}

for (int block = begin; block < end; ++block) {
  const bool coded = block < packed_blocks;
  const int start = (coded ? block : block - packed_blocks) * 32, live = coded ? n_packed : n_exact;
  const int token = start + int(lane);
  const int column = pad + (coded ? first + token : token < first ? token : n_packed + token);
  if (MASK == 1 && pad + (coded ? first + start : start < first ? start : n_packed + start) > last_seen) continue;

  // Scores: this lane ends up with that of `token`. Packed rows may be read past the live ones, to a multiple of 32.
  float score[R];
  if (coded) {
    const uint at = start + kg * LK;
    float sums[QJL ? 2 * R : R];
    key_sums<D, KB, LLOYD, QJL, DENORMAL, R, 1, 0>(
        k_rows + at * row_size(D, KB), k_planes + at * row_words(D, 1), k_sketches + at * row_words(D, 1), levels,
        k_chunk, kl, q, q_jl, start_sum, sums);
    const float scale = KB == RAW ? 1.0f : float(k_scales[token]);
    const float residual = QJL ? float(k_residuals[token]) : 0.0f;
#pragma unroll
    for (int r = 0; r < R; ++r) score[r] = scale * (QJL ? sums[r] + residual * sums[QJL ? R + r : 0] : sums[r]);
  } else {
#pragma unroll
    for (int r = 0; r < R; ++r) score[r] = 0.0f;
    for (int i = 0; i < LK; ++i) {  // few rows: small code rather than fast
      float x[C];
      load_exact<C, KB, LLOYD, DENORMAL>(k_kept + min(start + int(kg) * LK + i, live - 1) * D, k_chunk, x);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const float sum = group_sum<LK>(dot<C>(q + r * C, x, 0.0f));
        score[r] = i == kl ? sum : score[r];
      }
    }
  }
  if (CENTERED && coded) {
    if (block == begin || start % PAGE == 0) {
      float x[C];
      load_exact<C, KB, LLOYD, DENORMAL>(k_means + start / PAGE * D, k_chunk, x);
#pragma unroll
      for (int r = 0; r < R; ++r) mean_score[r] = group_sum<LK>(dot<C>(q + r * C, x, 0.0f));
    }
#pragma unroll
    for (int r = 0; r < R; ++r) score[r] += mean_score[r];
  }

  // Online softmax, one maximum for all 32 tokens.
  float weight[R];
  const float value_scale = coded && VB != RAW ? float(v_scales[token]) : 1.0f;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const int row = min(first_row + r, rows - 1);
    float s = score[r];
    const bool seen = see<MASK, SOFTCAP>(
        s, token < live, row, column, mask, batch, kv_head, params, consts[1]);
    const float new_top = max(top[r], simd_max(seen && s > LOWEST ? s : LOWEST)), shrink = exp2(top[r] - new_top);
    const float p = seen ? exp2(s - new_top) : 0.0f;
    weight[r] = seen ? p * value_scale : 0.0f;
    top[r] = new_top;
    denominator[r] = fma(denominator[r], shrink, p);
    // Subtracting the offset of the codes here, block by block, keeps the accumulator small.
    float offset = 0.0f;
    if (coded && code_offset<VB, LLOYD>() > 0.0f) offset = -group_sum<LV>(weight[r]) * code_offset<VB, LLOYD>();
#pragma unroll
    for (int e = 0; e < CV; ++e)
      acc[r * CV + e] = fma(acc[r * CV + e], shrink, offset / coordinate_scale<VB, LLOYD, DENORMAL>(e));
  }

  // Values. Rows that are not coded may hold anything past the live ones, so none of those is read.
  if (coded && VB != RAW) {
    const uint at = start + vg * LV;
    add_values<DV, VB, LLOYD, DENORMAL, R, 0>(
        v_rows + at * row_size(DV, VB), v_planes + at * row_words(DV, 1), levels + 16, v_chunk, vg * LV, weight, acc);
  } else {
    const auto from = plain_rows(v_rows, v_kept, coded);
    for (int i = 0; i < LV; ++i) {
      float x[CV];
      load_exact<CV, VB, LLOYD, DENORMAL>(from + min(start + int(vg) * LV + i, live - 1) * DV, v_chunk, x);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const float w = simd_shuffle(weight[r], ushort(vg * LV + i));
#pragma unroll
        for (int e = 0; e < CV; ++e) acc[r * CV + e] = fma(x[e], w, acc[r * CV + e]);
      }
    }
  }
}

// Add up the lanes and write, still rotated.
#pragma unroll
for (int r = 0; r < R; ++r) {
  const float total = simd_sum(denominator[r]);
  const int row = first_row + r;
  const size_t at = ((slot * rows + row) * splits + split);
#pragma unroll
  for (int e = 0; e < CV; ++e) {
    float x = acc[r * CV + e];
    for (int w = LV; w < 32; w *= 2) x += simd_shuffle_xor(x, ushort(w));
    x *= coordinate_scale<VB, LLOYD, DENORMAL>(e);
    if (vg == 0 && vl * CV < DV && row < rows) partial[at * DV + vl * CV + e] = x;
  }
  if (lane == 0 && row < rows) {
    softmax[at * 2] = top[r];
    softmax[at * 2 + 1] = total;
  }
}
