// softmax(scale * x[row, :]) @ v, one threadgroup of TILE threads per row. v: 4-bit codes, 8 to a word, times a scale
// per row of v. params: columns of x that count, row stride of x.
const uint tid = thread_index_in_threadgroup, lane = thread_index_in_simdgroup, sg = simdgroup_index_in_threadgroup;
const uint row = threadgroup_position_in_grid.x, n = params[0], stride = params[1];

threadgroup float weights[TILE];
threadgroup float part[TILE / 32];
threadgroup float state[2];  // maximum and sum so far
threadgroup float acc[D];
if (tid < D) acc[tid] = 0.0f;
if (tid == 0) {
  state[0] = LOWEST;
  state[1] = 0.0f;
}

for (uint start = 0; start < n; start += TILE) {
  const uint column = start + tid;
  const bool live = column < n;
  const float score = live ? scale * float(x[row * stride + column]) : LOWEST;

  // Maximum of the tile.
  const float simd_top = simd_max(score);
  if (lane == 0) part[sg] = simd_top;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float top = simd_max(lane < TILE / 32 ? part[lane] : LOWEST);
  const float old_top = state[0], new_top = max(old_top, top), shrink = exp2(old_top - new_top);
  const float w = live ? exp2(score - new_top) : 0.0f;
  weights[tid] = live ? w * float(v_scale[column]) : 0.0f;
  const float simd_total = simd_sum(w);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // Sum of the tile, and the weighted values.
  if (lane == 0) part[sg] = simd_total;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (tid == 0) {
    float total = state[1] * shrink;
    for (uint i = 0; i < TILE / 32; ++i) total += part[i];
    state[0] = new_top;
    state[1] = total;
  }
  if (tid < D) {
    float a = acc[tid] * shrink;
    for (uint i = 0; i < min(uint(TILE), n - start); ++i) {
      const uint word = v[(start + i) * (D / 8) + tid / 8];
      a = fma(weights[i], code_value(word, tid % 8), a);
    }
    acc[tid] = a;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
if (tid < D) out[row * D + tid] = T(acc[tid] / state[1]);
if (tid < 2) stats[row * 2 + tid] = state[tid];
