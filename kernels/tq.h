// Reading packed rows. The bit layout is defined in mlx_tq/packing.py, the arithmetic in mlx_tq/codec.py.

// ---------------------------------------------------------------- decoding

// Fields k and k + 16 / W of a word, W bits wide, each times 1 / field_scale. With DENORMAL the bits are read as they
// stand, as float16 denormals: one AND for the two. They stay below the exponent because the word is shifted by 8.
// third: bits k and k + 16 of it are a third bit of the two fields.
template <int W, bool DENORMAL, bool THIRD = false>
TQ_FUNC void fields(uint word, int k, thread float& low, thread float& high, uint third = 0u) {
  constexpr uint mask = (1u << W) - 1u;
  if (DENORMAL) {
    const int at = W * k % 8, up = at + W - k;
    uint both = (W * k >= 8 ? word >> 8 : word) & ((mask * 0x00010001u) << at);
    if (THIRD) both |= (up < 0 ? third >> -up : third << up) & (0x00010001u << (at + W));
    const half2 pair = as_type<half2>(both);
    low = float(pair.x);
    high = float(pair.y);
  } else {
    low = float((word >> (W * k) & mask) | (THIRD ? (third >> k & 1u) << W : 0u));
    high = float((word >> (W * k + 16) & mask) | (THIRD ? (third >> (k + 16) & 1u) << W : 0u));
  }
}

template <int W, bool DENORMAL>
constexpr float field_scale(int k) {
  return DENORMAL ? float(1u << (24 - W * k % 8)) : 1.0f;
}

// Fields of width w in a word of a chunk of c coordinates, which may be less than a word.
constexpr int word_fields(int c, int w) { return c * w < 32 ? c : 32 / w; }

// What coordinate e of a chunk must be multiplied by after load_chunk. Queries and outputs carry the factor instead.
template <int C, int B, bool LLOYD, bool DENORMAL>
constexpr float coordinate_scale(int e) {
  constexpr int W = field_width(B);
  return B == RAW || (LLOYD && B != 2) ? 1.0f : field_scale<W, DENORMAL>(e % (word_fields(C, W) / 2));
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

// Chunk `chunk` of packed row `row`, of one-bit fields too. Rows that are not coded keep their type.
template <int D, int C, int W>
TQ_FUNC device const uchar* chunk_of(device const uint* rows, uint row, uint chunk) {
  return (device const uchar*)rows + (row * (row_words(D, W) * 4) + chunk * (C * W / 8));
}

template <int D, int C, int W, typename T>
TQ_FUNC device const T* chunk_of(device const T* rows, uint row, uint chunk) {
  return rows + (row * D + chunk * C);
}

// From a packed row to the next, for such pointers.
template <int D, int W>
TQ_FUNC device const uchar* next_row(device const uchar* chunk, int rows) {
  return chunk + rows * (row_words(D, W) * 4);
}

template <int D, int W, typename T>
TQ_FUNC device const T* next_row(device const T* chunk, int rows) {
  return chunk + rows * D;
}

// C bits; and N of them such that fields<1> gives bits k and k + N / 2.
template <int C>
TQ_FUNC uint load_bits(device const uchar* from) {
  if (C == 32) return *(device const uint*)from;
  return C == 16 ? uint(*(device const ushort*)from) : uint(*from);
}

template <int N>
TQ_FUNC uint spread(uint bits) { return N == 32 ? bits : bits | bits << (16 - N / 2); }

// A chunk of an uncoded row.
template <int C, typename T>
TQ_FUNC void load_exact(device const T* row, thread float* x) {
#pragma unroll
  for (int e = 0; e < C; ++e) x[e] = float(row[e]);
}

template <int C, int B, bool LLOYD, bool DENORMAL>
TQ_FUNC void load_coded(
    device const uchar* codes, device const uchar* plane, threadgroup const float* levels, float ratio,
    thread float* x) {
  constexpr int W = field_width(B), N = word_fields(C, W);
  const uint bits = B == 3 ? load_bits<C>(plane) : 0u;
  uint chunk_words[C / N];
  if (C * W < 32) {  // less than a word: fields k and k + N / 2 go where a word has them
    chunk_words[0] = spread<C * W>(load_bits<C * W>(codes));
  } else if (C / N % 2 == 0) {
#pragma unroll
    for (int w = 0; w < C / N / 2; ++w) {
      const uint2 pair = ((device const uint2*)codes)[w];
      chunk_words[2 * w] = pair.x;
      chunk_words[2 * w + 1] = pair.y;
    }
  } else {
    chunk_words[0] = *(device const uint*)codes;
  }
#pragma unroll
  for (int w = 0; w < C / N; ++w) {
    const uint word = chunk_words[w], third = spread<N>(C > 16 ? bits >> w * N & 0xFFFFu : bits);
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
        fields<W, DENORMAL, B == 3>(word, k, x[e], x[e + N / 2], third);
      }
    }
  }
  if (LLOYD && B > 2) {
#pragma unroll
    for (int e = 0; e < C; ++e) x[e] = levels[int(x[e] * coordinate_scale<C, B, false, DENORMAL>(e))];
  }
}

