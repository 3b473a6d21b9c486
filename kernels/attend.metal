// Attention of R query rows to a range of tokens, by one simdgroup: a partial result for merge.metal.
//
// The tokens are walked 32 at a time. LK lanes share a key, C coordinates each; a transposing butterfly then gives each
// lane the score of one key, for the softmax; values are read as keys are. A decoded row serves all R query rows.

constexpr int C = chunk(D), LK = lanes(D), CV = chunk(DV), LV = lanes(DV), MAX_D = D > DV ? D : DV;
constexpr int RENEW = 8;  // blocks after which sums are renewed
const int G = params[0], L = params[1], columns = params[2], capacity = params[3], exact_capacity = params[4];
const int splits = params[5], tiles = params[6], mean_pages = params[7];

const uint lane = thread_index_in_simdgroup, sg = simdgroup_index_in_threadgroup;
const int item = threadgroup_position_in_grid.x * NSG + sg;
const int kv_head = threadgroup_position_in_grid.y, batch = threadgroup_position_in_grid.z;
const int tile = item % tiles, split = item / tiles;
const size_t slot = batch * size_t(params[12]) + kv_head;  // which sequence of tokens

threadgroup float scratch[NSG * R * MAX_D];
threadgroup float levels[32];
if (sg == 0) levels[lane] = consts[8 + lane];
threadgroup_barrier(mem_flags::mem_threadgroup);
if (split >= splits) return;

// Where the tokens of this batch row are. Offsets within a sequence have 32 bits, those of sequences 64.
const Tokens tokens = tokens_of(params + 16 + batch * 8);
const int pad = tokens.pad, first = tokens.first, n_packed = tokens.packed, n_exact = tokens.exact;
const Range blocks = range_of(split, tokens);
const bool coded = blocks.coded;

// Read the queries, rotate them for codes, and keep this lane's coordinates.
threadgroup float* queries = scratch + sg * R * MAX_D;
const int first_row = tile * R, rows = G * L;
for (int r = 0; r < R; ++r) {
  device const T* from = query_row(query, slot, min(first_row + r, rows - 1), G, L, D);
  for (int i = lane; i < D; i += 32) queries[r * D + i] = float(from[i]) * consts[0];
  if (coded && KB != RAW) rotate_row<D>(queries + r * D, k_signs, k_mix, consts[4], lane);
}
simdgroup_barrier(mem_flags::mem_threadgroup);
const int kl = lane % LK, kg = lane / LK, vl = lane % LV, vg = lane / LV;
const int k_chunk = min(kl, D / C - 1), v_chunk = min(vl, DV / CV - 1);
const Affine k_code = affine<KB, LLOYD>(levels), v_code = affine<VB, LLOYD>(levels + 16);
float q[R * C], start_sum[QJL ? 2 * R : R];
#pragma unroll
for (int r = 0; r < R; ++r) {
  float sum = 0.0f;
#pragma unroll
  for (int e = 0; e < C; ++e) {
    const float y = queries[r * D + k_chunk * C + e], x = kl * C < D ? y : 0.0f;
    sum += x;
    q[r * C + e] = x * coordinate_scale<KB, LLOYD, DENORMAL>(e);
  }
  start_sum[r] = -sum * k_code.offset;  // makes the codes symmetric
}
float q_jl[QJL ? R * C : 1];
if (QJL) {
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (int r = 0; r < R; ++r) {
    for (int i = lane; i < D; i += 32) queries[r * D + i] *= k_jl_signs[i] * consts[2];
    hadamard<D>(queries + r * D, k_mix, lane);
  }
#pragma unroll
  for (int r = 0; r < R; ++r) {
    float sum = 0.0f;
#pragma unroll
    for (int e = 0; e < C; ++e) {
      const float y = queries[r * D + k_chunk * C + e], x = kl * C < D ? y : 0.0f;
      sum += x;
      q_jl[QJL ? r * C + e : 0] = x * 2.0f * field_scale<1, DENORMAL>(e % (C / 2));
    }
    start_sum[QJL ? R + r : 0] = -sum;  // a bit that is not set counts -1
  }
}
if (CENTERED && coded) {  // means are not rotated
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (int r = 0; r < R; ++r) {
    device const T* from = query_row(query, slot, min(first_row + r, rows - 1), G, L, D);
    for (int i = lane; i < D; i += 32) queries[r * D + i] = float(from[i]) * consts[0];
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

const size_t at_packed = slot * capacity, at_exact = slot * exact_capacity;
const auto k_rows = k_codes + at_packed * row_size(D, KB);
const auto v_rows = v_codes + at_packed * row_size(DV, VB);
const auto k_planes = k_plane + (KB == 3 ? at_packed * row_words(D, 1) : 0);
const auto v_planes = v_plane + (VB == 3 ? at_packed * row_words(DV, 1) : 0);
const auto k_sketches = k_jl + (QJL ? at_packed * row_words(D, 1) : 0);
const auto k_scales = k_scale + at_packed;
const auto k_residuals = k_residual + at_packed;
const auto v_scales = v_scale + at_packed;

const int live = coded ? n_packed : n_exact;
const int last_seen = columns - L + min(first_row + R - 1, rows - 1) / G;

// Weights are multiples of exp2(score - top). `excess` is this lane's part of what the offset of the codes adds to the
// accumulators.
float acc[R * CV], top[R], denominator[R], excess[R], mean_score[R];
#pragma unroll
for (int r = 0; r < R; ++r) {
  top[r] = LOWEST;
  denominator[r] = excess[r] = mean_score[r] = 0.0f;
#pragma unroll
  for (int e = 0; e < CV; ++e) acc[r * CV + e] = 0.0f;
}

for (int block = blocks.begin; block < blocks.end; ++block) {
  const int start = block * 32;
  const int token = start + int(lane);
  const int column = pad + (coded ? first + token : token < first ? token : n_packed + token);
  if (MASK == 1 && pad + (coded ? first + start : start < first ? start : n_packed + start) > last_seen) break;

  // Scores: this lane ends up with that of `token`. Packed rows may be read past the live ones, to a multiple of 32.
  float score[R];
  if (coded) {
    const uint at = start + kg * LK;
    float sums[QJL ? 2 * R : R];
    key_sums<D, KB, LLOYD, QJL, DENORMAL, R, 1, 0>(
        k_rows, at * (D / C) + k_chunk, k_planes, k_sketches, at * bit_places(D) + k_chunk, levels, k_code.ratio, kl, q,
        q_jl, start_sum, sums);
    const float scale = KB == RAW ? 1.0f : float(k_scales[token]);
    const float residual = QJL ? float(k_residuals[token]) : 0.0f;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const float sum = sums[r] * k_code.step;
      score[r] = scale * (QJL ? sum + residual * sums[QJL ? R + r : 0] : sum);
    }
  } else {
#pragma unroll
    for (int r = 0; r < R; ++r) score[r] = 0.0f;
    const auto k_kept = k_exact + at_exact * D;
    for (int i = 0; i < min(LK, live - start); ++i) {  // few rows: small code rather than fast
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
    if (block == blocks.begin || start % PAGE == 0) {
      const auto mean = k_mean + (slot * mean_pages + start / PAGE) * D;
#pragma unroll
      for (int r = 0; r < R; ++r) {
        float sum = 0.0f;
#pragma unroll
        for (int n = 0, i = lane; n < (D + 31) / 32; ++n, i += 32)
          if (D % 32 == 0 || i < D) sum = fma(queries[r * D + i], float(mean[i]), sum);
        mean_score[r] = simd_sum(sum);
      }
    }
#pragma unroll
    for (int r = 0; r < R; ++r) score[r] += mean_score[r];
  }

  // Online softmax, one maximum for all 32 tokens, raised only where a score is well above it. The excess is subtracted
  // then, and every few blocks, so that the accumulators stay small.
  float weight[R];
  bool seen[R], above = block % RENEW == 0;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const int row = min(first_row + r, rows - 1);
    seen[r] = see<MASK, SOFTCAP>(score[r], token < live, row, column, mask, batch, kv_head, params, consts[1]);
    above = above || (seen[r] && score[r] > top[r] + LAZY);
  }
  const bool raise = simd_any(above);
  float shrink[R];
  if (raise) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const float new_top = max(top[r], simd_max(seen[r] && score[r] > LOWEST ? score[r] : LOWEST));
      shrink[r] = exp2(top[r] - new_top);
      top[r] = new_top;
      denominator[r] *= shrink[r];
      excess[r] *= shrink[r];
    }
  }
  const float value_scale = coded && VB != RAW ? float(v_scales[token]) * v_code.step : 1.0f;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const float s = score[r], p = seen[r] ? exp2(s - top[r]) : 0.0f;
    weight[r] = seen[r] ? p * value_scale : 0.0f;
    denominator[r] += p;
    if (coded && VB != RAW) excess[r] = fma(weight[r], v_code.offset, excess[r]);
  }
  if (raise) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const float offset = -group_sum<LV>(excess[r]);
      excess[r] = 0.0f;
