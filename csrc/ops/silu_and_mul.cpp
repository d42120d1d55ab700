#include "kernels/silu_and_mul.h"

#include "common/run.h"

namespace nanovllm::ops {

void silu_and_mul(Tensor out, Tensor gate_up) {
  constexpr auto kOp = "silu_and_mul";
  Dim tokens{"num_tokens"}, width{"width"};
  check_shape(kOp, "out", out, {tokens, width});
  check_shape(kOp, "gate_up", gate_up, {tokens, 2 * width.value});
  const DType dtype = check_activation(kOp, "gate_up", gate_up);
  check_dtype(kOp, "out", out, gate_up.scalar_type());
  check_last_contiguous(kOp, "gate_up", gate_up);
  check_last_contiguous(kOp, "out", out);
  if (out.numel() == 0) return;
  const SiluAndMulParams p{.out = out.data_ptr(),
                           .gate_up = gate_up.data_ptr(),
                           .num_tokens = tokens.value,
                           .width = width.value,
                           .out_stride_row = out.stride(0),
                           .gate_up_stride_row = gate_up.stride(0),
                           .dtype = dtype};
  NV_RUN(silu_and_mul, p, gate_up);
}

STABLE_TORCH_LIBRARY_IMPL(nanovllm, NV_DISPATCH_KEY, m) { m.impl("silu_and_mul", TORCH_BOX(&silu_and_mul)); }

}  // namespace nanovllm::ops
