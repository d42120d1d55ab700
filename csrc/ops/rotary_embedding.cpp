#include "kernels/rotary_embedding.h"

#include "common/run.h"
#include "ops/rotary.h"

namespace nanovllm::ops {

void rotary_embedding(Tensor q, Tensor k, Tensor cos_sin, Tensor positions) {
  constexpr auto kOp = "rotary_embedding";
  Dim tokens{"num_tokens"}, q_heads{"num_q_heads"}, k_heads{"num_k_heads"}, head_dim{"head_dim"};
  check_shape(kOp, "q", q, {tokens, q_heads, head_dim});
  check_shape(kOp, "k", k, {tokens, k_heads, head_dim});
  const DType dtype = check_activation(kOp, "q", q);
  check_dtype(kOp, "k", k, q.scalar_type());
  check_last_contiguous(kOp, "q", q);
  check_last_contiguous(kOp, "k", k);
  const Rotary rotary = check_rotary(kOp, cos_sin, positions, tokens, head_dim);
  if (tokens.value == 0) return;
  const RotaryEmbeddingParams p{.q = q.data_ptr(),
                                .k = k.data_ptr(),
                                .num_tokens = tokens.value,
                                .head_dim = head_dim.value,
                                .q_stride_row = q.stride(0),
                                .q_stride_head = q.stride(1),
                                .k_stride_row = k.stride(0),
                                .k_stride_head = k.stride(1),
                                .num_q_heads = static_cast<int32_t>(q_heads.value),
                                .num_k_heads = static_cast<int32_t>(k_heads.value),
                                .dtype = dtype,
                                .rotary = rotary};
  NV_RUN(rotary_embedding, p, q);
}

STABLE_TORCH_LIBRARY_IMPL(nanovllm, NV_DISPATCH_KEY, m) {
  m.impl("rotary_embedding", TORCH_BOX(&rotary_embedding));
}

}  // namespace nanovllm::ops
