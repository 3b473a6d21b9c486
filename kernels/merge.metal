// Merges the partial results of one query row; one threadgroup a row.

const int G = params[0], L = params[1], splits = params[5];
const uint lane = thread_index_in_simdgroup, sg = simdgroup_index_in_threadgroup;
const int item = threadgroup_position_in_grid.x;
TQ_THREADGROUP float sums[NSG * DV], weights[NSG * 32], denominators[NSG];

// The output is (B, n_heads, L, DV), the partial results are (B, n_kv_heads, L, G, splits, DV).
const int head = item / L;
const size_t row = (size_t(head / G) * L + item % L) * G + head % G;
device const float* softmax = partial + softmax_at(params, DV);

const float sink = SINKS ? float(sinks[head % params[14]]) * LOG2E : LOWEST;
float top = sink;
for (int s = lane; s < splits; s += 32) top = max(top, softmax[(row * splits + s) * 2]);
top = simd_max(top);

// Every simdgroup adds up each NSG-th split, then the first one what all of them have.
float x[(DV + 31) / 32], denominator = 0.0f;
for (int n = 0; n < (DV + 31) / 32; ++n) x[n] = 0.0f;
for (int from = sg; from < splits; from += 32 * NSG) {
  const int s = from + lane * NSG;
  if (s < splits) {
    const size_t at = (row * splits + s) * 2;
    const float weight = exp2(softmax[at] - top);
    denominator += weight * softmax[at + 1];
    weights[sg * 32 + lane] = weight;
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  const int count = min(32, (splits - from + NSG - 1) / NSG);
#pragma unroll 8
  for (int k = 0; k < count; ++k) {
    const size_t at = (row * splits + from + k * NSG) * DV;
    for (int n = 0, i = lane; i < DV; ++n, i += 32) x[n] = fma(partial[at + i], weights[sg * 32 + k], x[n]);
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
}
denominator = simd_sum(denominator);
if (lane == 0) denominators[sg] = denominator;
for (int n = 0, i = lane; i < DV; ++n, i += 32) sums[sg * DV + i] = x[n];
threadgroup_barrier(mem_flags::mem_threadgroup);
if (sg > 0) return;

denominator = SINKS ? exp2(sink - top) : 0.0f;
for (int n = 0; n < NSG; ++n) denominator += denominators[n];
const float norm = denominator == 0.0f ? 0.0f : 1.0f / denominator;  // a NaN stays, so that it shows
for (int i = lane; i < DV; i += 32) {
  float sum = 0.0f;
  for (int n = 0; n < NSG; ++n) sum += sums[n * DV + i];
  out[size_t(item) * DV + i] = narrow<T>(sum * norm, consts[5]);
}
