// Rotates new key and value rows; one simdgroup a row.

const int n_rows = params[13];
const uint lane = thread_index_in_simdgroup, sg = simdgroup_index_in_threadgroup;
const int row = threadgroup_position_in_grid.x * NSG + sg;
threadgroup float scratch[NSG * (D > DV ? D : DV)];
if (row >= n_rows) return;

threadgroup float* y = scratch + sg * (D > DV ? D : DV);
if (threadgroup_position_in_grid.y == 0) {
  rotate_row<D>(keys + size_t(row) * D, k_signs, k_mix, y, consts[4], consts[5], lane);
  for (int i = lane; i < D; i += 32) k_rotated[size_t(row) * D + i] = KT(y[i]);
} else {
  rotate_row<DV>(values + size_t(row) * DV, v_signs, v_mix, y, consts[3], consts[7], lane);
  for (int i = lane; i < DV; i += 32) v_rotated[size_t(row) * DV + i] = VT(y[i]);
}
