#include "kernels/embed_rms_norm.h"

#include "common/run.h"

namespace nanovllm::ops {

void embed_rms_norm(Tensor out, Tensor residual, Tensor token_ids, Tensor table, Tensor weight, double eps) {
  constexpr auto kOp = "embed_rms_norm";
  Dim tokens{"num_tokens"}, hidden{"hidden"}, vocab{"vocab"};
  check_shape(kOp, "token_ids", token_ids, {tokens});
  check_shape(kOp, "table", table, {vocab, hidden});
  check_shape(kOp, "out", out, {tokens, hidden});
  check_shape(kOp, "residual", residual, {tokens, hidden});
  check_shape(kOp, "weight", weight, {hidden});
  const DType dtype = check_activation(kOp, "table", table);
  check_dtype(kOp, "token_ids", token_ids, ScalarType::Long);
  check_dtype(kOp, "out", out, table.scalar_type());
  check_dtype(kOp, "residual", residual, table.scalar_type());
  check_dtype(kOp, "weight", weight, table.scalar_type());
  check_contiguous(kOp, "token_ids", token_ids);
  check_last_contiguous(kOp, "table", table);
  check_last_contiguous(kOp, "out", out);
  check_last_contiguous(kOp, "residual", residual);
  check_contiguous(kOp, "weight", weight);
  if (out.numel() == 0) return;
  check(vocab.value > 0, kOp, "table", "expected at least one row, got 0");
  const EmbedRmsNormParams p{.out = out.data_ptr(),
                             .residual = residual.data_ptr(),
                             .token_ids = static_cast<const int64_t*>(token_ids.data_ptr()),
                             .table = table.data_ptr(),
                             .weight = weight.data_ptr(),
                             .num_tokens = tokens.value,
                             .hidden = hidden.value,
                             .vocab = vocab.value,
                             .out_stride_row = out.stride(0),
                             .residual_stride_row = residual.stride(0),
                             .table_stride_row = table.stride(0),
                             .eps = static_cast<float>(eps),
                             .dtype = dtype};
  NV_RUN(embed_rms_norm, p, table);
}

STABLE_TORCH_LIBRARY_IMPL(nanovllm, NV_DISPATCH_KEY, m) {
  m.impl("embed_rms_norm", TORCH_BOX(&embed_rms_norm));
}

}  // namespace nanovllm::ops
