// Shared by all kernels: sizes, the Hadamard transform, decoding of packed rows.
// The bit layout is defined in mlx_tq/packing.py, the arithmetic in mlx_tq/codec.py.

#ifndef TQ_FUNC
#define TQ_FUNC inline
#endif

constant constexpr float LOG2E = 1.44269504088896340736f;
constant constexpr float LOWEST = -3.402823466e+38f;
// 16 in a format's bits means rows that are not coded.
constant constexpr int RAW = 16;

// Consecutive coordinates of a row that one lane works on.
constexpr int chunk(int d) { return d > 256 ? 32 : 16; }

// Lanes that share a row: a power of two, so that the last ones may be idle.
constexpr int lanes(int d) {
  int n = 1;
  while (n * chunk(d) < d) n *= 2;
  return n;
}

// Largest power of two p with d = m p; m is 1 or the order of a Paley matrix.
constexpr int power_part(int d) {
  int p = 1;
  while (d % (2 * p) == 0) p *= 2;
  return p == d ? d : p / 4;  // Paley orders are 4 times an odd number
}

constexpr int field_width(int bits) { return bits == 4 ? 4 : 2; }

constexpr int row_words(int d, int width) { return (d * width + 31) / 32; }

// Elements of a row of the codes region.
constexpr int row_size(int d, int bits) { return bits == RAW ? d : row_words(d, field_width(bits)); }

// Words that encode.metal writes for a row: codes, plane and signs.
constexpr int encoded_words(int d, int bits, bool qjl) {
  return row_words(d, field_width(bits)) + (bits == 3 ? row_words(d, 1) : 0) + (qjl ? row_words(d, 1) : 0);
}

// ---------------------------------------------------------------- the transform, by one simdgroup

