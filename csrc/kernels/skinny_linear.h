// out[m, n] = sum_k x[m, k] * weight[n, k] + bias[n], for a few rows m
#pragma once
#include "common/dtype.h"
#ifdef NV_CUDA
#include <cuda_runtime_api.h>
#endif

namespace nanovllm {

constexpr int64_t kSkinnyMaxRows = 16;

struct SkinnyLinearParams {
  void* __restrict__ out;           // [num_rows, n], row stride out_stride_row
  const void* __restrict__ x;       // [num_rows, k], row stride x_stride_row
  const void* __restrict__ weight;  // [n, k], row stride weight_stride_row
  const void* __restrict__ bias;    // [n], or null
  int64_t num_rows, n, k;
  int64_t out_stride_row, x_stride_row, weight_stride_row;  // elements
  DType dtype;
};

namespace cpu {
void skinny_linear(const SkinnyLinearParams& p);
}
#ifdef NV_CUDA
namespace kernels {
cudaError_t launch_skinny_linear(const SkinnyLinearParams& p, cudaStream_t stream);
}
#endif

}  // namespace nanovllm
