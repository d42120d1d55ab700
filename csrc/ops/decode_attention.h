// The checks that paged_attention_decode and rope_attention_decode share.
#pragma once
#include "kernels/decode_plan.h"
#include "kernels/paged_attention_decode.h"
#include "ops/attention_checks.h"

namespace nanovllm::ops {

/// `q`, named `q_arg`, begins each row with its queries: [batch, num_q_heads, head_dim], or [batch, width].
inline PagedAttentionDecodeParams check_decode_attention(
    const char* op, const Tensor& out, const char* q_arg, const Tensor& q, Dim& batch, Dim& q_heads, Dim& dim,
    Dim& kv_heads, const Tensor& k_cache, const Tensor& v_cache, const Tensor& block_tables,
    const Tensor& context_lens, const Tensor& plan, const Tensor& workspace,
    const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale, double scale,
    bool past_complete) {
  Dim blocks{"num_blocks"}, block{"block_size"}, max_blocks{"max_blocks"}, plan_numel{"plan_numel"},
      workspace_numel{"workspace_numel"};
  check_shape(op, "out", out, {batch, q_heads, dim});
  check_shape(op, "k_cache", k_cache, {blocks, block, kv_heads, dim});
  check_shape(op, "v_cache", v_cache, {blocks, block, kv_heads, dim});
  check_shape(op, "block_tables", block_tables, {batch, max_blocks});
  check_shape(op, "context_lens", context_lens, {batch});
  check_shape(op, "plan", plan, {plan_numel});
  check_shape(op, "workspace", workspace, {workspace_numel});
  const DType dtype = check_activation(op, q_arg, q);
  check_dtype(op, "out", out, q.scalar_type());
  const DType cache_dtype = check_cache(op, q, "k_cache", k_cache, "v_cache", v_cache, k_scale, v_scale);
  check_dtype(op, "block_tables", block_tables, ScalarType::Int);
  check_dtype(op, "context_lens", context_lens, ScalarType::Int);
  check_dtype(op, "plan", plan, ScalarType::Int);
  check_dtype(op, "workspace", workspace, ScalarType::Float);
  check_heads(op, q_arg, q_heads.value, kv_heads.value, dim.value);
  check_last_contiguous(op, q_arg, q);
  check_last_contiguous(op, "out", out);
  check_last_contiguous(op, "block_tables", block_tables);
  check_contiguous(op, "context_lens", context_lens);
  check_contiguous(op, "plan", plan);
  check_contiguous(op, "workspace", workspace);
#ifdef NV_CUDA
  if (out.numel() > 0) {
    const int64_t group = q_heads.value / kv_heads.value;
    check(group <= 16, op, q_arg, "expected at most 16 query heads for a KV head on CUDA, got ", group);
    check_cuda_block_size(op, "k_cache", block.value);
    for (const auto& [arg, tensor] : {std::pair{"out", out},
                                      {q_arg, q},
                                      {"k_cache", k_cache},
                                      {"v_cache", v_cache},
                                      {"plan", plan},
                                      {"workspace", workspace}})
      check_aligned(op, arg, tensor);
    const int32_t device = q.get_device_index();
    const int64_t plan_needed = kernels::decode_plan_numel(device);
    check(plan_numel.value >= plan_needed, op, "plan", "expected at least ", plan_needed, " elements, got ",
          plan_numel.value);
    const int64_t workspace_needed = kernels::decode_workspace_numel(device, group, dim.value);
    check(workspace_numel.value >= workspace_needed, op, "workspace", "expected at least ", workspace_needed,
          " elements, got ", workspace_numel.value);
  }
#endif
  return {
      .out = out.data_ptr(),
      .q = q.data_ptr(),
      .k_cache = k_cache.data_ptr(),
      .v_cache = v_cache.data_ptr(),
      .block_tables = static_cast<const int32_t*>(block_tables.data_ptr()),
      .context_lens = static_cast<const int32_t*>(context_lens.data_ptr()),
      .plan = static_cast<const int32_t*>(plan.data_ptr()),
      .workspace = static_cast<float*>(workspace.data_ptr()),
      .k_scale = data_or_null<float>(k_scale),
      .v_scale = data_or_null<float>(v_scale),
      .batch = batch.value,
      .num_q_heads = q_heads.value,
      .num_kv_heads = kv_heads.value,
      .head_dim = dim.value,
      .num_blocks = blocks.value,
      .block_size = block.value,
      .max_blocks = max_blocks.value,
      .plan_numel = plan_numel.value,
      .workspace_numel = workspace_numel.value,
      .out_stride_row = out.stride(0),
      .out_stride_head = out.stride(1),
      .q_stride_row = q.stride(0),
      .q_stride_head = q.dim() == 3 ? q.stride(1) : dim.value,
      .k_stride_block = k_cache.stride(0),
      .k_stride_slot = k_cache.stride(1),
      .k_stride_head = k_cache.stride(2),
      .v_stride_block = v_cache.stride(0),
      .v_stride_slot = v_cache.stride(1),
      .v_stride_head = v_cache.stride(2),
      .table_stride_row = block_tables.stride(0),
      .scale = static_cast<float>(scale),
      .past_complete = past_complete,
      .dtype = dtype,
      .cache_dtype = cache_dtype,
  };
}

}  // namespace nanovllm::ops
