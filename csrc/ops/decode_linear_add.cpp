#include "kernels/decode_linear_add.h"

#include "common/run.h"
#include "ops/decode_linear.h"

namespace nanovllm::ops {

void decode_linear_add(Tensor residual, Tensor scaled, Tensor squares, Tensor x, Tensor weight,
                       std::optional<Tensor> bias, Tensor norm_weight, bool weight_complete,
                       std::optional<Tensor> workspace) {
  constexpr auto kOp = "decode_linear_add";
  Dim rows{"num_rows"}, n{"out_features"}, k{"in_features"};
  DecodeLinearAddParams p{
      .linear = check_decode_linear(kOp, rows, n, k, x, weight, bias, weight_complete, workspace)};
  check(n.value % kDecodeLinearPack == 0, kOp, "weight", "expected out_features that ", kDecodeLinearPack,
        " divides, got ", n.value);
  check_shape(kOp, "norm_weight", norm_weight, {n});
  check_dtype(kOp, "norm_weight", norm_weight, x.scalar_type());
  check_contiguous(kOp, "norm_weight", norm_weight);
  check(reinterpret_cast<uintptr_t>(norm_weight.data_ptr()) % 8 == 0, kOp, "norm_weight",
        "expected an address that 8 divides");
  check_shape(kOp, "residual", residual, {rows, n});
  check_dtype(kOp, "residual", residual, x.scalar_type());
  check_packed_rows(kOp, "residual", residual);
  check_shape(kOp, "scaled", scaled, {rows, n});
  check_dtype(kOp, "scaled", scaled, x.scalar_type());
  check_packed_rows(kOp, "scaled", scaled);
  check_squares(kOp, squares, rows, n.value);
  if (residual.numel() == 0) return;
  p.linear.out = residual.data_ptr();
  p.linear.out_stride_row = residual.stride(0);
  p.scaled = scaled.data_ptr();
  p.norm_weight = norm_weight.data_ptr();
  p.squares = static_cast<float*>(squares.data_ptr());
  p.scaled_stride_row = scaled.stride(0);
  NV_RUN(decode_linear_add, p, x);
}

STABLE_TORCH_LIBRARY_IMPL(nanovllm, NV_DISPATCH_KEY, m) {
  m.impl("decode_linear_add", TORCH_BOX(&decode_linear_add));
}

}  // namespace nanovllm::ops
