#include "kernels/skinny_linear.h"

#include "common/run.h"

namespace nanovllm::ops {

void skinny_linear(Tensor out, Tensor x, Tensor weight, std::optional<Tensor> bias) {
  constexpr auto kOp = "skinny_linear";
  Dim rows{"num_rows"}, n{"out_features"}, k{"in_features"};
  check_shape(kOp, "x", x, {rows, k});
  check_shape(kOp, "weight", weight, {n, k});
  check_shape(kOp, "out", out, {rows, n});
  check(rows.value <= kSkinnyMaxRows, kOp, "x", "expected at most ", kSkinnyMaxRows, " rows, got ",
        rows.value);
  const DType dtype = check_activation(kOp, "x", x);
  check_dtype(kOp, "weight", weight, x.scalar_type());
  check_dtype(kOp, "out", out, x.scalar_type());
  check_last_contiguous(kOp, "x", x);
  check_last_contiguous(kOp, "weight", weight);
  check_last_contiguous(kOp, "out", out);
  if (bias.has_value()) {
    check_shape(kOp, "bias", *bias, {n});
    check_dtype(kOp, "bias", *bias, x.scalar_type());
    check_contiguous(kOp, "bias", *bias);
  }
  if (out.numel() == 0) return;
  const SkinnyLinearParams p{
      out.data_ptr(), x.data_ptr(),  weight.data_ptr(), data_or_null<void>(bias), rows.value, n.value,
      k.value,        out.stride(0), x.stride(0),       weight.stride(0),         dtype};
  NV_RUN(skinny_linear, p, x);
}

STABLE_TORCH_LIBRARY_IMPL(nanovllm, NV_DISPATCH_KEY, m) {
  m.impl("skinny_linear", TORCH_BOX(&skinny_linear));
}

}  // namespace nanovllm::ops
