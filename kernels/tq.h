// Reading packed rows. The bit layout is defined in mlx_tq/packing.py, the arithmetic in mlx_tq/codec.py.

// ---------------------------------------------------------------- decoding

// Fields k and k + 16 / W of a word, W bits wide, each times 1 / field_scale. With DENORMAL the bits are read as they
// stand, as float16 denormals: one AND for the two. They stay below the exponent because the word is shifted by 8.
template <int W, bool DENORMAL>
TQ_FUNC void fields(uint word, int k, thread float& low, thread float& high) {
  constexpr uint mask = (1u << W) - 1u;
  if (DENORMAL) {
    const half2 both = as_type<half2>((W * k >= 8 ? word >> 8 : word) & ((mask * 0x00010001u) << (W * k % 8)));
    low = float(both.x);
    high = float(both.y);
  } else {
    low = float(word >> (W * k) & mask);
    high = float(word >> (W * k + 16) & mask);
  }
}

template <int W, bool DENORMAL>
constexpr float field_scale(int k) {
  return DENORMAL ? float(1u << (24 - W * k % 8)) : 1.0f;
}

// What coordinate e of a chunk must be multiplied by after load_chunk. Queries and outputs carry the factor instead.
template <int B, bool LLOYD, bool DENORMAL>
constexpr float coordinate_scale(int e) {
  return B == RAW || LLOYD ? 1.0f : field_scale<field_width(B), DENORMAL>(e % (16 / field_width(B)));
}

// What is to be subtracted from a code.
template <int B, bool LLOYD>
constexpr float code_offset() {
  return B == RAW || LLOYD ? 0.0f : ((1 << B) - 1) * 0.5f;
}

// The C bits of chunk `index` of a row of one-bit fields, spread so that fields<1> gives bits k and k + C / 2.
template <int C>
TQ_FUNC uint load_bits(device const uint* row, int index) {
  if (C == 32) return row[index];
  const uint bits = row[index / 2] >> (index % 2 * 16) & 0xFFFFu;
  return (bits & 0xFFu) | (bits & 0xFF00u) << 8;
}

// Chunk `index` of an uncoded row.
template <int C, int B, bool LLOYD, bool DENORMAL, typename T>
TQ_FUNC void load_exact(device const T* row, int index, thread float* x) {
#pragma unroll
  for (int e = 0; e < C; ++e)
    x[e] = float(row[index * C + e]) * (1.0f / coordinate_scale<B, LLOYD, DENORMAL>(e));
}

template <int C, int B, bool LLOYD, bool DENORMAL>
TQ_FUNC void load_coded(
    device const uint* row, device const uint* plane, threadgroup const float* levels, int index, thread float* x) {
  constexpr int W = field_width(B), N = 32 / W;
  const uint third = B == 3 ? load_bits<C>(plane, index) : 0u;
  uint chunk_words[C / N];
  if (C / N % 2 == 0) {
    device const uint2* pairs = (device const uint2*)row + index * (C / N / 2);
#pragma unroll
    for (int w = 0; w < C / N / 2; ++w) {
      const uint2 pair = pairs[w];
      chunk_words[2 * w] = pair.x;
      chunk_words[2 * w + 1] = pair.y;
    }
  } else {
    chunk_words[0] = row[index];
  }
#pragma unroll
  for (int w = 0; w < C / N; ++w) {
    const uint word = chunk_words[w];
#pragma unroll
    for (int k = 0; k < N / 2; ++k) {
      const int e = w * N + k;
      if (B == 2 && LLOYD) {
        // Four symmetric levels are affine in the two bits of the code.
        const float inner = levels[2], outer = levels[3];
        float low[2], high[2];
        fields<1, DENORMAL>(word, 2 * k, low[0], low[1]);
        fields<1, DENORMAL>(word, 2 * k + 1, high[0], high[1]);
#pragma unroll
        for (int i = 0; i < 2; ++i)
          x[e + i * N / 2] = fma(high[i], field_scale<1, DENORMAL>(2 * k + 1) * (outer + inner),
                                 fma(low[i], field_scale<1, DENORMAL>(2 * k) * (outer - inner), -outer));
      } else {
        fields<W, DENORMAL>(word, k, x[e], x[e + N / 2]);
      }
    }
  }
  if (B == 3) {
#pragma unroll
    for (int k = 0; k < C / 2; ++k) {
      float bit[2];
      fields<1, DENORMAL>(third, k, bit[0], bit[1]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int e = k + i * C / 2;
        const float weight = 4.0f * field_scale<1, DENORMAL>(k) / coordinate_scale<B, false, DENORMAL>(e);
        x[e] = fma(bit[i], weight, x[e]);
      }
    }
  }
  if (LLOYD && B > 2) {
#pragma unroll
    for (int e = 0; e < C; ++e) x[e] = levels[int(x[e] * coordinate_scale<B, false, DENORMAL>(e))];
  }
}

