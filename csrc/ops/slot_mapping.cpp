#include "kernels/slot_mapping.h"

#include "common/run.h"
#include "ops/kv_cache.h"

namespace nanovllm::ops {

void slot_mapping(Tensor positions, Tensor slots, Tensor block_tables, Tensor cu_seqlens_q, Tensor start_pos,
                  int64_t block_size) {
  constexpr auto kOp = "slot_mapping";
  Dim tokens{"num_tokens"}, seqs{"num_seqs"}, table_width{"table_width"};
  check_shape(kOp, "positions", positions, {tokens});
  check_shape(kOp, "slots", slots, {tokens});
  check_shape(kOp, "block_tables", block_tables, {seqs, table_width});
  check_shape(kOp, "start_pos", start_pos, {seqs});
  check_shape(kOp, "cu_seqlens_q", cu_seqlens_q, {seqs.value + 1});
  check_dtype(kOp, "positions", positions, ScalarType::Long);
  check_dtype(kOp, "slots", slots, ScalarType::Long);
  check_dtype(kOp, "block_tables", block_tables, ScalarType::Int);
  check_dtype(kOp, "cu_seqlens_q", cu_seqlens_q, ScalarType::Int);
  check_dtype(kOp, "start_pos", start_pos, ScalarType::Int);
  check_contiguous(kOp, "positions", positions);
  check_contiguous(kOp, "slots", slots);
  check_last_contiguous(kOp, "block_tables", block_tables);
  check_contiguous(kOp, "cu_seqlens_q", cu_seqlens_q);
  check_contiguous(kOp, "start_pos", start_pos);
  const int32_t block_shift = check_block_size(kOp, "block_size", block_size);
  if (tokens.value == 0) return;
  const SlotMappingParams p{.positions = static_cast<int64_t*>(positions.data_ptr()),
                            .slots = static_cast<int64_t*>(slots.data_ptr()),
                            .block_tables = static_cast<const int32_t*>(block_tables.data_ptr()),
                            .cu_seqlens_q = static_cast<const int32_t*>(cu_seqlens_q.data_ptr()),
                            .start_pos = static_cast<const int32_t*>(start_pos.data_ptr()),
                            .num_tokens = tokens.value,
                            .num_seqs = seqs.value,
                            .table_width = table_width.value,
                            .table_stride_row = block_tables.stride(0),
                            .block_shift = block_shift};
  NV_RUN(slot_mapping, p, positions);
}

STABLE_TORCH_LIBRARY_IMPL(nanovllm, NV_DISPATCH_KEY, m) { m.impl("slot_mapping", TORCH_BOX(&slot_mapping)); }

}  // namespace nanovllm::ops