// H x in place over D values, natural order, as mlx_tq/rotation.py adds them. mix: rows of the Paley matrix, bit b set
// where column b is +1.
template <int D>
TQ_FUNC void hadamard(threadgroup float* x, device const uint* mix, uint lane) {
  constexpr int P = power_part(D), M = D / P;
  for (int h = 1; h < P; h *= 2) {
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = lane; i < D / 2; i += 32) {
      const int j = i / h * 2 * h + i % h;
      const float a = x[j], b = x[j + h];
      x[j] = a + b;
      x[j + h] = a - b;
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  if (M > 1) {
    float mixed[(D + 31) / 32];
    for (int n = 0, i = lane; i < D; ++n, i += 32) {
      const uint row = mix[i / P];
      float total = row & 1u ? x[i % P] : -x[i % P];
      for (int b = 1; b < M; ++b) {
        const float v = x[b * P + i % P];
        total += row >> b & 1u ? v : -v;
      }
      mixed[n] = total;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (int n = 0, i = lane; i < D; ++n, i += 32) x[i] = mixed[n];
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// Sum of D values, neighbours first, as codec.tree_sum adds them. Leaves x changed.
template <int D>
TQ_FUNC float tree_sum(threadgroup float* x, uint lane) {
  constexpr int P = power_part(D), M = D / P;
  for (int h = 1; h < P; h *= 2) {
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = lane; i < D / (2 * h); i += 32) x[2 * h * i] += x[2 * h * i + h];
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  float total = x[0];
  for (int m = 1; m < M; ++m) total += x[m * P];
  simdgroup_barrier(mem_flags::mem_threadgroup);
  return total;
}

// 12 significant bits: squares and differences of such numbers are exact, whether or not they are fused.
TQ_FUNC float round12(float x) {
  return isfinite(x) ? as_type<float>((as_type<uint>(x) + 0x800u) & 0xFFFFF000u) : x;
}

// A float as T; float16 saturates where finite values would overflow.
template <typename T>
TQ_FUNC T narrow(float x, float top) {
  return T(isfinite(x) ? min(max(x, -top), top) : x);
}

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

// ---------------------------------------------------------------- encoding, by one simdgroup

// The place-holders that stand for words and scales of rows that are not coded, 8 elements each. Metal converts nothing
// to bfloat unless told to, not even 0.
template <typename S>
TQ_FUNC void write_nothing(device uint* words, device S* scales, uint lane) {
  if (lane >= 8) return;
  words[lane] = 0u;
  scales[lane] = S(0.0f);
}

// Rotates a row into y, rounded to T as codec.rotate does.
template <int D, typename T>
TQ_FUNC void rotate_row(
    device const T* row, device const float* signs, device const uint* mix, threadgroup float* y, float norm, float top,
    uint lane) {
  for (int i = lane; i < D; i += 32) y[i] = float(row[i]) * signs[i];
  hadamard<D>(y, mix, lane);
  for (int i = lane; i < D; i += 32) y[i] = float(narrow<T>(y[i] * norm, top));
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

// The row's fields of W bits, one value in `fields` each, as words.
template <int D, int W>
TQ_FUNC void pack_row(threadgroup const float* fields, device uint* words, uint lane) {
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (int w = lane; w < row_words(D, W); w += 32) {
    uint word = 0u;
    for (int k = 0; k < 32 / W && w * (32 / W) + k < D; ++k) word |= uint(fields[w * (32 / W) + k]) << (W * k);
    words[w] = word;
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

// Quantises the rotated row y, which it overwrites, as codec.quantise does. words: codes, plane, jl. scales: scale,
// residual. table: see kernels.code_table.
template <int D, int B, bool LLOYD, bool QJL, bool NORM, typename S>
TQ_FUNC void quantise_row(
    threadgroup float* y, device const float* jl_signs, device const uint* mix, device const float* table,
    device uint* words, device S* scales, float top, uint lane) {
  constexpr int N = (D + 31) / 32, LAST = (1 << B) - 1, HALF = 1 << (B - 1);
  float unit[N];
  for (int n = 0, i = lane; i < D; ++n, i += 32) {
    unit[n] = y[i];
    const float x = round12(y[i]);
    y[i] = x * x;
  }
  float norm = sqrt(tree_sum<D>(y, lane));
  const bool finite = isfinite(norm), present = finite && norm >= 1e-12f;
  const float inverse = present ? 1.0f / norm : 0.0f;
  norm = present ? norm : finite ? 0.0f : NAN;
  for (int n = 0, i = lane; i < D; ++n, i += 32) unit[n] = present ? unit[n] * inverse : 0.0f;

  int code[N];
  float scale = norm, step = 1.0f;
  if (LLOYD) {
    for (int n = 0, i = lane; i < D; ++n, i += 32) {
      code[n] = 0;
      for (int b = 0; b < LAST; ++b) code[n] += unit[n] >= table[16 + b] ? 1 : 0;
    }
    if (NORM && !QJL) {
      for (int n = 0, i = lane; i < D; ++n, i += 32) y[i] = table[32 + code[n]];
      scale = norm / sqrt(tree_sum<D>(y, lane));
    }
  } else {
    float best = -1.0f;
    int square = 1;
    for (int c = 0; c < int(table[12]); ++c) {
      int sum = 0, product = 0;
      for (int n = 0, i = lane; i < D; ++n, i += 32) {
        const int odd = 2 * clamp(int(floor(unit[n] * table[c])) + HALF, 0, LAST) - LAST;
        sum += odd * odd;
        product += int(floor(unit[n] * table[13])) * odd;
      }
      sum = simd_sum(sum);
      const float along = float(simd_sum(product)), cosine = along * along / float(sum);
      if (cosine > best) {
        best = cosine;
        square = sum;
        step = table[6 + c];
        for (int n = 0, i = lane; i < D; ++n, i += 32)
          code[n] = clamp(int(floor(unit[n] * table[c])) + HALF, 0, LAST);
      }
    }
    scale = NORM && !QJL ? 2.0f * norm / sqrt(float(square)) : norm * step;
  }

  for (int n = 0, i = lane; i < D; ++n, i += 32) y[i] = float(B == 3 ? code[n] & 3 : code[n]);
  pack_row<D, field_width(B)>(y, words, lane);
  words += row_words(D, field_width(B));
  if (B == 3) {
    for (int n = 0, i = lane; i < D; ++n, i += 32) y[i] = float(code[n] >> 2);
    pack_row<D, 1>(y, words, lane);
    words += row_words(D, 1);
  }
  if (lane == 0) scales[0] = narrow<S>(scale, top);
  if (QJL) {
    float rest[N];
    for (int n = 0, i = lane; i < D; ++n, i += 32) {
      const float centre = LLOYD ? table[code[n]] : round12(float(2 * code[n] - LAST) * (step * 0.5f));
      rest[n] = round12(unit[n]) - centre;
      const float x = round12(rest[n]);
      y[i] = x * x;
    }
    const float residual = sqrt(tree_sum<D>(y, lane));
    if (lane == 0) scales[1] = narrow<S>(LLOYD ? residual : residual / step, top);
    for (int n = 0, i = lane; i < D; ++n, i += 32) y[i] = rest[n] * jl_signs[i];
    hadamard<D>(y, mix, lane);
    for (int i = lane; i < D; i += 32) y[i] = y[i] >= 0.0f ? 1.0f : 0.0f;
    pack_row<D, 1>(y, words, lane);
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
