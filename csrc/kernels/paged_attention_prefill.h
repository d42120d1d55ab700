// Causal attention of packed queries, aligned to the end of each context; keys packed like them, or paged.
#pragma once
#include "common/dtype.h"
#ifdef NV_CUDA
#include <cuda_runtime_api.h>
#endif

namespace nanovllm {

struct PagedAttentionPrefillParams {
  void* __restrict__ out;                    // [num_tokens, num_q_heads, head_dim]
  const void* __restrict__ q;                // [num_tokens, num_q_heads, head_dim]
  const void* __restrict__ k;                // [num_tokens, num_kv_heads, head_dim], or a cache
  const void* __restrict__ v;                // [num_blocks, block_size, num_kv_heads, head_dim]
  const int32_t* __restrict__ cu_seqlens_q;  // [batch + 1]
  const int32_t* __restrict__ context_lens;  // [batch]
  const int32_t* __restrict__ block_tables;  // [batch, max_blocks], or null: k, v are packed
  const float* __restrict__ k_scale;         // null, or the scales of an fp8 cache
  const float* __restrict__ v_scale;         // null, or the scales of an fp8 cache
  int64_t num_tokens, batch, max_seqlen_q;
  int64_t num_q_heads, num_kv_heads, head_dim;
  int64_t num_blocks, block_size, max_blocks;                            // of a cache
  int64_t out_stride_row, out_stride_head, q_stride_row, q_stride_head;  // elements, as all strides
  int64_t k_stride_block, k_stride_slot, k_stride_head;  // packed: a slot is a token, no blocks
  int64_t v_stride_block, v_stride_slot, v_stride_head;
  int64_t table_stride_row;
  float scale;
  DType dtype, kv_dtype;
};

namespace cpu {
void paged_attention_prefill(const PagedAttentionPrefillParams& p);
}
#ifdef NV_CUDA
namespace kernels {
cudaError_t launch_paged_attention_prefill(const PagedAttentionPrefillParams& p, cudaStream_t stream);
}
#endif

}  // namespace nanovllm
