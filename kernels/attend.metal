// Attention of R query rows to a range of tokens, by one simdgroup: a partial result for merge.metal.
//
// The tokens are walked 32 at a time. LK lanes share a key, C coordinates each; a transposing butterfly then gives each
// lane the scores of R tokens for one query row, for the softmax. Values are read as keys are; their weights go through
// threadgroup memory. A decoded row serves all R query rows.

constexpr int C = chunk(D, R), LK = lanes(D, C), CV = chunk(DV, R), LV = lanes(DV, CV);
constexpr int J = LK / R;                     // neighbouring lanes with one query row
constexpr int V = LV < 16 / R ? LV : 16 / R;  // values at a time: few, so that the loop fits the instruction cache
constexpr int WK = field_width(KB), WV = field_width(VB);
constexpr int RENEW = 8;  // blocks after which sums are renewed
// A simdgroup's floats of threadgroup memory: the rotated queries; with QJL their sketches behind them, because
// registers have room for one of the two; and the queries for means, in place of rotated ones that stay in registers.
constexpr int SKETCHES = R * (D > DV ? D : DV), PLAIN = QJL ? 2 * SKETCHES : 0;
constexpr int ROOM = (QJL ? CENTERED ? 3 : 2 : 1) * SKETCHES;
const int G = params[0], L = params[1], columns = params[2], capacity = params[3], exact_capacity = params[4];
const int splits = params[5], tiles = params[6], mean_pages = params[7];

const uint lane = thread_index_in_simdgroup, sg = simdgroup_index_in_threadgroup;
const int item = threadgroup_position_in_grid.x * NSG + sg;
const int kv_head = threadgroup_position_in_grid.y, batch = threadgroup_position_in_grid.z;
const int tile = item % tiles, split = item / tiles;
const uint slot = batch * params[12] + kv_head;  // which sequence of tokens