#pragma unroll
      for (int e = 0; e < CV; ++e)
        acc[r * CV + e] = fma(acc[r * CV + e], shrink[r], offset / coordinate_scale<VB, LLOYD, DENORMAL>(e));
    }
  }

  // Values. Rows that are not coded may hold anything past the live ones, so none of those is read.
  if (coded && VB != RAW) {
    const uint at = start + vg * LV;
    add_values<DV, VB, LLOYD, DENORMAL, R, 0>(
        v_rows, at * (DV / CV) + v_chunk, v_planes, at * bit_places(DV) + v_chunk, levels + 16, v_code.ratio, vg * LV,
        weight, acc);
  } else {
    const auto from = plain_rows(v_rows, v_exact + at_exact * DV, coded);
    for (int i = 0; i < min(LV, live - start); ++i) {
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

// Add up the lanes, rotate back what codes gave, and write.
simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
for (int r = 0; r < R; ++r) {
  const float total = simd_sum(denominator[r]), offset = group_sum<LV>(excess[r]);
#pragma unroll
  for (int e = 0; e < CV; ++e) {
    float x = fma(acc[r * CV + e], coordinate_scale<VB, LLOYD, DENORMAL>(e), -offset);
    for (int w = LV; w < 32; w *= 2) x += simd_shuffle_xor(x, ushort(w));
    if (vg == 0 && vl * CV < DV) queries[r * DV + vl * CV + e] = x;
  }
  const size_t at = (slot * rows + first_row + r) * splits + split;
  if (lane == 0 && first_row + r < rows) {
    softmax[at * 2] = top[r];
    softmax[at * 2 + 1] = total;
  }
}
simdgroup_barrier(mem_flags::mem_threadgroup);
for (int r = 0; r < min(R, rows - first_row); ++r) {
  if (coded && VB != RAW) rotate_row_back<DV>(queries + r * DV, v_signs, v_mix, consts[3], lane);
  const size_t at = (slot * rows + first_row + r) * splits + split;
  for (int i = lane; i < DV; i += 32) partial[at * DV + i] = queries[r * DV + i];
}
