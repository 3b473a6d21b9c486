// Barriers, and functions of a whole simdgroup: each is a rendezvous of its 32 lanes. Inside namespace metal.

enum class mem_flags : unsigned { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return (mem_flags)((unsigned)a | (unsigned)b); }
enum memory_order { memory_order_relaxed, memory_order_seq_cst };
enum thread_scope { thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup, thread_scope_device };
MSL_RT void threadgroup_barrier(mem_flags f, MSL_LINE) { msl_threadgroup_barrier((unsigned)f, _line); }
MSL_RT void simdgroup_barrier(mem_flags f, MSL_LINE) { msl_simdgroup_barrier((unsigned)f, _line); }
MSL_RT void atomic_thread_fence(mem_flags, memory_order = memory_order_seq_cst, thread_scope = thread_scope_device) {}

namespace _msl {
template <typename T> struct Lanes {
  msl_lanes* shared;
  unsigned lane;
  MSL_RT T operator[](unsigned i) const {
    T v;
    __builtin_memcpy(&v, shared->value + sizeof(T) * i, sizeof(T));
    return v;
  }
  MSL_RT bool has(unsigned i) const { return i < 32 && (shared->mask >> i & 1); }
  MSL_RT T pick(unsigned i, const char* what, int line) const {
    if (has(i)) return (*this)[i];
    msl_fail(what, line);
    return (*this)[lane];
  }
};
template <typename T> MSL_RT Lanes<T> exchange(const T& v, const char* what, int line) {
  static_assert(sizeof(T) <= 64, "simd value too large");
  Lanes<T> all;
  all.shared = msl_exchange(&v, sizeof(T), what, line, &all.lane);
  return all;
}
// In the order of a butterfly; absent lanes are skipped. Computed by one lane for all.
template <typename T, typename F> MSL_RT T reduce(T v, const char* what, int line, F f) {
  auto all = exchange(v, what, line);
  if (!all.shared->reduced) {
    T x[32];
    bool there[32];
    MSL_PRAGMA(clang loop unroll(disable))
    for (unsigned i = 0; i < 32; ++i) {
      there[i] = all.has(i);
      if (there[i]) x[i] = all[i];
    }
    MSL_PRAGMA(clang loop unroll(disable))
    for (unsigned d = 16; d; d >>= 1)
      MSL_PRAGMA(clang loop unroll(disable))
      for (unsigned i = 0; i < d; ++i)
        if (there[i + d]) {
          x[i] = there[i] ? f(x[i], x[i + d]) : x[i + d];
          there[i] = true;
        }
    __builtin_memcpy(all.shared->result, x, sizeof(T));
    all.shared->reduced = 1;
  }
  T r;
  __builtin_memcpy(&r, all.shared->result, sizeof(T));
  return r;
}
template <typename T, typename F> MSL_RT T scan(T v, bool inclusive, const char* what, int line, F f, T start) {
  auto all = exchange(v, what, line);
  T s = start;
  for (unsigned i = 0; i < all.lane + inclusive; ++i)
    if (all.has(i)) s = f(s, all[i]);
  return s;
}
}  // namespace _msl