// A chunk of packed rows: codes over their coordinate_scale, before the step, the offset and the row's scale.
template <int C, int B, bool LLOYD, bool DENORMAL>
TQ_FUNC void load_chunk(
    device const uchar* codes, device const uchar* plane, threadgroup const float* levels, float ratio,
    thread float* x) {
  load_coded<C, B, LLOYD, DENORMAL>(codes, plane, levels, ratio, x);
}

template <int C, int B, bool LLOYD, bool DENORMAL, typename T>
TQ_FUNC void load_chunk(
    device const T* codes, device const uchar* plane, threadgroup const float* levels, float ratio, thread float* x) {
  load_exact<C>(codes, x);
}

// A pointer with the type of another.
template <typename T, typename U>
TQ_FUNC device const U* retyped(device const T* pointer, device const U* like) {
  return (device const U*)pointer;
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

// Sums over lanes of R query rows, the lanes of J neighbours each for a row of their own: the part of row `own ^ r` in
// x[r] becomes this lane's part of the sum of its own row. Lanes swap what is the other's, which needs no selection.
template <int R, int J>
TQ_FUNC float own_row(thread float* x) {
  if constexpr (R == 1) {
    return x[0];
  } else {
#pragma unroll
    for (int r = 0; r < R / 2; ++r) x[r] += simd_shuffle_xor(x[r + R / 2], ushort(J * R / 2));
    return own_row<R / 2, J>(x);
  }
}

// Sum and maximum over all lanes that have this lane's row.
template <int R, int J>
TQ_FUNC float row_sum(float x) {
  x = group_sum<J>(x);
#pragma unroll
  for (int w = J * R; w < 32; w *= 2) x += simd_shuffle_xor(x, ushort(w));
  return x;
}

template <int R, int J>
TQ_FUNC float row_max(float x) {
#pragma unroll
  for (int w = 1; w < 32; w *= 2)
    if (w < J || w >= J * R) x = max(x, simd_shuffle_xor(x, ushort(w)));
  return x;
}

// R numbers, one a query row, from threadgroup memory.
template <int R>
TQ_FUNC void load_rows(threadgroup const float* from, thread float* x) {
  if constexpr (R == 4) {
    const float4 four = *(threadgroup const float4*)from;
    x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
  } else {
#pragma unroll
    for (int r = 0; r < R; ++r) x[r] = from[r];
  }
}

// Where R weights of token t are: a lane that writes some for R tokens does so 32 apart.
template <int R>
TQ_FUNC int weights_of(int t) { return t % R * 32 + t / R * R; }

// What the offset of the codes added to the accumulators of a group of LV lanes, for each query row. `excess` is this
// lane's part, of R tokens and its own row: it goes where their first weight would.
template <int R, int LV>
TQ_FUNC void group_excess(
    float excess, threadgroup float* own, threadgroup const float* weights, thread float* offset) {
  simdgroup_barrier(mem_flags::mem_threadgroup);
  *own = excess;
  simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (int r = 0; r < R; ++r) offset[r] = 0.0f;
#pragma unroll
  for (int i = 0; i < LV; i += R) {
    float part[R];
    load_rows<R>(weights + i, part);
#pragma unroll
    for (int r = 0; r < R; ++r) offset[r] += part[r];
  }
}

// C coordinates of each of R queries, that of row `own` first, or zeros where a lane has no chunk.
template <int D, int C, int R>
TQ_FUNC void load_queries(threadgroup const float* from, uint chunk, uint own, bool there, thread float* q) {
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int n = 0; n < C / 4; ++n) {
      float four[4];
      load_rows<4>(from + (chunk + (r ^ own) * D + 4 * n), four);
#pragma unroll
      for (int i = 0; i < 4; ++i) q[r * C + 4 * n + i] = there ? four[i] : 0.0f;
    }
  }
}

