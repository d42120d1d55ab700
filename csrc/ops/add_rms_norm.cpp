#include "kernels/add_rms_norm.h"

#include "common/run.h"

namespace nanovllm::ops {

void add_rms_norm(Tensor out, Tensor residual, Tensor x, Tensor weight, double eps) {
  constexpr auto kOp = "add_rms_norm";
  Dim tokens{"num_tokens"}, hidden{"hidden"};
  check_shape(kOp, "x", x, {tokens, hidden});
  check_shape(kOp, "out", out, {tokens, hidden});
  check_shape(kOp, "residual", residual, {tokens, hidden});
  check_shape(kOp, "weight", weight, {hidden});
  const DType dtype = check_activation(kOp, "x", x);
  check_dtype(kOp, "out", out, x.scalar_type());
  check_dtype(kOp, "residual", residual, x.scalar_type());
  check_dtype(kOp, "weight", weight, x.scalar_type());
  check_last_contiguous(kOp, "x", x);
  check_last_contiguous(kOp, "out", out);
  check_last_contiguous(kOp, "residual", residual);
  check_contiguous(kOp, "weight", weight);
  if (x.numel() == 0) return;
  const AddRmsNormParams p{.out = out.data_ptr(),
                           .residual = residual.data_ptr(),
                           .x = x.data_ptr(),
                           .weight = weight.data_ptr(),
                           .num_tokens = tokens.value,
                           .hidden = hidden.value,
                           .out_stride_row = out.stride(0),
                           .residual_stride_row = residual.stride(0),
                           .x_stride_row = x.stride(0),
                           .eps = static_cast<float>(eps),
                           .dtype = dtype};
  NV_RUN(add_rms_norm, p, x);
}

STABLE_TORCH_LIBRARY_IMPL(nanovllm, NV_DISPATCH_KEY, m) { m.impl("add_rms_norm", TORCH_BOX(&add_rms_norm)); }

}  // namespace nanovllm::ops
