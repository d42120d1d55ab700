// residual[t] = table[token_ids[t]]; out[t] = residual[t] / sqrt(mean(residual[t]^2) + eps) * weight
#pragma once
#include "common/dtype.h"
#ifdef NV_CUDA
#include <cuda_runtime_api.h>
#endif

namespace nanovllm {

struct EmbedRmsNormParams {
  void* __restrict__ out;                 // [num_tokens, hidden], row stride out_stride_row
  void* __restrict__ residual;            // [num_tokens, hidden], row stride residual_stride_row
  const int64_t* __restrict__ token_ids;  // [num_tokens]
  const void* __restrict__ table;         // [vocab, hidden], row stride table_stride_row
  const void* __restrict__ weight;        // [hidden]
  int64_t num_tokens, hidden, vocab;
  int64_t out_stride_row, residual_stride_row, table_stride_row;  // elements
  float eps;
  DType dtype;
};

namespace cpu {
void embed_rms_norm(const EmbedRmsNormParams& p);
}
#ifdef NV_CUDA
namespace kernels {
cudaError_t launch_embed_rms_norm(const EmbedRmsNormParams& p, cudaStream_t stream);
}
#endif

}  // namespace nanovllm