#define MSL_DATA typename T, typename = enable_if_t<is_arithmetic_v<T> || (vsize<T> > 0)>
#define MSL_NO64(name) static_assert(sizeof(vscalar<T>) < 8, #name ": no 64-bit types in simd functions")
#define MSL_REDUCE(name, expr) \
  template <MSL_DATA> MSL_RT T name(T v, MSL_LINE) { \
    MSL_NO64(name); \
    return _msl::reduce(v, #name, _line, [](T a, T b) MSL_LAMBDA { return T(expr); }); \
  }
MSL_REDUCE(simd_sum, a + b)
MSL_REDUCE(simd_product, a * b)
MSL_REDUCE(simd_max, max(a, b))
MSL_REDUCE(simd_min, min(a, b))
MSL_REDUCE(simd_and, a & b)
MSL_REDUCE(simd_or, a | b)
MSL_REDUCE(simd_xor, a ^ b)
#define MSL_SCAN(name, inclusive, expr, start) \
  template <MSL_DATA> MSL_RT T name(T v, MSL_LINE) { \
    MSL_NO64(name); \
    return _msl::scan(v, inclusive, #name, _line, [](T a, T b) MSL_LAMBDA { return T(expr); }, T(start)); \
  }
MSL_SCAN(simd_prefix_inclusive_sum, true, a + b, 0)
MSL_SCAN(simd_prefix_exclusive_sum, false, a + b, 0)
MSL_SCAN(simd_prefix_inclusive_product, true, a * b, 1)
MSL_SCAN(simd_prefix_exclusive_product, false, a * b, 1)
#define MSL_SHUFFLE(name, source) \
  template <MSL_DATA> MSL_RT T name(T v, ushort k, MSL_LINE) { \
    auto all = _msl::exchange(v, #name, _line); \
    const unsigned lane = all.lane; \
    return all.pick(source, #name ": source lane inactive or out of range", _line); \
  }
MSL_SHUFFLE(simd_shuffle, lane * 0 + k)
MSL_SHUFFLE(simd_broadcast, lane * 0 + k)
MSL_SHUFFLE(simd_shuffle_xor, lane ^ k)
MSL_SHUFFLE(simd_shuffle_up, lane < k ? lane : lane - k)
MSL_SHUFFLE(simd_shuffle_down, lane + k > 31 ? lane : lane + k)
MSL_SHUFFLE(simd_shuffle_rotate_up, (lane + 32 - k) & 31)
MSL_SHUFFLE(simd_shuffle_rotate_down, (lane + k) & 31)
MSL_SHUFFLE(quad_shuffle_xor, (lane & ~3u) | ((lane ^ k) & 3))
MSL_SHUFFLE(quad_broadcast, (lane & ~3u) | (k & 3))
template <MSL_DATA> MSL_RT T simd_shuffle_and_fill_up(T v, T fill, ushort k, MSL_LINE) {
  auto all = _msl::exchange(v, "simd_shuffle_and_fill_up", _line);
  auto other = _msl::exchange(fill, "simd_shuffle_and_fill_up", _line);
  return all.lane < k ? other[32 - k + all.lane] : all.pick(all.lane - k, "simd_shuffle_and_fill_up: inactive", _line);
}
template <MSL_DATA> MSL_RT T simd_broadcast_first(T v, MSL_LINE) {
  auto all = _msl::exchange(v, "simd_broadcast_first", _line);
  return all[__builtin_ctz(all.shared->mask)];
}
template <MSL_DATA> MSL_RT T quad_sum(T v, MSL_LINE) {
  auto all = _msl::exchange(v, "quad_sum", _line);
  const unsigned q = all.lane & ~3u;
  return T((all[q] + all[q + 2]) + (all[q + 1] + all[q + 3]));
}
template <MSL_DATA> MSL_RT T quad_max(T v, MSL_LINE) {
  auto all = _msl::exchange(v, "quad_max", _line);
  const unsigned q = all.lane & ~3u;
  return max(max(all[q], all[q + 2]), max(all[q + 1], all[q + 3]));
}

class simd_vote {
 public:
  using vote_t = uint64_t;
  explicit constexpr simd_vote(vote_t v = 0) : v(v) {}
  explicit constexpr operator vote_t() const { return v; }
  constexpr bool all() const { return (v & 0xffffffffu) == 0xffffffffu; }
  constexpr bool any() const { return v != 0; }

 private:
  vote_t v;
};
MSL_RT simd_vote simd_ballot(bool e, MSL_LINE) {
  auto all = _msl::exchange(e, "simd_ballot", _line);
  uint64_t votes = 0;
  for (unsigned i = 0; i < 32; ++i) votes |= (uint64_t)(all.has(i) && all[i]) << i;
  return simd_vote(votes);
}
MSL_RT simd_vote simd_active_threads_mask(MSL_LINE) {
  return simd_vote(_msl::exchange(true, "simd_active_threads_mask", _line).shared->mask);
}
MSL_RT bool simd_all(bool e, MSL_LINE) {
  return _msl::reduce(e, "simd_all", _line, [](bool a, bool b) MSL_LAMBDA { return a && b; });
}
MSL_RT bool simd_any(bool e, MSL_LINE) {
  return _msl::reduce(e, "simd_any", _line, [](bool a, bool b) MSL_LAMBDA { return a || b; });
}
MSL_RT bool simd_is_first(MSL_LINE) {
  auto all = _msl::exchange(true, "simd_is_first", _line);
  return all.lane == (unsigned)__builtin_ctz(all.shared->mask);
}

// ---------------------------------------------------------------- 8x8 matrices

// Two elements per lane, in the layout that MLX's steel/gemm/mma.h relies on.
template <typename T, int C, int R> struct simdgroup_matrix {
  static_assert(C == 8 && R == 8, "only 8x8 simdgroup matrices exist");
  static_assert(is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>, "simdgroup_matrix element type");
  vec<T, 2> e_;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal, MSL_LINE) {
    const unsigned lane = _msl::exchange(true, "simdgroup_matrix", _line).lane;
    for (unsigned k = 0; k < 2; ++k) e_[k] = row(lane) == col(lane) + k ? diagonal : T(0);
  }
  MSL_RT vec<T, 2>& thread_elements() { return e_; }
  MSL_RT const vec<T, 2>& thread_elements() const { return e_; }
  MSL_RT static unsigned row(unsigned lane) { return (lane / 4 & 4) + lane / 2 % 4; }
  MSL_RT static unsigned col(unsigned lane) { return (lane / 4 & 2) * 2 + lane % 2 * 2; }
};
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;
template <typename T, int C, int R> MSL_TOUCH simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T v) {
  simdgroup_matrix<T, C, R> m;
  m.e_[0] = m.e_[1] = v;
  return m;
}
namespace _msl {
template <typename M> MSL_TOUCH ulong at(const M& m, unsigned lane, unsigned k, ulong ld, ulong2 origin, bool transpose) {
  const unsigned r = m.row(lane), c = m.col(lane) + k;
  return transpose ? (origin.y + c) * ld + origin.x + r : (origin.y + r) * ld + origin.x + c;
}
}  // namespace _msl
#define MSL_MATRIX_IO(AS) \
  template <typename T> \
  MSL_TOUCH void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const AS T* from, ulong ld = 8, \
                                 ulong2 origin = ulong2{0, 0}, bool transpose = false, MSL_LINE) { \
    const unsigned lane = _msl::exchange(true, "simdgroup_load", _line).lane; \
    for (unsigned k = 0; k < 2; ++k) m.e_[k] = from[_msl::at(m, lane, k, ld, origin, transpose)]; \
  } \
  template <typename T> \
  MSL_TOUCH void simdgroup_store(const simdgroup_matrix<T, 8, 8>& m, AS T* to, ulong ld = 8, \
                                  ulong2 origin = ulong2{0, 0}, bool transpose = false, MSL_LINE) { \
    const unsigned lane = _msl::exchange(true, "simdgroup_store", _line).lane; \
    for (unsigned k = 0; k < 2; ++k) to[_msl::at(m, lane, k, ld, origin, transpose)] = m.e_[k]; \
  }
#ifdef MSL_STRICT
MSL_MATRIX_IO(device)
MSL_MATRIX_IO(threadgroup)
#else
MSL_MATRIX_IO()
#endif
template <typename D, typename A, typename B, typename C>
MSL_RT void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                          const simdgroup_matrix<B, 8, 8>& b, const simdgroup_matrix<C, 8, 8>& c,
                                          MSL_LINE) {
  struct Share { float a[2], b[2]; };
  Share mine = {{(float)a.e_[0], (float)a.e_[1]}, {(float)b.e_[0], (float)b.e_[1]}};
  auto all = _msl::exchange(mine, "simdgroup_multiply_accumulate", _line);
  if (all.shared->mask != 0xffffffffu) msl_fail("simdgroup_multiply_accumulate by a partial simdgroup", _line);
  float ma[8][8], mb[8][8];
  for (unsigned i = 0; i < 32; ++i) {
    const Share s = all[i];
    for (unsigned k = 0; k < 2; ++k) {
      ma[d.row(i)][d.col(i) + k] = s.a[k];
      mb[d.row(i)][d.col(i) + k] = s.b[k];
    }
  }
  float sum[2] = {(float)c.e_[0], (float)c.e_[1]};
  for (unsigned j = 0; j < 8; ++j)
    for (unsigned k = 0; k < 2; ++k) sum[k] += ma[d.row(all.lane)][j] * mb[j][d.col(all.lane) + k];
  for (unsigned k = 0; k < 2; ++k) d.e_[k] = (D)sum[k];
}
template <typename D, typename A, typename B>
MSL_RT void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                               const simdgroup_matrix<B, 8, 8>& b, MSL_LINE) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<float, 8, 8>(0.0f), _line);
}

