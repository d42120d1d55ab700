// out[t, i] = silu(gate_up[t, i]) * gate_up[t, width + i], silu(x) = x / (1 + exp(-x))
#pragma once
#include "common/dtype.h"
#ifdef NV_CUDA
#include <cuda_runtime_api.h>
#endif

namespace nanovllm {

struct SiluAndMulParams {
  void* __restrict__ out;            // [num_tokens, width], row stride out_stride_row
  const void* __restrict__ gate_up;  // [num_tokens, 2 * width], row stride gate_up_stride_row
  int64_t num_tokens, width;
  int64_t out_stride_row, gate_up_stride_row;  // elements
  DType dtype;
};

namespace cpu {
void silu_and_mul(const SiluAndMulParams& p);
}
#ifdef NV_CUDA
namespace kernels {
cudaError_t launch_silu_and_mul(const SiluAndMulParams& p, cudaStream_t stream);
}
#endif

}  // namespace nanovllm
