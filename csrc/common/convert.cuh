// bfloat16 and half as floats, one or a pack at a time, and the choice between the two.
#pragma once
#include <cuda_fp8.h>

#include "common/dtype.h"
#include "common/mma.cuh"
#include "common/pack.cuh"

namespace nanovllm::kernels {

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float to_float(__half x) { return __half2float(x); }

__device__ inline void assign(float& to, float x) { to = x; }
__device__ inline void assign(__nv_bfloat16& to, float x) { to = __float2bfloat16_rn(x); }
__device__ inline void assign(__half& to, float x) { to = __float2half_rn(x); }

/// Rounds each value once, to nearest even.
template <class T, int kSize>
__device__ Pack<T, kSize> rounded(const float (&x)[kSize]) {
  Pack<T, kSize> to;
  if constexpr (kSize == 1) {
    assign(to.data[0], x[0]);
  } else {
#pragma unroll
    for (int i = 0; i < kSize; i += 2)
      reinterpret_cast<uint32_t*>(&to.raw)[i / 2] = pack_pair<T>(x[i], x[i + 1]);
  }
  return to;
}

/// Four e4m3 of a register as two pairs of float16.
__device__ inline void widen_e4m3(uint32_t x, uint32_t& low, uint32_t& high) {
  const __half2_raw a = __nv_cvt_fp8x2_to_halfraw2(x & 0xffff, __NV_E4M3);
  const __half2_raw b = __nv_cvt_fp8x2_to_halfraw2(x >> 16, __NV_E4M3);
  low = a.x | static_cast<uint32_t>(a.y) << 16;
  high = b.x | static_cast<uint32_t>(b.y) << 16;
}

/// A pair of bfloat16 as float16, saturating.
__device__ inline uint32_t to_float16_pair(uint32_t pair) {
  constexpr float kMax = 65504.0f;
  const float low = __uint_as_float(pair << 16), high = __uint_as_float(pair & 0xffff0000u);
  return pack_pair<__half>(fminf(fmaxf(low, -kMax), kMax), fminf(fmaxf(high, -kMax), kMax));
}

/// A pair of T, as in pack_pair.
template <class T>
__device__ float2 to_float_pair(uint32_t pair) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
  else
    return __half22float2(reinterpret_cast<const __half2&>(pair));
}

/// Calls `f` with a null pointer of the type: __nv_bfloat16 or __half (ops/*.cpp refuse others on CUDA).
template <class F>
cudaError_t dispatch(DType dtype, F const& f) {
  return dtype == DType::kBFloat16 ? f(static_cast<__nv_bfloat16*>(nullptr))
                                   : f(static_cast<__half*>(nullptr));
}

}  // namespace nanovllm::kernels
