#include "kernels/qk_norm_rope_store.h"

#include "common/run.h"
#include "ops/kv_cache.h"
#include "ops/rotary.h"

namespace nanovllm::ops {

void qk_norm_rope_store(Tensor qkv, std::optional<Tensor> q_weight, std::optional<Tensor> k_weight,
                        Tensor cos_sin, Tensor positions, Tensor k_cache, Tensor v_cache, Tensor slots,
                        std::optional<Tensor> k_scale, std::optional<Tensor> v_scale, int64_t num_q_heads,
                        int64_t num_kv_heads, double eps) {
  constexpr auto kOp = "qk_norm_rope_store";
  Dim tokens{"num_tokens"}, width{"width"};
  check_shape(kOp, "qkv", qkv, {tokens, width});
  const DType dtype = check_activation(kOp, "qkv", qkv);
  check_last_contiguous(kOp, "qkv", qkv);
  // Bounded before they are added up: the sum of two large counts wraps around, to 0 at worst.
  for (auto [arg, heads] : {std::pair{"num_q_heads", num_q_heads}, std::pair{"num_kv_heads", num_kv_heads}})
    check(heads > 0 && heads <= INT32_MAX, kOp, arg, "expected 1 to ", INT32_MAX, ", got ", heads);
  const int64_t num_heads = num_q_heads + 2 * num_kv_heads;
  check(width.value % num_heads == 0, kOp, "qkv", "expected a width that ", num_q_heads, " + 2 * ",
        num_kv_heads, " heads divide, got ", width.value);
  Dim head_dim{"head_dim", width.value / num_heads, "qkv"}, kv_heads{"num_kv_heads", num_kv_heads, "qkv"};
  check_norm_weights(kOp, q_weight, k_weight, qkv.scalar_type(), head_dim);
  const Rotary rotary = check_rotary(kOp, cos_sin, positions, tokens, head_dim);
  const KvCache cache = check_kv_cache(kOp, k_cache, v_cache, slots, k_scale, v_scale, dtype,
                                       qkv.scalar_type(), tokens, kv_heads, head_dim);
  if (qkv.numel() == 0) return;
  const QkNormRopeStoreParams p{.qkv = qkv.data_ptr(),
                                .q_weight = data_or_null<void>(q_weight),
                                .k_weight = data_or_null<void>(k_weight),
                                .num_tokens = tokens.value,
                                .qkv_stride_row = qkv.stride(0),
                                .num_q_heads = static_cast<int32_t>(num_q_heads),
                                .eps = static_cast<float>(eps),
                                .dtype = dtype,
                                .rotary = rotary,
                                .cache = cache};
  NV_RUN(qk_norm_rope_store, p, qkv);
}

STABLE_TORCH_LIBRARY_IMPL(nanovllm, NV_DISPATCH_KEY, m) {
  m.impl("qk_norm_rope_store", TORCH_BOX(&qk_norm_rope_store));
}

}  // namespace nanovllm::ops