// ---------------------------------------------------------------- tiles of 16 x 16, 16 x 8 and 8 x 8

// Not Metal's: NVIDIA's mma.m16n8k16, mma.m16n8k32, prmt and movmatrix, which kernels/cuda.h gives these names.
namespace _msl {
// c += a b: a is 16 x K, b K x 8. left, right: number j of a word of a, and of b.
template <uint K, typename C, typename Left, typename Right>
inline void multiply_tiles(C* c, const uint* a, const uint* b, const char* name, int line, Left left, Right right) {
  struct Words {
    uint word[6];
  };
  constexpr uint N = K / 8;  // numbers of a word
  auto all = exchange(Words{a[0], a[1], a[2], a[3], b[0], b[1]}, name, line);
  const uint g = all.lane / 4, t = all.lane % 4;
  for (uint i = 0; i < 4; ++i)
    for (uint k = 0; k < K; ++k) {
      const uint half = k / (4 * N), at = k % (4 * N) / N;
      const uint row = all[4 * g + at].word[i / 2 + half * 2], column = all[4 * (2 * t + i % 2) + at].word[4 + half];
      c[i] += left(row, k % N) * right(column, k % N);
    }
}
}  // namespace _msl
template <typename T> MSL_RT void mma_16x8x16(thread float* c, thread const uint* a, thread const uint* b, MSL_LINE) {
  const auto number = [](uint word, uint j) MSL_LAMBDA { return (float)as_type<T>((ushort)(word >> j * 16)); };
  _msl::multiply_tiles<16>(c, a, b, "mma_16x8x16", _line, number, number);
}
template <typename T> MSL_RT void mma_16x8x32(thread int* c, thread const uint* a, thread const uint* b, MSL_LINE) {
  _msl::multiply_tiles<32>(
      c, a, b, "mma_16x8x32", _line, [](uint word, uint j) MSL_LAMBDA { return (int)(word >> j * 8 & 0xFFu); },
      [](uint word, uint j) MSL_LAMBDA { return (int)(T)(word >> j * 8 & 0xFFu); });
}
inline uint pick_bytes(uint a, uint b, uint which) {
  uint y = 0;
  for (uint i = 0; i < 4; ++i) y |= uint((ulong(b) << 32 | a) >> (which >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
  return y;
}
inline uint without(uint x, uint bits) { return x & ~bits; }
MSL_RT uint transpose_8x8(uint x, MSL_LINE) {
  auto all = _msl::exchange(x, "transpose_8x8", _line);
  const uint g = all.lane / 4, t = all.lane % 4, low = all[8 * t + g / 2], high = all[8 * t + 4 + g / 2];
  return (low >> g % 2 * 16 & 0xFFFFu) | (high >> g % 2 * 16) << 16;
}
