// Goes in front of the headers for mx.fast.cuda_kernel: maps the part of Metal's language that the kernels use onto CUDA.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#ifndef NAN
#define NAN __int_as_float(0x7fffffff)
#endif

#define TQ_FUNC __device__ __forceinline__
#define TQ_THREADGROUP __shared__
#define device
#define constant
#define thread
#define threadgroup

typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;
typedef __half float16_t;
typedef __nv_bfloat16 bfloat16_t;

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
TQ_FUNC void threadgroup_barrier(mem_flags) { __syncthreads(); }
TQ_FUNC void simdgroup_barrier(mem_flags) { __syncwarp(); }

template <typename To, typename From>
TQ_FUNC To as_type(From x) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  To out;
  memcpy(&out, &x, sizeof(out));
  return out;
}

// Like Metal's exp2, without the steps that CUDA's takes for denormal results.
TQ_FUNC float short_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#define exp2 short_exp2

TQ_FUNC int clamp(int x, int low, int high) { return min(max(x, low), high); }

template <typename T>
TQ_FUNC T simd_shuffle(T x, ushort lane) {
  return __shfl_sync(0xffffffffu, x, lane);
}
template <typename T>
TQ_FUNC T simd_shuffle_xor(T x, ushort mask) {
  return __shfl_xor_sync(0xffffffffu, x, mask);
}
template <typename T>
TQ_FUNC T simd_sum(T x) {
  for (int w = 16; w > 0; w /= 2) x += __shfl_xor_sync(0xffffffffu, x, w);
  return x;
}
#if __CUDA_ARCH__ >= 800
TQ_FUNC int simd_sum(int x) { return __reduce_add_sync(0xffffffffu, x); }
#endif
template <typename T>
TQ_FUNC T simd_max(T x) {
  for (int w = 16; w > 0; w /= 2) x = max(x, __shfl_xor_sync(0xffffffffu, x, w));
  return x;
}

TQ_FUNC bool simd_any(bool x) { return __any_sync(0xffffffffu, x); }

// c += a b. shape and types: of the instruction; reg: the kind of registers that c lies in.
#define TQ_MMA(shape, types, reg)                                                                              \
  asm volatile("mma.sync.aligned." shape ".row.col." types " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
               : "+" reg(c[0]), "+" reg(c[1]), "+" reg(c[2]), "+" reg(c[3])                                    \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))

// a is 16 x 16 in four words of two T a lane, b 16 x 8 in two words, c 16 x 8.
template <typename T>
TQ_FUNC void mma_16x8x16(float* c, const uint* a, const uint* b);
template <>
TQ_FUNC void mma_16x8x16<float16_t>(float* c, const uint* a, const uint* b) {
  TQ_MMA("m16n8k16", "f32.f16.f16.f32", "f");
}
template <>
TQ_FUNC void mma_16x8x16<bfloat16_t>(float* c, const uint* a, const uint* b) {
  TQ_MMA("m16n8k16", "f32.bf16.bf16.f32", "f");
}

// Whole numbers: a is 16 x 32 unsigned bytes in four words a lane, b 32 x 8 bytes, char or uchar, in two.
template <typename T>
TQ_FUNC void mma_16x8x32(int* c, const uint* a, const uint* b);
template <>
TQ_FUNC void mma_16x8x32<char>(int* c, const uint* a, const uint* b) {
  TQ_MMA("m16n8k32", "s32.u8.s8.s32", "r");
}
template <>
TQ_FUNC void mma_16x8x32<uchar>(int* c, const uint* a, const uint* b) {
  TQ_MMA("m16n8k32", "s32.u8.u8.s32", "r");
}

// Four of the bytes of a (0 to 3) and b (4 to 7), named by the digits of `which`, the lowest byte by the last.
TQ_FUNC uint pick_bytes(uint a, uint b, uint which) { return __byte_perm(a, b, which); }

// x & ~bits, for bits that are set in x, by the unit that multiplies: the other one has more to do.
TQ_FUNC uint without(uint x, uint bits) {
  uint y;
  asm("mad.lo.u32 %0, %1, 0xffffffff, %2;" : "=r"(y) : "r"(bits), "r"(x));
  return y;
}

// An 8 x 8 tile of 16-bit numbers, two neighbours of a row in each lane's word, transposed.
TQ_FUNC uint transpose_8x8(uint x) {
  uint y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

#define threadgroup_position_in_grid blockIdx
#define thread_index_in_simdgroup (threadIdx.x & 31u)
#define simdgroup_index_in_threadgroup (threadIdx.x >> 5)
