// What a layer does between its qkv projection and attention, in one pass over qkv: each q and k head gets
// its RMS norm (where there is a weight) and its rotation, in place, then k and v go to their cache slots.
#pragma once
#include "kernels/kv_cache.h"
#include "kernels/rotary.h"
#ifdef NV_CUDA
#include <cuda_runtime_api.h>
#endif

namespace nanovllm {

struct QkNormRopeStoreParams {
  void* qkv;  // [num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim], row stride qkv_stride_row
  const void* __restrict__ q_weight;  // [head_dim]; null: no norm
  const void* __restrict__ k_weight;  // [head_dim]; null: no norm
  int64_t num_tokens;
  int64_t qkv_stride_row;  // elements
  int32_t num_q_heads;
  float eps;
  DType dtype;  // of qkv and the weights
  Rotary rotary;
  KvCache cache;  // has num_kv_heads and head_dim
};

namespace cpu {
void qk_norm_rope_store(const QkNormRopeStoreParams& p);
}
#ifdef NV_CUDA
namespace kernels {
cudaError_t launch_qk_norm_rope_store(const QkNormRopeStoreParams& p, cudaStream_t stream);
}
#endif

}  // namespace nanovllm
