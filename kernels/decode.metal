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

if (threadgroup_position_in_grid.y == 0) {
  if (coded) {
    if (QJL) {
      for (int i = lane; i < D; i += 32) y[i] = k_jl[at * row_words(D, 1) + i / 32] >> (i % 32) & 1u ? 1.0f : -1.0f;
      hadamard<D>(y, k_mix, lane);
    }
    const float scale = KB == RAW ? 1.0f : float(k_scale[at]);
    const float weight = QJL ? float(k_residual[at]) * consts[2] : 0.0f;
    const auto row = k_codes + at * row_size(D, KB);
    const auto plane = k_plane + at * row_words(D, 1);
    for (int i = lane; i < D; i += 32) {
      float x = coordinate<D, KB, LLOYD>(row, plane, consts + 8, i);
      if (QJL) x += weight * (y[i] * k_jl_signs[i]);
      y[i] = x * scale;
    }
    if (KB != RAW) rotate_row_back<D>(y, k_signs, k_mix, consts[4], lane);
    const size_t page = size_t(slot) * mean_pages + place / PAGE;
    for (int i = lane; i < D; i += 32) y[i] += CENTERED ? float(k_mean[page * D + i]) : 0.0f;
  } else {
    for (int i = lane; i < D; i += 32) y[i] = token < 0 ? 0.0f : float(k_exact[at * D + i]);
  }
  for (int i = lane; i < D; i += 32) k_dense[size_t(item) * D + i] = narrow<KT>(y[i], consts[5]);
} else {
  if (coded) {
    const float scale = VB == RAW ? 1.0f : float(v_scale[at]);
    const auto row = v_codes + at * row_size(DV, VB);
    const auto plane = v_plane + at * row_words(DV, 1);
    for (int i = lane; i < DV; i += 32) y[i] = scale * coordinate<DV, VB, LLOYD>(row, plane, consts + 24, i);
    if (VB != RAW) rotate_row_back<DV>(y, v_signs, v_mix, consts[3], lane);
  } else {
    for (int i = lane; i < DV; i += 32) y[i] = token < 0 ? 0.0f : float(v_exact[at * DV + i]);
  }
  for (int i = lane; i < DV; i += 32) v_dense[size_t(item) * DV + i] = narrow<VT>(y[i], consts[7]);
}