// Chunk `index` of a packed row: codes over their coordinate_scale, before code_offset and the row's scale. The two
// forms are told apart by the type of the region.
template <int C, int B, bool LLOYD, bool DENORMAL>
TQ_FUNC void load_chunk(
    device const uint* row, device const uint* plane, threadgroup const float* levels, int index, thread float* x) {
  load_coded<C, B, LLOYD, DENORMAL>(row, plane, levels, index, x);
}

template <int C, int B, bool LLOYD, bool DENORMAL, typename T>
TQ_FUNC void load_chunk(
    device const T* row, device const uint* plane, threadgroup const float* levels, int index, thread float* x) {
  load_exact<C, B, LLOYD, DENORMAL>(row, index, x);
}

// The rows to read one by one: the exact ones, or packed ones that are not coded.
template <typename T>
TQ_FUNC device const T* plain_rows(device const T* packed, device const T* exact, bool coded) {
  return coded ? packed : exact;
}

template <typename T>
TQ_FUNC device const T* plain_rows(device const uint* packed, device const T* exact, bool coded) {
  return exact;
}

// ---------------------------------------------------------------- reductions

template <int C>
TQ_FUNC float dot(thread const float* a, thread const float* b, float sum) {
#pragma unroll
  for (int e = 0; e < C; ++e) sum = fma(a[e], b[e], sum);
  return sum;
}

// Soft-cap, mask and change to base 2 of a score; whether query row `row` of its group sees the token at `column`.
template <int MASK, bool SOFTCAP, typename M>
TQ_FUNC bool see(
    thread float& s, bool live, int row, int column, device const M* mask, int batch, int kv_head,
    device const int* params, float softcap) {
  const int G = params[0], columns = params[2];
  bool seen = live;
  if (SOFTCAP) s = softcap * tanh(s / softcap);
  if (MASK == 1) seen = seen && column <= columns - params[1] + row / G;
  if (MASK >= 2) {
    const size_t at = batch * size_t(params[8]) + (kv_head * G + row % G) * size_t(params[9]) +
        (row / G) * size_t(params[10]) + min(column, columns - 1) * size_t(params[11]);
    if (MASK == 2) seen = seen && bool(mask[at]);
    if (MASK == 3) s += float(mask[at]);
  }
  seen = seen && !(s == -INFINITY);
  s *= LOG2E;
  if (s < LOWEST) s = LOWEST;  // a NaN stays, so that it shows
  return seen;
}

// Sum over N neighbouring lanes, for all of them.
template <int N>
TQ_FUNC float group_sum(float x) {
  if constexpr (N > 1) {
    x = group_sum<N / 2>(x);
    x += simd_shuffle_xor(x, ushort(N / 2));
  }
  return x;
}

// ---------------------------------------------------------------- packed rows, a group of lanes to each

