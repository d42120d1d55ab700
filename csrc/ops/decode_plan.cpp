#include "kernels/decode_plan.h"

#include "common/run.h"

namespace nanovllm::ops {

void decode_plan(Tensor plan, Tensor context_lens, int64_t num_kv_heads, int64_t block_size) {
  constexpr auto kOp = "decode_plan";
  Dim batch{"batch"}, plan_numel{"plan_numel"};
  check_shape(kOp, "context_lens", context_lens, {batch});
  check_shape(kOp, "plan", plan, {plan_numel});
  check_dtype(kOp, "context_lens", context_lens, ScalarType::Int);
  check_dtype(kOp, "plan", plan, ScalarType::Int);
  check_contiguous(kOp, "context_lens", context_lens);
  check_contiguous(kOp, "plan", plan);
#ifdef NV_CUDA
  const int64_t needed = kernels::decode_plan_numel(plan.get_device_index());
#else
  const int64_t needed = batch.value + 1;
#endif
  check(plan_numel.value >= needed, kOp, "plan", "expected at least ", needed, " elements for a batch of ",
        batch.value, ", got ", plan_numel.value);
  check(num_kv_heads > 0, kOp, "num_kv_heads", "expected at least 1, got ", num_kv_heads);
  check(block_size > 0, kOp, "block_size", "expected at least 1, got ", block_size);
  const DecodePlanParams p{static_cast<int32_t*>(plan.data_ptr()),
                           static_cast<const int32_t*>(context_lens.data_ptr()),
                           batch.value,
                           plan_numel.value,
                           num_kv_heads,
                           block_size};
  NV_RUN(decode_plan, p, plan);
}

STABLE_TORCH_LIBRARY_IMPL(nanovllm, NV_DISPATCH_KEY, m) { m.impl("decode_plan", TORCH_BOX(&decode_plan)); }

}  // namespace nanovllm::ops
