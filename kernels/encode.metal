// Rotates, quantises and packs new key and value rows, keys less the mean of their page if CENTERED; one simdgroup a row.

constexpr int MAX_D = D > DV ? D : DV;
const int L = params[1], first = params[2], room = params[3], mean_pages = params[7], n_rows = params[13];
const uint lane = thread_index_in_simdgroup, sg = simdgroup_index_in_threadgroup;
const int row = threadgroup_position_in_grid.x * NSG + sg;
TQ_THREADGROUP float scratch[NSG * MAX_D];
if (row >= n_rows) return;

threadgroup float* y = scratch + sg * MAX_D;
float x[share(MAX_D)];
const size_t from = size_t(row / L) * room + first + row % L;
if (threadgroup_position_in_grid.y == 0) {
  if (KB == RAW) {  // keys stay as they are: there is nothing to write but the place-holders
    if (row == 0) write_nothing(k_words, k_scales, lane);
    return;
  }
  const size_t page = size_t(row / L) * mean_pages + row % L / PAGE;
#pragma unroll
  for (int n = 0; n < share(D); ++n) {
    const int i = 32 * n + lane;
    x[n] = holds(D, n, lane) ? float(keys[from * D + i]) - (CENTERED ? float(k_mean[page * D + i]) : 0.0f) : 0.0f;
  }
  rotate_held<D>(x, y, k_signs, k_mix, consts[4], lane);
  quantise_row<D, KB == RAW ? 4 : KB, LLOYD, QJL, NORM, CHOICES>(
      x, y, k_jl_signs, k_mix, k_table, k_words + size_t(row) * encoded_words(D, KB, QJL),
      k_scales + size_t(row) * (QJL ? 2 : 1), consts[6], lane);
} else {
  if (VB == RAW) {
    if (row == 0) write_nothing(v_words, v_scales, lane);
    return;
  }
#pragma unroll
  for (int n = 0; n < share(DV); ++n) x[n] = holds(DV, n, lane) ? float(values[from * DV + 32 * n + lane]) : 0.0f;
  rotate_held<DV>(x, y, v_signs, v_mix, consts[3], lane);
  quantise_row<DV, VB == RAW ? 4 : VB, LLOYD, false, NORM, CHOICES>(
      x, y, k_jl_signs, v_mix, v_table, v_words + size_t(row) * encoded_words(DV, VB, false), v_scales + size_t(row),
      consts[6], lane);
}