// float4, because vectors of them are read and written where that is less code.
TQ_THREADGROUP float4 scratch[NSG * ROOM / 4], token_weights[NSG * R * 8];
TQ_THREADGROUP float levels[32];
if (LLOYD) {
  if (sg == 0) levels[lane] = consts[8 + lane];
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
if (split >= splits) return;

// Where the tokens of this batch row are. Offsets within a sequence have 32 bits, those of sequences 64.
const Tokens tokens = tokens_of(params + 16 + batch * 8);
const int pad = tokens.pad, first = tokens.first, n_packed = tokens.packed, n_exact = tokens.exact;
const Range blocks = range_of(split, tokens);
const bool coded = blocks.coded;

// Which chunk of a key and of a value this lane works on, in which group of lanes; and its query row.
const uint kl = lane % LK, kg = lane / LK, vl = lane % LV, vg = lane / LV;
const uint k_chunk = min(kl, uint(D / C - 1)), v_chunk = min(vl, uint(DV / CV - 1));
const uint own = kl / J, own_token = kg * LK + kl % J * R;
const int first_row = tile * R, rows = G * L, row = min(first_row + int(own), rows - 1);
const uint query_row = query_at(slot, row, G, L);

threadgroup float* const floats = (threadgroup float*)scratch;
threadgroup float* queries = floats + sg * ROOM;
// Weights of token t and all query rows are at weights_of(t); each lane writes those of its row, R tokens.
threadgroup float* own_weights = (threadgroup float*)token_weights + (sg * R * 32 + own_token + own);
threadgroup const float* group_weights = (threadgroup float*)token_weights + (sg * R * 32 + vg * LV);

// Queries carry what load_chunk leaves to them. It is the same for all coordinates that a lane has of a row in
// threadgroup memory, those at lane, lane + 32 and so on, because 32 is a multiple of C.
const Affine k_code = affine<KB, LLOYD>(levels), v_code = affine<VB, LLOYD>(levels + 16);
const float k_unit = coordinate_scale<C, KB, LLOYD, DENORMAL>(lane % C), k_factor = k_unit * k_code.step;
const float jl_unit = 2.0f * coordinate_scale<C, 1, false, DENORMAL>(lane % C);

// Read the queries and rotate them for codes. This lane's sums for its own row start so that codes are symmetric, and
// that a bit of a sketch that is not set counts -1.
float k_start = 0.0f, jl_start = 0.0f;
#pragma unroll 1
for (int r = 0; r < R; ++r) {
  threadgroup float *y = queries + r * D, *sketch = y + SKETCHES;
  read_query<D>(query + size_t(simd_shuffle(query_row, ushort(r * J))) * D, consts[0], lane, y);
  if (!coded || KB == RAW) continue;
  rotate_row<D>(y, k_signs, k_mix, consts[4] * k_factor, lane);
  const float part = own_part<D, C, J>(y, kl, lane, k_unit);
  k_start = r == int(own) ? -k_code.offset * part : k_start;
  if (QJL) {
    for (int i = lane; i < D; i += 32) sketch[i] = y[i] / k_factor;
    rotate_row<D>(sketch, k_jl_signs, k_mix, consts[2] * jl_unit, lane);
    const float jl_part = own_part<D, C, J>(sketch, kl, lane, jl_unit);
    jl_start = r == int(own) ? -jl_part : jl_start;
  }
}
simdgroup_barrier(mem_flags::mem_threadgroup);
const bool has_chunk = LK * C == D || kl * C < D;
const uint own_chunk = sg * ROOM + k_chunk * C;  // an index takes fewer registers than a pointer
float q[R * C];
if (!QJL) load_queries<D, C, R>(floats, own_chunk, own, has_chunk, q);
if (CENTERED && coded) {  // means are not rotated; a lane reads what it writes here
  simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll 1
  for (int r = 0; r < R; ++r)
    read_query<D>(query + size_t(simd_shuffle(query_row, ushort(r * J))) * D, consts[0], lane, queries + PLAIN + r * D);
}

// This lane's places in the packed rows, which move on with the blocks.
const size_t at_packed = size_t(slot) * capacity, at_exact = size_t(slot) * exact_capacity;
const uint begin = blocks.begin * 32, k_begin = begin + kg * LK, v_begin = begin + vg * LV;
auto k_at = chunk_of<D, C, WK>(k_codes + at_packed * row_size(D, KB), k_begin, k_chunk);
auto k_plane_at = chunk_of<D, C, 1>(k_plane + (KB == 3 ? at_packed * row_words(D, 1) : 0), k_begin, k_chunk);
auto k_jl_at = chunk_of<D, C, 1>(k_jl + (QJL ? at_packed * row_words(D, 1) : 0), k_begin, k_chunk);
auto k_residual_at = k_residual + at_packed + (begin + own_token);
auto k_scale_at = k_scale + at_packed + (begin + own_token);
auto v_scale_at = v_scale + at_packed + (begin + own_token);
auto v_at = chunk_of<DV, CV, WV>(v_codes + at_packed * row_size(DV, VB), VB == RAW ? 0 : v_begin, v_chunk);
auto v_plane_at = chunk_of<DV, CV, 1>(v_plane + (VB == 3 ? at_packed * row_words(DV, 1) : 0), v_begin, v_chunk);
auto mean_at = k_mean + size_t(slot * mean_pages) * D;
if (!coded) {  // rows of `k_exact` and `v_exact`
  k_at = retyped(k_exact + (at_exact * D + k_chunk * C), k_at);
  v_at = retyped(v_exact + (at_exact * DV + v_chunk * CV), v_at);
}

// Partial results of the query rows go from `to` on, `splits` apart.
const uint to = (slot * rows + first_row) * splits + split;
const int n_rows = min(R, rows - first_row), live = coded ? n_packed : n_exact;
const int last_seen = columns - L + min(first_row + R - 1, rows - 1) / G;

// Weights are multiples of exp2(score - top). `excess` is this lane's part of the sum of the weights of codes: times
// their offset, what accumulators of its query row are too large by.
float acc[R * CV], top = LOWEST, denominator = 0.0f, excess = 0.0f, mean_score = CENTERED ? LOWEST : 0.0f;
#pragma unroll
for (int e = 0; e < R * CV; ++e) acc[e] = 0.0f;

for (int start = blocks.begin * 32, end = blocks.end * 32; start < end; start += 32) {
  if (MASK == 1 && pad + (coded ? first + start : start < first ? start : n_packed + start) > last_seen) break;

  // Scores: this lane ends up with those of its R tokens, of which each pass does one. Packed rows may be read past the
  // live ones, to a multiple of 32.
  float score[R], sketched[R];
#pragma unroll
  for (int i = 0; i < R; ++i) score[i] = sketched[i] = 0.0f;
  if (QJL && coded) {
    load_queries<D, C, R>(floats, own_chunk + SKETCHES, own, has_chunk, q);
#pragma unroll 1
    for (int n = 0; n < R; ++n) {
      const float sum =
          key_sum<D, C, 1, false, DENORMAL, R, J, 1, 0>(k_jl_at, k_plane_at, levels, 0.0f, lane, q, jl_start);
      k_jl_at = next_row<D, 1>(k_jl_at, 1);
#pragma unroll
      for (int i = 0; i < R; ++i) sketched[i] = i == n ? sum : sketched[i];
    }
  }
  if (QJL) load_queries<D, C, R>(floats, own_chunk, own, has_chunk, q);
#pragma unroll 1
  for (int n = 0; n < R; ++n) {
    float sum = 0.0f;
    if (coded) {
      sum = key_sum<D, C, KB, LLOYD, DENORMAL, R, J, 1, 0>(k_at, k_plane_at, levels, k_code.ratio, lane, q, k_start);
      k_at = next_row<D, WK>(k_at, 1);
      k_plane_at = next_row<D, 1>(k_plane_at, 1);
    } else {
      const auto from = retyped(k_at, k_exact);
#pragma unroll 1
      for (int i = n; i < min(LK, live - start); i += R) {  // few rows: small code rather than fast
        float x[C], sums[R];
        load_exact<C>(from + min(start + int(kg) * LK + i, live - 1) * D, x);
#pragma unroll
        for (int r = 0; r < R; ++r) sums[r] = dot<C>(q + r * C, x, 0.0f);
        const float total = group_sum<J>(own_row<R, J>(sums));
        sum = (i / R ^ lane) % J == 0 ? total : sum;
      }
    }
#pragma unroll
    for (int i = 0; i < R; ++i) score[i] = i == n ? sum : score[i];
  }
  if (coded) {
    if (CENTERED && (mean_score == LOWEST || start % PAGE == 0)) {
      float sums[R];
      const uint page = start / PAGE * D;
#pragma unroll
      for (int r = 0; r < R; ++r) sums[r] = 0.0f;
#pragma unroll 1
      for (int n = 0; n < (D + 31) / 32; ++n) {
        const uint i = n * 32 + lane;
        if (D % 32 == 0 || i < D) {
          const float x = float(mean_at[page + i]);
#pragma unroll
          for (int r = 0; r < R; ++r) sums[r] = fma(queries[PLAIN + (r ^ own) * D + i], x, sums[r]);
        }
      }
      mean_score = row_sum<R, J>(own_row<R, J>(sums));
    }
#pragma unroll
    for (int i = 0; i < R; ++i) {
      const float scale = KB == RAW ? 1.0f : float(k_scale_at[i]);
      if (QJL) score[i] = fma(float(k_residual_at[i]), sketched[i], score[i]);
      score[i] = fma(scale, score[i], mean_score);
    }
  }

  // Online softmax, one maximum for all 32 tokens, raised only where a score is well above it. The excess is subtracted
  // then, and every few blocks, so that the accumulators stay small.
  bool seen[R], above = start % (32 * RENEW) == 0;
  float best = LOWEST;
#pragma unroll
  for (int i = 0; i < R; ++i) {
    const int t = start + int(own_token) + i, column = pad + (coded ? first + t : t < first ? t : n_packed + t);
    seen[i] = see<MASK, SOFTCAP>(score[i], t < live, row, column, mask, batch, kv_head, params, consts[1]);
    best = seen[i] && score[i] > best ? score[i] : best;
  }
  above = above || best > top + LAZY;
  const bool raise = simd_any(above);
  float shrink = 1.0f;
  if (raise) {
    const float new_top = max(top, row_max<R, J>(best));
    shrink = exp2(top - new_top);
    top = new_top;
    denominator *= shrink;
    excess *= shrink;
  }
  float weight[R];
#pragma unroll
  for (int i = 0; i < R; ++i) {
    const float value_scale = coded && VB != RAW ? float(v_scale_at[i]) : 1.0f;
    const float p = seen[i] ? exp2(score[i] - top) : 0.0f;
    weight[i] = seen[i] ? p * value_scale : 0.0f;
    denominator += p;
    if (coded && VB != RAW) excess += weight[i];
  }
  if (raise) {
    float offset[R];
    group_excess<R, LV>(excess * v_code.offset, own_weights, group_weights, offset);
    excess = 0.0f;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const float smaller = simd_shuffle(shrink, ushort(r * J));
#pragma unroll
      for (int e = 0; e < CV; ++e)
        acc[r * CV + e] = fma(acc[r * CV + e], smaller, -offset[r] / coordinate_scale<CV, VB, LLOYD, DENORMAL>(e));
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (int i = 0; i < R; ++i) own_weights[i * 32] = weight[i];
  simdgroup_barrier(mem_flags::mem_threadgroup);

  // Values. Rows that are not coded may hold anything past the live ones, so none of those is read.
  if (coded && VB != RAW) {
#pragma unroll 1
    for (int n = 0; n < LV / V; ++n) {
      add_values<DV, CV, VB, LLOYD, DENORMAL, R, V>(
          v_at, v_plane_at, levels + 16, v_code.ratio, group_weights + n * V, acc);
      v_at = next_row<DV, WV>(v_at, V);
      v_plane_at = next_row<DV, 1>(v_plane_at, V);
    }
  } else {
    const auto from = retyped(v_at, v_exact);
#pragma unroll 1
    for (int i = 0; i < min(LV, live - start); ++i) {
      float x[CV], w[R];
      load_exact<CV>(from + min(start + int(vg) * LV + i, live - 1) * DV, x);
      load_rows<R>(group_weights + weights_of<R>(i), w);
#pragma unroll
      for (int r = 0; r < R; ++r) {
#pragma unroll
        for (int e = 0; e < CV; ++e) acc[r * CV + e] = fma(x[e], w[r], acc[r * CV + e]);
      }
    }
  }
  if (coded) {
    k_at = next_row<D, WK>(k_at, 32 - R);
    k_plane_at = next_row<D, 1>(k_plane_at, 32 - R);
    k_jl_at = next_row<D, 1>(k_jl_at, 32 - R);
    k_residual_at += 32;
    k_scale_at += 32;
    v_scale_at += 32;
    if (VB != RAW) {
      v_at = next_row<DV, WV>(v_at, 32 - LV);
      v_plane_at = next_row<DV, 1>(v_plane_at, 32 - LV);
    }
  }
}

// Add up the lanes, rotate back what codes gave, and write.
const float offset = row_sum<R, J>(excess) * v_code.offset;
const float v_unit = coordinate_scale<CV, VB, LLOYD, DENORMAL>(lane % CV);
#pragma unroll
for (int r = 0; r < R; ++r) {
#pragma unroll
  for (int e = 0; e < CV; ++e) {
    for (int w = LV; w < 32; w *= 2) acc[r * CV + e] += simd_shuffle_xor(acc[r * CV + e], ushort(w));
  }
}
// Sums go where the queries were, which a simdgroup without tokens has only just read.
simdgroup_barrier(mem_flags::mem_threadgroup);
if (lane * CV < DV) {
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int n = 0; n < CV / 4; ++n) store_four(acc + r * CV + 4 * n, queries + r * DV + lane * CV + 4 * n);
  }
}
const float total = row_sum<R, J>(denominator);
device float* softmax = partial + softmax_at(params, DV);
if (own_token == 0 && int(own) < n_rows) {
  const uint at = to + own * splits;
  softmax[at * 2] = top;
  softmax[at * 2 + 1] = total;
}
simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll 1
for (int r = 0; r < n_rows; ++r) {
  threadgroup float* y = queries + r * DV;
  const float row_offset = simd_shuffle(offset, ushort(r * J));
  if (coded && VB != RAW) {
    for (int i = lane; i < DV; i += 32) y[i] = fma(y[i], v_unit, -row_offset);
    rotate_row_back<DV>(y, v_signs, v_mix, consts[3] * v_code.step, lane);
  }
  const size_t at = to + r * splits;
  for (int i = lane; i < DV; i += 32) partial[at * DV + i] = y[i];
}
