#include "common/run.h"
#include "ops/decode_attention.h"

namespace nanovllm::ops {

void paged_attention_decode(Tensor out, Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables,
                            Tensor context_lens, Tensor plan, Tensor workspace, std::optional<Tensor> k_scale,
                            std::optional<Tensor> v_scale, double scale, bool past_complete) {
  constexpr auto kOp = "paged_attention_decode";
  Dim batch{"batch"}, q_heads{"num_q_heads"}, kv_heads{"num_kv_heads"}, dim{"head_dim"};
  check_shape(kOp, "q", q, {batch, q_heads, dim});
  const PagedAttentionDecodeParams p =
      check_decode_attention(kOp, out, "q", q, batch, q_heads, dim, kv_heads, k_cache, v_cache, block_tables,
                             context_lens, plan, workspace, k_scale, v_scale, scale, past_complete);
  if (out.numel() == 0) return;
  NV_RUN(paged_attention_decode, p, q);
}

STABLE_TORCH_LIBRARY_IMPL(nanovllm, NV_DISPATCH_KEY, m) {
  m.impl("paged_attention_decode", TORCH_BOX(&paged_attention_decode));
}

}  // namespace nanovllm::ops
