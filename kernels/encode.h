// Writing packed rows, by one simdgroup. The arithmetic is defined in mlx_tq/codec.py.

// The place-holders that stand for words and scales of rows that are not coded, 8 elements each. Metal converts nothing
// to bfloat unless told to, not even 0.
template <typename S>
TQ_FUNC void write_nothing(device uint* words, device S* scales, uint lane) {
  if (lane >= 8) return;
  words[lane] = 0u;
  scales[lane] = S(0.0f);
}

// Adds up neighbours, then neighbouring sums of two, and so on to sums of P: the first value of each P is left with one.
template <int H, int P, int N>
TQ_FUNC void add_neighbours(thread float* v) {
  if constexpr (H < P) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if (H < 32)
        v[n] += simd_shuffle_xor(v[n], ushort(H % 32));
      else if (n % (H / 16) == 0)
        v[n] += v[n + H / 32];
    }
    add_neighbours<2 * H, P, N>(v);
  }
}

// Sum of D values that lie 32 apart in v, as codec.tree_sum adds them. Leaves v changed.
template <int D>
TQ_FUNC float tree_sum(thread float* v) {
  constexpr int P = power_part(D), M = D / P;
  add_neighbours<1, P, share(D)>(v);
  float total = simd_shuffle(v[0], ushort(0));
#pragma unroll
  for (int m = 1; m < M; ++m) total += simd_shuffle(v[m * P / 32], ushort(m * P % 32));
  return total;
}

// Sum of N numbers that lie D apart, as codec.page_means adds them.
template <int N, int D, typename T>
TQ_FUNC float page_sum(device const T* x) {
  if constexpr (N == 1)
    return float(*x);
  else
    return page_sum<N / 2, D>(x) + page_sum<N / 2, D>(x + N / 2 * D);
}

// 12 significant bits: squares and differences of such numbers are exact, whether or not they are fused.
TQ_FUNC float round12(float x) {
  return isfinite(x) ? as_type<float>((as_type<uint>(x) + 0x800u) & 0xFFFFF000u) : x;
}

// Fields of W bits, whose values lanes hold, as the words of a row. y: room for a row.
template <int D, int W>
TQ_FUNC void pack_row(thread const float* fields, threadgroup float* y, device uint* words, uint lane) {
  store_row<D>(fields, y, lane);
  for (int w = lane; w < row_words(D, W); w += 32) {
    uint word = 0u;
    for (int k = 0; k < 32 / W && w * (32 / W) + k < D; ++k) word |= uint(y[w * (32 / W) + k]) << (W * k);
    words[w] = word;
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

// The code of a coordinate in units of the step.
template <int B>
TQ_FUNC int uniform_code(float x) {
  return clamp(int(floor(x)) + (1 << (B - 1)), 0, (1 << B) - 1);
}

// Quantises the rotated row that lanes hold in unit, which it overwrites, as codec.quantise does. y: room for a row.
// words: codes, plane, jl. scales: scale, residual. table: see kernels.code_table.
template <int D, int B, bool LLOYD, bool QJL, bool NORM, int CHOICES, typename S>
TQ_FUNC void quantise_row(
    thread float* unit, threadgroup float* y, device const float* jl_signs, device const uint* mix,
    device const float* table, device uint* words, device S* scales, float top, uint lane) {
  constexpr int N = share(D), LAST = (1 << B) - 1;
  float terms[N];
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float x = round12(unit[n]);
    terms[n] = x * x;
  }
  float norm = sqrt(tree_sum<D>(terms));
  const bool finite = isfinite(norm), present = finite && norm >= 1e-12f;
  const float inverse = present ? 1.0f / norm : 0.0f;
  norm = present ? norm : finite ? 0.0f : NAN;
#pragma unroll
  for (int n = 0; n < N; ++n) unit[n] = present ? unit[n] * inverse : 0.0f;

  int code[N];
  float scale = norm, step = 1.0f;
  if (LLOYD) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      code[n] = 0;
      for (int b = 0; b < LAST; ++b) code[n] += unit[n] >= table[16 + b] ? 1 : 0;
    }
    if (NORM && !QJL) {
#pragma unroll
      for (int n = 0; n < N; ++n) terms[n] = table[32 + code[n]];
      scale = norm / sqrt(tree_sum<D>(terms));
    }
  } else {
    int grid[N], square = 1;
    float best = -1.0f, inverse_step = 0.0f;
#pragma unroll
    for (int n = 0; n < N; ++n) grid[n] = int(floor(unit[n] * table[12]));
#pragma unroll
    for (int c = 0; c < CHOICES; ++c) {
      int sum = 0, product = 0;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const int odd = holds(D, n, lane) ? 2 * uniform_code<B>(unit[n] * table[c]) - LAST : 0;
        sum += odd * odd;
        product += grid[n] * odd;
      }
      sum = simd_sum(sum);
      const float along = float(simd_sum(product)), cosine = along * along / float(sum);
      if (cosine > best) {
        best = cosine;
        square = sum;
        inverse_step = table[c];
        step = table[6 + c];
      }
    }
#pragma unroll
    for (int n = 0; n < N; ++n) code[n] = uniform_code<B>(unit[n] * inverse_step);
    scale = NORM && !QJL ? 2.0f * norm / sqrt(float(square)) : norm * step;
  }

#pragma unroll
  for (int n = 0; n < N; ++n) terms[n] = float(B == 3 ? code[n] & 3 : code[n]);
  pack_row<D, field_width(B)>(terms, y, words, lane);
  words += row_words(D, field_width(B));
  if (B == 3) {
#pragma unroll
    for (int n = 0; n < N; ++n) terms[n] = float(code[n] >> 2);
    pack_row<D, 1>(terms, y, words, lane);
    words += row_words(D, 1);
  }
  if (lane == 0) scales[0] = narrow<S>(scale, top);
  if (QJL) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float centre = LLOYD ? table[code[n]] : round12(float(2 * code[n] - LAST) * (step * 0.5f));
      unit[n] = holds(D, n, lane) ? round12(unit[n]) - centre : 0.0f;
      const float x = round12(unit[n]);
      terms[n] = x * x;
    }
    const float residual = sqrt(tree_sum<D>(terms));
    if (lane == 0) scales[1] = narrow<S>(LLOYD ? residual : residual / step, top);
#pragma unroll
    for (int n = 0; n < N; ++n)
      if (holds(D, n, lane)) unit[n] *= jl_signs[32 * n + lane];
    hadamard<D>(unit, y, mix, lane);
#pragma unroll
    for (int n = 0; n < N; ++n) terms[n] = unit[n] >= 0.0f ? 1.0f : 0.0f;
    pack_row<D, 1>(terms, y, words, lane);
  }
}
