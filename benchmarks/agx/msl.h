// The part of Metal's language that the kernels use, as C++ for OpenCL. For counting only: nothing built from it is run.
#pragma once
#pragma OPENCL EXTENSION cl_khr_fp16 : enable

#define device __global
#define threadgroup __local
#define constant __constant
#define thread __private
// Helpers of the kernels that have the name of an OpenCL function.
#define dot tq_dot

typedef half float16_t;

template <class To, class From>
inline To as_type(From x) {
  return __builtin_bit_cast(To, x);
}

struct bfloat16_t {
  ushort bits;
  bfloat16_t() = default;
  explicit bfloat16_t(float x) {
    const uint u = as_type<uint>(x);
    bits = (u + 0x7FFFu + (u >> 16 & 1u)) >> 16;
  }
  operator float() const __global { return as_type<float>(uint(bits) << 16); }
};

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
inline void threadgroup_barrier(mem_flags) { barrier(CLK_LOCAL_MEM_FENCE); }
inline void simdgroup_barrier(mem_flags) { sub_group_barrier(CLK_LOCAL_MEM_FENCE); }

// The bound of a loop that stays rolled: Mesa does not know that lanes end at 31.
#define ROLLED(n) ((n) > 1 ? (n) + int(lane >> 6) : (n))

// Apple's instructions, under the names that Mesa gives them.
extern "C" uint nir_shuffle_xor(uint, uint);
extern "C" uint nir_read_invocation(uint, uint);
inline float simd_shuffle_xor(float x, ushort mask) { return as_type<float>(nir_shuffle_xor(as_type<uint>(x), mask)); }
// Right where the four lanes of a quad ask for one lane, which they do at head_dim 64 and above.
inline float simd_shuffle(float x, ushort lane) { return as_type<float>(nir_read_invocation(as_type<uint>(x), lane)); }
inline uint simd_shuffle(uint x, ushort lane) { return nir_read_invocation(x, lane); }
inline float simd_sum(float x) { return sub_group_reduce_add(x); }
inline int simd_sum(int x) { return sub_group_reduce_add(x); }
inline bool simd_any(bool x) { return sub_group_any(x); }
inline float simd_max(float x) { return sub_group_reduce_max(x); }

// Metal compiles with fast math.
#define exp2 native_exp2
#define sqrt native_sqrt
inline float fast_tanh(float x) { return 1.0f - 2.0f * native_recip(native_exp2(x * 2.88539008f) + 1.0f); }
#define tanh fast_tanh
