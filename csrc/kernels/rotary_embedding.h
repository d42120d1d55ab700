// q[t, h] and k[t, h] rotated in place by the angles of positions[t]:
// x[i] = x[i] cos - x[i + dim/2] sin, x[i + dim/2] = x[i + dim/2] cos + x[i] sin, for i < dim/2.
#pragma once
#include "common/dtype.h"
#include "kernels/rotary.h"
#ifdef NV_CUDA
#include <cuda_runtime_api.h>
#endif

namespace nanovllm {

struct RotaryEmbeddingParams {
  void* __restrict__ q;  // [num_tokens, num_q_heads, head_dim], head_dim contiguous
  void* __restrict__ k;  // [num_tokens, num_k_heads, head_dim]
  int64_t num_tokens, head_dim;
  int64_t q_stride_row, q_stride_head, k_stride_row, k_stride_head;  // elements
  int32_t num_q_heads, num_k_heads;
  DType dtype;
  Rotary rotary;
};

namespace cpu {
void rotary_embedding(const RotaryEmbeddingParams& p);
}
#ifdef NV_CUDA
namespace kernels {
cudaError_t launch_rotary_embedding(const RotaryEmbeddingParams& p, cudaStream_t stream);
}
#endif

}  // namespace nanovllm
