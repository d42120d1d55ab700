// bfloat16 and half as floats, one or a pack at a time, and the choice between the two.
#pragma once
#include "common/dtype.h"
#include "common/mma.cuh"
#include "common/pack.cuh"

namespace nanovllm::kernels {

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float to_float(__half x) { return __half2float(x); }

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

/// Calls `f` with a null pointer of the type: __nv_bfloat16 or __half (ops/*.cpp refuse others on CUDA).
template <class F>
cudaError_t dispatch(DType dtype, F const& f) {
  return dtype == DType::kBFloat16 ? f(static_cast<__nv_bfloat16*>(nullptr))
                                   : f(static_cast<__half*>(nullptr));
}

}  // namespace nanovllm::kernels
