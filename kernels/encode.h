// Writing packed rows, by one simdgroup. The arithmetic is defined in mlx_tq/codec.py.

// The place-holders that stand for words and scales of rows that are not coded, 8 elements each. Metal converts nothing
// to bfloat unless told to, not even 0.
template <typename S>
TQ_FUNC void write_nothing(device uint* words, device S* scales, uint lane) {
  if (lane >= 8) return;
  words[lane] = 0u;
  scales[lane] = S(0.0f);
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
