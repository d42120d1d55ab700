// k_cache[slot / block_size, slot % block_size] = k[t], so for v, for every token t with slot = slots[t] >=
// 0.
#pragma once
#include "kernels/kv_cache.h"
#ifdef NV_CUDA
#include <cuda_runtime_api.h>
#endif

namespace nanovllm {

struct StoreKvCacheParams {
  const void* __restrict__ k;  // [num_tokens, num_kv_heads, head_dim], head_dim contiguous
  const void* __restrict__ v;  // like k
  int64_t num_tokens;
  int64_t k_stride_row, k_stride_head, v_stride_row, v_stride_head;  // elements
  DType dtype;                                                       // of k and v
  KvCache cache;
};

namespace cpu {
void store_kv_cache(const StoreKvCacheParams& p);
}
#ifdef NV_CUDA
namespace kernels {
cudaError_t launch_store_kv_cache(const StoreKvCacheParams& p, cudaStream_t stream);
}
#endif

}  // namespace nanovllm