// Dot products of R queries with LK packed keys, of which every lane of a group of LK reads its own chunk: lane i of
// the group gets the sums of key i. Keys I, I + W, I + 2 W ... are done here; the halves of each pair of lanes swap what
// the other is to keep, so a key costs less than one shuffle. start and sums: one a query, then one a sketch if QJL.
template <int D, int B, bool LLOYD, bool QJL, bool DENORMAL, int R, int W, int I, typename P>
TQ_FUNC void key_sums(
    P codes, device const uint* plane, device const uint* jl, threadgroup const float* levels, int index, uint lane,
    thread const float* q, thread const float* q_jl, thread const float* start, thread float* sums) {
  constexpr int C = chunk(D), SUMS = QJL ? 2 * R : R;
  if constexpr (W == lanes(D)) {
    float x[C];
    load_chunk<C, B, LLOYD, DENORMAL>(
        codes + I * row_size(D, B), plane + I * row_words(D, 1), levels, index, x);
#pragma unroll
    for (int r = 0; r < R; ++r) sums[r] = dot<C>(q + r * C, x, start[r]);
    if (QJL) {
      const uint bits = load_bits<C>(jl + I * row_words(D, 1), index);
#pragma unroll
      for (int k = 0; k < C / 2; ++k) fields<1, DENORMAL>(bits, k, x[k], x[k + C / 2]);
#pragma unroll
      for (int r = 0; r < R; ++r) sums[SUMS - R + r] = dot<C>(q_jl + r * C, x, start[SUMS - R + r]);
    }
  } else {
    float other[SUMS];
    key_sums<D, B, LLOYD, QJL, DENORMAL, R, 2 * W, I>(codes, plane, jl, levels, index, lane, q, q_jl, start, sums);
    key_sums<D, B, LLOYD, QJL, DENORMAL, R, 2 * W, I + W>(codes, plane, jl, levels, index, lane, q, q_jl, start, other);
    const bool upper = lane & W;
#pragma unroll
    for (int r = 0; r < SUMS; ++r) {
      const float keep = upper ? other[r] : sums[r], give = upper ? sums[r] : other[r];
      sums[r] = keep + simd_shuffle_xor(give, ushort(W));
    }
  }
}

// Adds packed values I, I + 1 ... of a group of lanes, times their weights, to this lane's chunk of R accumulators.
// weight: of the token of this lane; the group's first token is that of lane `from`.
template <int D, int B, bool LLOYD, bool DENORMAL, int R, int I, typename P>
TQ_FUNC void add_values(
    P codes, device const uint* plane, threadgroup const float* levels, int index, int from, thread const float* weight,
    thread float* acc) {
  constexpr int C = chunk(D);
  if constexpr (I < lanes(D)) {
    float x[C];
    load_chunk<C, B, LLOYD, DENORMAL>(
        codes + I * row_size(D, B), plane + I * row_words(D, 1), levels, index, x);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const float w = simd_shuffle(weight[r], ushort(from + I));
#pragma unroll
      for (int e = 0; e < C; ++e) acc[r * C + e] = fma(x[e], w, acc[r * C + e]);
    }
    add_values<D, B, LLOYD, DENORMAL, R, I + 1>(codes, plane, levels, index, from, weight, acc);
  }
}

// Coordinate i of a packed row, before its scale.
template <int D, int B, bool LLOYD>
TQ_FUNC float coordinate(device const uint* row, device const uint* plane, device const float* levels, int i) {
  constexpr int W = field_width(B), N = 32 / W;
  int code = row[i / N] >> (i % N * W) & ((1u << W) - 1u);
  if (B == 3) code |= (plane[i / 32] >> (i % 32) & 1u) << 2;
  return LLOYD ? levels[code] : float(code) - code_offset<B, LLOYD>();
}

template <int D, int B, bool LLOYD, typename T>
TQ_FUNC float coordinate(device const T* row, device const uint* plane, device const float* levels, int i) {
  return float(row[i]);
}
