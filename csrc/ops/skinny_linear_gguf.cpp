#include "kernels/skinny_linear_gguf.h"

#include "common/run.h"
#include "ops/skinny.h"

namespace nanovllm::ops {
namespace {

struct QuantType {
  GgufQuant quant;
  const char* name;
  int64_t block_bytes;
};
constexpr QuantType kQuantTypes[] = {
    {GgufQuant::kQ4_0, "Q4_0", 18}, {GgufQuant::kQ4_1, "Q4_1", 20}, {GgufQuant::kQ8_0, "Q8_0", 34}};

const QuantType& check_quant_type(const char* op, int64_t id) {
  std::string allowed;
  for (const QuantType& type : kQuantTypes) {
    if (static_cast<int64_t>(type.quant) == id) return type;
    allowed +=
        (allowed.empty() ? " " : ", ") + to_text(static_cast<int64_t>(type.quant)) + " (" + type.name + ")";
  }
  check(false, op, "quant_type", "expected one of", allowed, ", got ", id);
  return kQuantTypes[0];  // not reached: a failed check throws
}

}  // namespace

void skinny_linear_gguf(Tensor out, Tensor x, Tensor weight, int64_t quant_type, std::optional<Tensor> bias) {
  constexpr auto kOp = "skinny_linear_gguf";
  const QuantType& type = check_quant_type(kOp, quant_type);
  const SkinnyLinearParams linear =
      check_skinny(kOp, out, x, weight, bias, [&](const Dim& in_features) -> Extent {
        check(in_features.value % kGgufBlock == 0, kOp, "x", "expected in_features to be a multiple of ",
              kGgufBlock, ", got ", in_features.value);
        return in_features.value / kGgufBlock * type.block_bytes;
      });
  check_dtype(kOp, "weight", weight, ScalarType::Byte);
  if (out.numel() == 0) return;
  const SkinnyLinearGgufParams p{linear, type.quant};
  NV_RUN(skinny_linear_gguf, p, x);
}

STABLE_TORCH_LIBRARY_IMPL(nanovllm, NV_DISPATCH_KEY, m) {
  m.impl("skinny_linear_gguf", TORCH_BOX(&skinny_linear_gguf));
}

}  // namespace nanovllm::ops
