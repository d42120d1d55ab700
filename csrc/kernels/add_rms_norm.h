// residual[t] += x[t]; out[t] = residual[t] / sqrt(mean(residual[t]^2) + eps) * weight
#pragma once
#include "common/dtype.h"
#ifdef NV_CUDA
#include <cuda_runtime_api.h>
#endif

namespace nanovllm {

struct AddRmsNormParams {
  void* out;                        // [num_tokens, hidden], row stride out_stride_row
  void* residual;                   // [num_tokens, hidden], row stride residual_stride_row
  const void* x;                    // [num_tokens, hidden], row stride x_stride_row; may be `out`
  const void* __restrict__ weight;  // [hidden]
  int64_t num_tokens, hidden;
  int64_t out_stride_row, residual_stride_row, x_stride_row;  // elements
  float eps;
  DType dtype;
};

namespace cpu {
void add_rms_norm(const AddRmsNormParams& p);
}
#ifdef NV_CUDA
namespace kernels {
cudaError_t launch_add_rms_norm(const AddRmsNormParams& p, cudaStream_t stream);
}
#endif

}  // namespace nanovllm
