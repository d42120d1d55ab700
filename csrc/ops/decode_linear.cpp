#include "ops/decode_linear.h"

#include "common/run.h"

namespace nanovllm::ops {

void decode_linear(Tensor out, Tensor x, Tensor weight, std::optional<Tensor> bias,
                   std::optional<Tensor> squares, double eps, bool silu_and_mul, bool weight_complete,
                   std::optional<Tensor> workspace) {
  constexpr auto kOp = "decode_linear";
  Dim rows{"num_rows"}, n{"out_features"}, k{"in_features"};
  DecodeLinearParams p = check_decode_linear(kOp, rows, n, k, x, weight, bias, weight_complete, workspace);
  check(!silu_and_mul || n.value % 2 == 0, kOp, "weight", "expected as many gate rows as up rows, got ",
        n.value, " rows");
  if (silu_and_mul)
    check_shape(kOp, "out", out, {rows, n.value / 2});
  else
    check_shape(kOp, "out", out, {rows, n});
  check_dtype(kOp, "out", out, x.scalar_type());
  check_last_contiguous(kOp, "out", out);
  if (squares.has_value()) {
    check_squares(kOp, *squares, rows, k.value);
    p.squares = {static_cast<float*>(squares->data_ptr()), squares->size(0), static_cast<float>(eps)};
  }
  if (out.numel() == 0) return;
  p.out = out.data_ptr();
  p.out_stride_row = out.stride(0);
  p.silu_and_mul = silu_and_mul;
  NV_RUN(decode_linear, p, x);
}

STABLE_TORCH_LIBRARY_IMPL(nanovllm, NV_DISPATCH_KEY, m) {
  m.impl("decode_linear", TORCH_BOX(&decode_linear));
}

}  // namespace nanovllm::ops
