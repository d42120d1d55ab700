// Attention of one query token per sequence over its paged context.
#pragma once
#include "common/dtype.h"
#ifdef NV_CUDA
#include <cuda_runtime_api.h>
#endif

namespace nanovllm {

struct PagedAttentionDecodeParams {
  void* __restrict__ out;      // [batch, num_q_heads, head_dim]
  const void* __restrict__ q;  // [batch, num_q_heads, head_dim]
  void* k_cache;  // [num_blocks, block_size, num_kv_heads, head_dim]; only rope_attention_decode writes it
  void* v_cache;  // like k_cache
  const int32_t* __restrict__ block_tables;  // [batch, max_blocks], entries past a context are never read
  const int32_t* __restrict__ context_lens;  // [batch], 0: the row's output is 0
  const int32_t* __restrict__ plan;          // from decode_plan for these context_lens
  float* __restrict__ workspace;             // [workspace_numel]; CUDA: zeros before the first call
  const float* __restrict__ k_scale;         // null, or the scales of an fp8 cache
  const float* __restrict__ v_scale;         // null, or the scales of an fp8 cache
  int64_t batch, num_q_heads, num_kv_heads, head_dim;
  int64_t num_blocks, block_size, max_blocks;
  int64_t plan_numel, workspace_numel;
  int64_t out_stride_row, out_stride_head, q_stride_row, q_stride_head;  // elements, as all strides
  int64_t k_stride_block, k_stride_slot, k_stride_head;
  int64_t v_stride_block, v_stride_slot, v_stride_head;
  int64_t table_stride_row;
  float scale;
  bool past_complete;  // CUDA: tables, and keys and values but each row's newest, are older than the plan
  DType dtype, cache_dtype;
};

namespace cpu {
void paged_attention_decode(const PagedAttentionDecodeParams& p);
}
#ifdef NV_CUDA
namespace kernels {
/// Floats that a launch on `device` needs.
int64_t decode_workspace_numel(int device, int64_t group, int64_t head_dim);
cudaError_t launch_paged_attention_decode(const PagedAttentionDecodeParams& p, cudaStream_t stream);
}  // namespace kernels
#endif

}  // namespace nanovllm
