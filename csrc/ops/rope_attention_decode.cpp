#include "kernels/rope_attention_decode.h"

#include "common/run.h"
#include "ops/decode_attention.h"

namespace nanovllm::ops {

void rope_attention_decode(Tensor out, Tensor qkv, std::optional<Tensor> q_weight,
                           std::optional<Tensor> k_weight, Tensor cos_sin, Tensor k_cache, Tensor v_cache,
                           Tensor block_tables, Tensor context_lens, Tensor plan, Tensor workspace,
                           std::optional<Tensor> k_scale, std::optional<Tensor> v_scale, double eps,
                           double scale, bool past_complete) {
  constexpr auto kOp = "rope_attention_decode";
  Dim batch{"batch"}, q_heads{"num_q_heads"}, kv_heads{"num_kv_heads"}, dim{"head_dim"};
  Dim width{"width"}, max_pos{"max_pos"}, rotary_dim{"rotary_dim"};
  check_shape(kOp, "qkv", qkv, {batch, width});
  const PagedAttentionDecodeParams attention = check_decode_attention(
      kOp, out, "qkv", qkv, batch, q_heads, dim, kv_heads, k_cache, v_cache, block_tables, context_lens, plan,
      workspace, k_scale, v_scale, scale, past_complete);
  const int64_t num_heads = q_heads.value + 2 * kv_heads.value;
  check(width.value == num_heads * dim.value, kOp, "qkv", "expected a width of ", num_heads * dim.value, " (",
        q_heads.value, " + 2 * ", kv_heads.value, " heads of ", dim.value, "), got ", width.value);
  for (auto [arg, weight] : {std::pair{"q_weight", &q_weight}, std::pair{"k_weight", &k_weight}}) {
    if (!weight->has_value()) continue;
    check_shape(kOp, arg, **weight, {dim});
    check_dtype(kOp, arg, **weight, qkv.scalar_type());
    check_contiguous(kOp, arg, **weight);
  }
  check_shape(kOp, "cos_sin", cos_sin, {max_pos, rotary_dim});
  check_dtype(kOp, "cos_sin", cos_sin, ScalarType::Float);
  check_contiguous(kOp, "cos_sin", cos_sin);
  check(rotary_dim.value % 2 == 0 && rotary_dim.value <= dim.value, kOp, "cos_sin",
        "expected an even rotary_dim of at most head_dim = ", dim.value, ", got ", rotary_dim.value);
#ifdef NV_CUDA
  check(kernels::rope_attention_decode_takes(dim.value, rotary_dim.value), kOp, "cos_sin",
        "expected head_dim 64 or 128 and as large a rotary_dim on CUDA, got ", dim.value, " and ",
        rotary_dim.value);
  check_aligned(kOp, "cos_sin", cos_sin);
  for (auto [arg, weight] : {std::pair{"q_weight", &q_weight}, std::pair{"k_weight", &k_weight}})
    if (weight->has_value()) check_aligned(kOp, arg, **weight);
#endif
  if (out.numel() == 0) return;
  const RopeAttentionDecodeParams p{.attention = attention,
                                    .q_weight = data_or_null<void>(q_weight),
                                    .k_weight = data_or_null<void>(k_weight),
                                    .cos_sin = static_cast<const float*>(cos_sin.data_ptr()),
                                    .max_pos = max_pos.value,
                                    .rotary_dim = rotary_dim.value,
                                    .eps = static_cast<float>(eps)};
  NV_RUN(rope_attention_decode, p, qkv);
}

STABLE_TORCH_LIBRARY_IMPL(nanovllm, NV_DISPATCH_KEY, m) {
  m.impl("rope_attention_decode", TORCH_BOX(&rope_attention_decode));
}

}  // namespace nanovllm::ops
