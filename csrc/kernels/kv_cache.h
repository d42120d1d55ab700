// The paged K/V cache as an operator that writes it sees it.
#pragma once
#include "common/dtype.h"

namespace nanovllm {

struct KvCache {
  void* k;  // [num_blocks, block_size, num_kv_heads, head_dim], strides below, head_dim contiguous
  void* v;  // like k, with its own strides
  const int64_t* slots;  // [num_tokens] block * block_size + offset; -1 writes nothing
  const float* k_scale;  // [1] stored value = k / scale; null: 1. Only with kFloat8E4M3
  const float* v_scale;  // [1]
  int64_t num_blocks, head_dim;
  int64_t k_stride_block, k_stride_slot, k_stride_head;  // elements
  int64_t v_stride_block, v_stride_slot, v_stride_head;
  int32_t num_kv_heads;
  int32_t block_shift;  // block_size = 1 << block_shift
  DType dtype;          // that of the new keys and values, or kFloat8E4M3
};

}  // namespace nanovllm
