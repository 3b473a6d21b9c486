// Merges the partial results of one query row, rotates back and writes it; one threadgroup a row.

const int G = params[0], L = params[1], splits = params[5];
const uint lane = thread_index_in_simdgroup, sg = simdgroup_index_in_threadgroup;
const int item = threadgroup_position_in_grid.x;
threadgroup float sums[NSG * DV];

// The output is (B, n_heads, L, DV), the partial results are (B, n_kv_heads, L, G, splits, DV).
const int head = item / L;
const size_t row = (size_t(head / G) * L + item % L) * G + head % G;

float sink = SINKS ? float(sinks[head % params[14]]) * LOG2E : LOWEST;
float top = sink;
for (int s = lane; s < splits; s += 32) top = max(top, softmax[(row * splits + s) * 2]);
top = simd_max(top);
float denominator = SINKS && lane == 0 ? exp2(sink - top) : 0.0f;
for (int s = lane; s < splits; s += 32) {
  const size_t at = (row * splits + s) * 2;
  denominator += exp2(softmax[at] - top) * softmax[at + 1];
}
denominator = simd_sum(denominator);
const float norm = denominator == 0.0f ? 0.0f : consts[3] / denominator;  // a NaN stays, so that it shows

// Every simdgroup adds up its share of the splits, then the first one those of all.
float x[(DV + 31) / 32];
for (int n = 0; n < (DV + 31) / 32; ++n) x[n] = 0.0f;
#pragma unroll 4
for (int s = sg; s < splits; s += NSG) {
  const float weight = exp2(softmax[(row * splits + s) * 2] - top);
  for (int n = 0, i = lane; i < DV; ++n, i += 32) x[n] = fma(partial[(row * splits + s) * DV + i], weight, x[n]);
}
for (int n = 0, i = lane; i < DV; ++n, i += 32) sums[sg * DV + i] = x[n] * norm;
threadgroup_barrier(mem_flags::mem_threadgroup);
if (sg > 0) return;
for (int i = lane; i < DV; i += 32)
  for (int n = 1; n < NSG; ++n) sums[i] += sums[n * DV + i];
hadamard<DV>(sums, v_mix, lane);
for (int i = lane; i < DV; i += 32) out[size_t(item) * DV + i] = T(sums[i] * v_signs[i]);
