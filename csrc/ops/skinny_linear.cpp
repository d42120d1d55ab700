#include "kernels/skinny_linear.h"

#include "common/run.h"
#include "ops/skinny.h"

namespace nanovllm::ops {

void skinny_linear(Tensor out, Tensor x, Tensor weight, std::optional<Tensor> bias) {
  constexpr auto kOp = "skinny_linear";
  const SkinnyLinearParams p =
      check_skinny(kOp, out, x, weight, bias, [](Dim& in_features) -> Extent { return in_features; });
  check_dtype(kOp, "weight", weight, x.scalar_type());
  if (out.numel() == 0) return;
  NV_RUN(skinny_linear, p, x);
}

STABLE_TORCH_LIBRARY_IMPL(nanovllm, NV_DISPATCH_KEY, m) {
  m.impl("skinny_linear", TORCH_BOX(&skinny_linear));
}

}  // namespace nanovllm::ops