// Sum of the coordinates of a row in threadgroup memory that own_row brings together in lane kl of those that share a
// row: chunks kl, kl + J and so on. `unit` is that of coordinates lane, lane + 32 and so on.
template <int D, int C, int J>
TQ_FUNC float own_part(threadgroup const float* y, uint kl, uint lane, float unit) {
  float sum = 0.0f;
#pragma unroll 1
  for (int n = 0; n < share(D); ++n) {
    float of_chunk = group_sum<C>(holds(D, n, lane) ? y[32 * n + lane] / unit : 0.0f);
#pragma unroll
    for (int w = J * C; w < 32; w *= 2) of_chunk += simd_shuffle_xor(of_chunk, ushort(w));
    const uint place = (kl - n * (32 / C)) % J;  // of its first chunk among those that lanes have now
    const float found = simd_shuffle(of_chunk, ushort(place * C % 32));
    sum += place < 32 / C ? found : 0.0f;
  }
  return sum;
}

TQ_FUNC void store_four(thread const float* x, threadgroup float* to) {
  float4 four;
  four.x = x[0], four.y = x[1], four.z = x[2], four.w = x[3];
  *(threadgroup float4*)to = four;
}

// A query row, times `scale`.
template <int D, typename T>
TQ_FUNC void read_query(device const T* from, float scale, uint lane, threadgroup float* to) {
  for (uint i = lane; i < D; i += 32) to[i] = float(from[i]) * scale;
}

// ---------------------------------------------------------------- packed rows, a group of lanes to each

// Dot products of R queries with J packed keys, R rows apart, of which every lane of a group of R J reads its own
// chunk: lane i of each J gets the sum of key i and its own query. Keys I, I + W, I + 2 W ... are done here; the halves
// of each pair of lanes swap what the other is to keep, so a key costs little more than one shuffle a query.
template <int D, int C, int B, bool LLOYD, bool DENORMAL, int R, int J, int W, int I, typename P>
TQ_FUNC float key_sum(
    P codes, device const uchar* plane, threadgroup const float* levels, float ratio, uint lane,
    thread const float* q, float start) {
  if constexpr (W == J) {
    float x[C], sums[R];
    load_chunk<C, B, LLOYD, DENORMAL>(
        next_row<D, field_width(B)>(codes, I * R), next_row<D, 1>(plane, I * R), levels, ratio, x);
#pragma unroll
    for (int r = 0; r < R; ++r) sums[r] = dot<C>(q + r * C, x, r ? 0.0f : start);
    return own_row<R, J>(sums);
  } else {
    const float a = key_sum<D, C, B, LLOYD, DENORMAL, R, J, 2 * W, I>(codes, plane, levels, ratio, lane, q, start);
    const float b = key_sum<D, C, B, LLOYD, DENORMAL, R, J, 2 * W, I + W>(codes, plane, levels, ratio, lane, q, start);
    const bool upper = lane & W;
    const float keep = upper ? b : a, give = upper ? a : b;
    return keep + simd_shuffle_xor(give, ushort(W));
  }
}

// Adds N packed values, times their weights, to this lane's chunk of R accumulators. weights: R of each value.
template <int D, int C, int B, bool LLOYD, bool DENORMAL, int R, int N, int I = 0, typename P>
TQ_FUNC void add_values(
    P codes, device const uchar* plane, threadgroup const float* levels, float ratio, threadgroup const float* weights,
    thread float* acc) {
  if constexpr (I < N) {
    float x[C], w[R];
    load_chunk<C, B, LLOYD, DENORMAL>(
        next_row<D, field_width(B)>(codes, I), next_row<D, 1>(plane, I), levels, ratio, x);
    load_rows<R>(weights + weights_of<R>(I), w);
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int e = 0; e < C; ++e) acc[r * C + e] = fma(x[e], w[r], acc[r * C + e]);
    }
    add_values<D, C, B, LLOYD, DENORMAL, R, N, I + 1>(codes, plane, levels, ratio, weights, acc);
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
