// Reductions over groups of lanes, in one tree: the result does not depend on timing, and all lanes get it.
#pragma once
#include <cstdint>

namespace nanovllm::kernels {

/// Over each group of `lanes` neighbours, a power of two up to 32, all of them active.
template <class T, class Op>
__device__ T reduce_lanes(T x, Op const& op, int lanes = 32) {
  const uint32_t lane = threadIdx.x + blockDim.x * threadIdx.y;
  const uint32_t group = lanes == 32 ? 0xffffffffu : ((1u << lanes) - 1) << (lane % 32 & -lanes);
  for (int offset = lanes / 2; offset > 0; offset /= 2) x = op(x, __shfl_xor_sync(group, x, offset));
  return x;
}

struct Sum {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};
struct Max {
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
  __device__ uint64_t operator()(uint64_t a, uint64_t b) const { return a > b ? a : b; }
};

}  // namespace nanovllm::kernels
