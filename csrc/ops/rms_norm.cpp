#include "kernels/rms_norm.h"

#include "common/run.h"

namespace nanovllm::ops {

void rms_norm(Tensor out, Tensor x, Tensor weight, double eps) {
  constexpr auto kOp = "rms_norm";
  Dim tokens{"num_tokens"}, hidden{"hidden"};
  check_shape(kOp, "x", x, {tokens, hidden});
  check_shape(kOp, "out", out, {tokens, hidden});
  check_shape(kOp, "weight", weight, {hidden});
  const DType dtype = check_activation(kOp, "x", x);
  check_dtype(kOp, "out", out, x.scalar_type());
  check_dtype(kOp, "weight", weight, x.scalar_type());
  check_last_contiguous(kOp, "x", x);
  check_last_contiguous(kOp, "out", out);
  check_contiguous(kOp, "weight", weight);
  if (x.numel() == 0) return;
  const RmsNormParams p{out.data_ptr(), x.data_ptr(), weight.data_ptr(),       tokens.value, hidden.value,
                        out.stride(0),  x.stride(0),  static_cast<float>(eps), dtype};
  NV_RUN(rms_norm, p, x);
}

STABLE_TORCH_LIBRARY_IMPL(nanovllm, NV_DISPATCH_KEY, m) { m.impl("rms_norm", TORCH_BOX(&rms_norm)); }

}  // namespace nanovllm::ops
