#include "kernels/rope_attention_decode.h"

#include "common/run.h"
#include "ops/decode_attention.h"
#include "ops/kv_cache.h"
#include "ops/rotary.h"

namespace nanovllm::ops {

void rope_attention_decode(Tensor out, Tensor qkv, std::optional<Tensor> q_weight,
                           std::optional<Tensor> k_weight, Tensor cos_sin, Tensor k_cache, Tensor v_cache,
                           Tensor block_tables, Tensor context_lens, Tensor plan, Tensor workspace,
                           std::optional<Tensor> k_scale, std::optional<Tensor> v_scale, double eps,
                           double scale, bool past_complete) {
  constexpr auto kOp = "rope_attention_decode";
  Dim batch{"batch"}, q_heads{"num_q_heads"}, kv_heads{"num_kv_heads"}, dim{"head_dim"};
  Dim width{"width"};
  check_shape(kOp, "qkv", qkv, {batch, width});
  const PagedAttentionDecodeParams attention = check_decode_attention(
      kOp, out, "qkv", qkv, batch, q_heads, dim, kv_heads, k_cache, v_cache, block_tables, context_lens, plan,
      workspace, k_scale, v_scale, scale, past_complete);
  const int64_t num_heads = q_heads.value + 2 * kv_heads.value;
  check(width.value == num_heads * dim.value, kOp, "qkv", "expected a width of ", num_heads * dim.value, " (",
        q_heads.value, " + 2 * ", kv_heads.value, " heads of ", dim.value, "), got ", width.value);
  check_block_size(kOp, "k_cache", attention.block_size);
  check_norm_weights(kOp, q_weight, k_weight, qkv.scalar_type(), dim);
  const Rotary rotary = check_cos_sin(kOp, cos_sin, dim);
#ifdef NV_CUDA
  check(kernels::rope_attention_decode_takes(dim.value, rotary.dim), kOp, "cos_sin",
        "expected head_dim 64 or 128 and as large a rotary_dim on CUDA, got ", dim.value, " and ",
        rotary.dim);
  check_aligned(kOp, "cos_sin", cos_sin);
  for (auto [arg, weight] : {std::pair{"q_weight", &q_weight}, std::pair{"k_weight", &k_weight}})
    if (weight->has_value()) check_aligned(kOp, arg, **weight);
#endif
  if (out.numel() == 0) return;
  const RopeAttentionDecodeParams p{.attention = attention,
                                    .q_weight = data_or_null<void>(q_weight),
                                    .k_weight = data_or_null<void>(k_weight),
                                    .cos_sin = rotary.cos_sin,
                                    .max_pos = rotary.max_pos,
                                    .rotary_dim = rotary.dim,
                                    .eps = static_cast<float>(eps)};
  NV_RUN(rope_attention_decode, p, qkv);
}

STABLE_TORCH_LIBRARY_IMPL(nanovllm, NV_DISPATCH_KEY, m) {
  m.impl("rope_attention_decode", TORCH_BOX(&rope_attention_decode));
}

}  // namespace nanovllm::ops
