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
  return B == RAW || (LLOYD && B != 2) ? 1.0f : field_scale<field_width(B), DENORMAL>(e % (16 / field_width(B)));
}

// What load_chunk gives is in units of `step` and above zero by `offset`. Four symmetric levels are affine in the two
// bits of the code: low + ratio * high.
struct Affine {
  float ratio, step, offset;
};

template <int B, bool LLOYD>
TQ_FUNC Affine affine(threadgroup const float* levels) {
  Affine code;
  code.ratio = 0.0f;
  code.step = 1.0f;
  code.offset = code_offset<B, LLOYD>();
  if (B == 2 && LLOYD) {
    const float inner = levels[2], outer = levels[3];
    code.step = outer - inner;
    code.ratio = (outer + inner) / code.step;
    code.offset = outer / code.step;
  }
  return code;
}

// The C bits of place `index` in rows of one-bit fields, so that fields<1> gives bits k and k + C / 2 of them.
template <int C>
TQ_FUNC uint load_bits(device const uint* rows, uint index) {
  if (C == 32) return rows[index];
  const uint bits = ((device const ushort*)rows)[index];
  return bits | bits << 8;
}

// Such places in a row, the last of which may be idle.
constexpr int bit_places(int d) { return row_words(d, 1) * 32 / chunk(d); }

// Chunk `index` of an uncoded row.
template <int C, int B, bool LLOYD, bool DENORMAL, typename T>
TQ_FUNC void load_exact(device const T* row, uint index, thread float* x) {
  row += index * C;
#pragma unroll
  for (int e = 0; e < C; ++e)
    x[e] = float(row[e]) * (1.0f / coordinate_scale<B, LLOYD, DENORMAL>(e));
}

template <int C, int B, bool LLOYD, bool DENORMAL>
TQ_FUNC void load_coded(
    device const uint* codes, uint chunk_at, device const uint* plane, uint bits_at,
    threadgroup const float* levels, float ratio, thread float* x) {
  constexpr int W = field_width(B), N = 32 / W;
  const uint third = B == 3 ? load_bits<C>(plane, bits_at) : 0u;
  uint chunk_words[C / N];
  if (C / N % 2 == 0) {
    device const uint2* pairs = (device const uint2*)codes;
#pragma unroll
    for (int w = 0; w < C / N / 2; ++w) {
      const uint2 pair = pairs[chunk_at * (C / N / 2) + w];
      chunk_words[2 * w] = pair.x;
      chunk_words[2 * w + 1] = pair.y;
    }
  } else {
    chunk_words[0] = codes[chunk_at];
  }
#pragma unroll
  for (int w = 0; w < C / N; ++w) {
    const uint word = chunk_words[w];
#pragma unroll
    for (int k = 0; k < N / 2; ++k) {
      const int e = w * N + k;
      if (B == 2 && LLOYD) {
        const float factor = ratio * (field_scale<1, DENORMAL>(2 * k + 1) / field_scale<1, DENORMAL>(2 * k));
        float low[2], high[2];
        fields<1, DENORMAL>(word, 2 * k, low[0], low[1]);
        fields<1, DENORMAL>(word, 2 * k + 1, high[0], high[1]);
#pragma unroll
        for (int i = 0; i < 2; ++i) x[e + i * N / 2] = fma(high[i], factor, low[i]);
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

// Chunk `chunk_at` of packed rows: codes over their coordinate_scale, before the step, the offset and the row's scale.
// Its bits of one-bit fields are at place `bits_at`. The two forms are told apart by the type of the region.
template <int C, int B, bool LLOYD, bool DENORMAL>
TQ_FUNC void load_chunk(
    device const uint* codes, uint chunk_at, device const uint* plane, uint bits_at,
    threadgroup const float* levels, float ratio, thread float* x) {
  load_coded<C, B, LLOYD, DENORMAL>(codes, chunk_at, plane, bits_at, levels, ratio, x);
}

template <int C, int B, bool LLOYD, bool DENORMAL, typename T>
TQ_FUNC void load_chunk(
    device const T* codes, uint chunk_at, device const uint* plane, uint bits_at,
    threadgroup const float* levels, float ratio, thread float* x) {
  load_exact<C, B, LLOYD, DENORMAL>(codes, chunk_at, x);
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
    P codes, uint chunk_at, device const uint* plane, device const uint* jl, uint bits_at,
    threadgroup const float* levels, float ratio, uint lane, thread const float* q, thread const float* q_jl,
    thread const float* start, thread float* sums) {
  constexpr int C = chunk(D), SUMS = QJL ? 2 * R : R;
  if constexpr (W == lanes(D)) {
    float x[C];
    load_chunk<C, B, LLOYD, DENORMAL>(
        codes, chunk_at + I * (D / C), plane, bits_at + I * bit_places(D), levels, ratio, x);
#pragma unroll
    for (int r = 0; r < R; ++r) sums[r] = dot<C>(q + r * C, x, start[r]);
    if (QJL) {
      const uint bits = load_bits<C>(jl, bits_at + I * bit_places(D));
#pragma unroll
      for (int k = 0; k < C / 2; ++k) fields<1, DENORMAL>(bits, k, x[k], x[k + C / 2]);
#pragma unroll
      for (int r = 0; r < R; ++r) sums[SUMS - R + r] = dot<C>(q_jl + r * C, x, start[SUMS - R + r]);
    }
  } else {
    float other[SUMS];
    key_sums<D, B, LLOYD, QJL, DENORMAL, R, 2 * W, I>(
        codes, chunk_at, plane, jl, bits_at, levels, ratio, lane, q, q_jl, start, sums);
    key_sums<D, B, LLOYD, QJL, DENORMAL, R, 2 * W, I + W>(
        codes, chunk_at, plane, jl, bits_at, levels, ratio, lane, q, q_jl, start, other);
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
    P codes, uint chunk_at, device const uint* plane, uint bits_at, threadgroup const float* levels, float ratio,
    int from, thread const float* weight, thread float* acc) {
  constexpr int C = chunk(D);
  if constexpr (I < lanes(D)) {
    float x[C];
    load_chunk<C, B, LLOYD, DENORMAL>(
        codes, chunk_at + I * (D / C), plane, bits_at + I * bit_places(D), levels, ratio, x);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const float w = simd_shuffle(weight[r], ushort(from + I));
#pragma unroll
      for (int e = 0; e < C; ++e) acc[r * C + e] = fma(x[e], w, acc[r * C + e]);
    }
    add_values<D, B, LLOYD, DENORMAL, R, I + 1>(
        codes, chunk_at, plane, bits_at, levels, ratio, from, weight, acc);
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
