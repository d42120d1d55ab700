#include "kernels/paged_attention_decode.h"

#include "common/run.h"
#include "kernels/decode_plan.h"
#include "ops/attention_checks.h"

namespace nanovllm::ops {

void paged_attention_decode(Tensor out, Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables,
                            Tensor context_lens, Tensor plan, Tensor workspace, std::optional<Tensor> k_scale,
                            std::optional<Tensor> v_scale, double scale, bool past_complete) {
  constexpr auto kOp = "paged_attention_decode";
  Dim batch{"batch"}, q_heads{"num_q_heads"}, kv_heads{"num_kv_heads"}, dim{"head_dim"};
  Dim blocks{"num_blocks"}, block{"block_size"}, max_blocks{"max_blocks"}, plan_numel{"plan_numel"},
      workspace_numel{"workspace_numel"};
  check_shape(kOp, "q", q, {batch, q_heads, dim});
  check_shape(kOp, "out", out, {batch, q_heads, dim});
  check_shape(kOp, "k_cache", k_cache, {blocks, block, kv_heads, dim});
  check_shape(kOp, "v_cache", v_cache, {blocks, block, kv_heads, dim});
  check_shape(kOp, "block_tables", block_tables, {batch, max_blocks});
  check_shape(kOp, "context_lens", context_lens, {batch});
  check_shape(kOp, "plan", plan, {plan_numel});
  check_shape(kOp, "workspace", workspace, {workspace_numel});
  const DType dtype = check_activation(kOp, "q", q);
  check_dtype(kOp, "out", out, q.scalar_type());
  const DType cache_dtype = check_cache(kOp, q, "k_cache", k_cache, "v_cache", v_cache, k_scale, v_scale);
  check_dtype(kOp, "block_tables", block_tables, ScalarType::Int);
  check_dtype(kOp, "context_lens", context_lens, ScalarType::Int);
  check_dtype(kOp, "plan", plan, ScalarType::Int);
  check_dtype(kOp, "workspace", workspace, ScalarType::Float);
  check_heads(kOp, q_heads.value, kv_heads.value, dim.value);
  check_last_contiguous(kOp, "q", q);
  check_last_contiguous(kOp, "out", out);
  check_last_contiguous(kOp, "block_tables", block_tables);
  check_contiguous(kOp, "context_lens", context_lens);
  check_contiguous(kOp, "plan", plan);
  check_contiguous(kOp, "workspace", workspace);
  if (out.numel() == 0) return;
#ifdef NV_CUDA
  const int64_t group = q_heads.value / kv_heads.value;
  check(group <= 16, kOp, "q", "expected at most 16 query heads for a KV head on CUDA, got ", group);
  check_block_size(kOp, "k_cache", block.value);
  for (const auto& [arg, tensor] : {std::pair{"out", out},
                                    {"q", q},
                                    {"k_cache", k_cache},
                                    {"v_cache", v_cache},
                                    {"plan", plan},
                                    {"workspace", workspace}})
    check_aligned(kOp, arg, tensor);
  const int32_t device = q.get_device_index();
  const int64_t plan_needed = kernels::decode_plan_numel(device);
  check(plan_numel.value >= plan_needed, kOp, "plan", "expected at least ", plan_needed, " elements, got ",
        plan_numel.value);
  const int64_t workspace_needed = kernels::decode_workspace_numel(device, group, dim.value);
  check(workspace_numel.value >= workspace_needed, kOp, "workspace", "expected at least ", workspace_needed,
        " elements, got ", workspace_numel.value);
#endif
  const PagedAttentionDecodeParams p{
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
      .q_stride_head = q.stride(1),
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
  NV_RUN(paged_attention_decode, p, q);
}

STABLE_TORCH_LIBRARY_IMPL(nanovllm, NV_DISPATCH_KEY, m) {
  m.impl("paged_attention_decode", TORCH_BOX(&paged_attention_decode));
}

}  // namespace nanovllm::ops
