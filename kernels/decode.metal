// Decodes keys and values of every column to dense rows; one simdgroup a row. Padding and spare rows become 0.

constexpr int MAX_D = D > DV ? D : DV;
const int room = params[1], columns = params[2], capacity = params[3], exact_capacity = params[4], mean_pages = params[7];
const int n_kv_heads = params[12], n_rows = params[13];
const uint lane = thread_index_in_simdgroup, sg = simdgroup_index_in_threadgroup;
const int item = threadgroup_position_in_grid.x * NSG + sg;
TQ_THREADGROUP float scratch[NSG * MAX_D];
if (item >= n_rows) return;

const int slot = item / room, column = item % room, batch = slot / n_kv_heads;
const Tokens tokens = tokens_of(params + 16 + batch * 8);
const int token = column < columns ? column - tokens.pad : -1, first = tokens.first, n_packed = tokens.packed;
const bool coded = token >= first && token < first + n_packed;
const int place = coded ? token - first : token < first ? token : token - n_packed;
const size_t at = size_t(slot) * (coded ? capacity : exact_capacity) + max(place, 0);
threadgroup float* y = scratch + sg * MAX_D;
float x[share(MAX_D)];
#pragma unroll
for (int n = 0; n < share(MAX_D); ++n) x[n] = 0.0f;

if (threadgroup_position_in_grid.y == 0) {
  if (coded) {
    if (QJL) {
#pragma unroll
      for (int n = 0; n < share(D); ++n)
        if (holds(D, n, lane)) x[n] = k_jl[at * row_words(D, 1) + n] >> lane & 1u ? 1.0f : -1.0f;
      hadamard<D>(x, y, k_mix, lane);
    }
    const float scale = KB == RAW ? 1.0f : float(k_scale[at]);
    const float weight = QJL ? float(k_residual[at]) * consts[2] : 0.0f;
    const auto row = k_codes + at * row_size(D, KB);
    const auto plane = k_plane + at * row_words(D, 1);
#pragma unroll
    for (int n = 0; n < share(D); ++n) {
      if (!holds(D, n, lane)) continue;
      const int i = 32 * n + lane;
      float code = coordinate<D, KB, LLOYD>(row, plane, consts + 8, i);
      if (QJL) code += weight * (x[n] * k_jl_signs[i]);
      x[n] = code * scale;
    }
    if (KB != RAW) rotate_held_back<D>(x, y, k_signs, k_mix, consts[4], lane);
    const size_t page = size_t(slot) * mean_pages + place / PAGE;
#pragma unroll
    for (int n = 0; n < share(D); ++n)
      if (CENTERED && holds(D, n, lane)) x[n] += float(k_mean[page * D + 32 * n + lane]);
  } else if (token >= 0) {
#pragma unroll
    for (int n = 0; n < share(D); ++n)
      if (holds(D, n, lane)) x[n] = float(k_exact[at * D + 32 * n + lane]);
  }
#pragma unroll
  for (int n = 0; n < share(D); ++n)
    if (holds(D, n, lane)) k_dense[size_t(item) * D + 32 * n + lane] = narrow<KT>(x[n], consts[5]);
} else {
  if (coded) {
    const float scale = VB == RAW ? 1.0f : float(v_scale[at]);
    const auto row = v_codes + at * row_size(DV, VB);
    const auto plane = v_plane + at * row_words(DV, 1);
#pragma unroll
    for (int n = 0; n < share(DV); ++n)
      if (holds(DV, n, lane)) x[n] = scale * coordinate<DV, VB, LLOYD>(row, plane, consts + 24, 32 * n + lane);
    if (VB != RAW) rotate_held_back<DV>(x, y, v_signs, v_mix, consts[3], lane);
  } else if (token >= 0) {
#pragma unroll
    for (int n = 0; n < share(DV); ++n)
      if (holds(DV, n, lane)) x[n] = float(v_exact[at * DV + 32 * n + lane]);
  }
#pragma unroll
  for (int n = 0; n < share(DV); ++n)
    if (holds(DV, n, lane)) v_dense[size_t(item) * DV + 32 * n + lane] = narrow<VT>(x[n], consts[7]);
}
