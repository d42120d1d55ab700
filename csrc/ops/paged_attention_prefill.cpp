#include "kernels/paged_attention_prefill.h"

#include "common/run.h"
#include "ops/attention_checks.h"

namespace nanovllm::ops {

void paged_attention_prefill(Tensor out, Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q,
                             Tensor context_lens, std::optional<Tensor> block_tables, int64_t max_seqlen_q,
                             std::optional<Tensor> k_scale, std::optional<Tensor> v_scale, double scale) {
  constexpr auto kOp = "paged_attention_prefill";
  const bool paged = block_tables.has_value();
  Dim tokens{"num_tokens"}, q_heads{"num_q_heads"}, kv_heads{"num_kv_heads"}, dim{"head_dim"};
  Dim batch{"batch"}, blocks{"num_blocks"}, block{"block_size"}, max_blocks{"max_blocks"};
  check_shape(kOp, "q", q, {tokens, q_heads, dim});
  check_shape(kOp, "out", out, {tokens, q_heads, dim});
  if (paged) {
    check_shape(kOp, "k", k, {blocks, block, kv_heads, dim});
    check_shape(kOp, "v", v, {blocks, block, kv_heads, dim});
  } else {
    check_shape(kOp, "k", k, {tokens, kv_heads, dim});
    check_shape(kOp, "v", v, {tokens, kv_heads, dim});
  }
  check_shape(kOp, "context_lens", context_lens, {batch});
  check_shape(kOp, "cu_seqlens_q", cu_seqlens_q, {batch.value + 1});
  const DType dtype = check_activation(kOp, "q", q);
  check_dtype(kOp, "out", out, q.scalar_type());
  const DType kv_dtype = check_cache(kOp, q, "k", k, "v", v, k_scale, v_scale);
  check_dtype(kOp, "cu_seqlens_q", cu_seqlens_q, ScalarType::Int);
  check_dtype(kOp, "context_lens", context_lens, ScalarType::Int);
  check_heads(kOp, "q", q_heads.value, kv_heads.value, dim.value);
  check_last_contiguous(kOp, "q", q);
  check_last_contiguous(kOp, "out", out);
  check_contiguous(kOp, "cu_seqlens_q", cu_seqlens_q);
  check_contiguous(kOp, "context_lens", context_lens);
  if (paged) {
    check_shape(kOp, "block_tables", *block_tables, {batch, max_blocks});
    check_dtype(kOp, "block_tables", *block_tables, ScalarType::Int);
    check_last_contiguous(kOp, "block_tables", *block_tables);
  }
  if (out.numel() == 0) return;
  // A table without entries has no address, and would be taken for packed keys below.
  check(!paged || block_tables->numel() > 0, kOp, "block_tables", "expected at least one block, got shape ",
        shape(paged ? *block_tables : out));
#ifdef NV_CUDA
  check_aligned(kOp, "q", q);
  check_aligned(kOp, "k", k);
  check_aligned(kOp, "v", v);
  if (paged) check_cuda_block_size(kOp, "k", block.value);
  check(scale > 0, kOp, "scale", "expected more than 0 on CUDA, got ", scale);
#endif
  const int slot = paged ? 1 : 0;
  const PagedAttentionPrefillParams p{
      .out = out.data_ptr(),
      .q = q.data_ptr(),
      .k = k.data_ptr(),
      .v = v.data_ptr(),
      .cu_seqlens_q = static_cast<const int32_t*>(cu_seqlens_q.data_ptr()),
      .context_lens = static_cast<const int32_t*>(context_lens.data_ptr()),
      .block_tables = data_or_null<int32_t>(block_tables),
      .k_scale = data_or_null<float>(k_scale),
      .v_scale = data_or_null<float>(v_scale),
      .num_tokens = tokens.value,
      .batch = batch.value,
      .max_seqlen_q = max_seqlen_q,
      .num_q_heads = q_heads.value,
      .num_kv_heads = kv_heads.value,
      .head_dim = dim.value,
      .num_blocks = paged ? blocks.value : 0,
      .block_size = paged ? block.value : 0,
      .max_blocks = paged ? max_blocks.value : 0,
      .out_stride_row = out.stride(0),
      .out_stride_head = out.stride(1),
      .q_stride_row = q.stride(0),
      .q_stride_head = q.stride(1),
      .k_stride_block = paged ? k.stride(0) : 0,
      .k_stride_slot = k.stride(slot),
      .k_stride_head = k.stride(slot + 1),
      .v_stride_block = paged ? v.stride(0) : 0,
      .v_stride_slot = v.stride(slot),
      .v_stride_head = v.stride(slot + 1),
      .table_stride_row = paged ? block_tables->stride(0) : 0,
      .scale = static_cast<float>(scale),
      .dtype = dtype,
      .kv_dtype = kv_dtype,
  };
  NV_RUN(paged_attention_prefill, p, q);
}

STABLE_TORCH_LIBRARY_IMPL(nanovllm, NV_DISPATCH_KEY, m) {
  m.impl("paged_attention_prefill", TORCH_BOX(&paged_attention_prefill));
}

}  // namespace nanovllm::ops
