// Bound by reading the weight once; cpu/skinny.h says how.
#include "kernels/skinny_linear.h"

#include "cpu/skinny.h"

namespace nanovllm::cpu {
namespace {

NV_MULTIVERSION void columns_f32(const SkinnyLinearParams& p, SkinnyRows rows, int64_t begin, int64_t end) {
  dense_columns<float, float>(p, rows, begin, end);
}
NV_MULTIVERSION void columns_bf16(const SkinnyLinearParams& p, SkinnyRows rows, int64_t begin, int64_t end) {
  dense_columns<BFloat16, BFloat16>(p, rows, begin, end);
}

}  // namespace

void skinny_linear(const SkinnyLinearParams& p) {
  const auto body = p.dtype == DType::kFloat32 ? columns_f32 : columns_bf16;
  parallel_columns(p, [&](SkinnyRows rows, int64_t begin, int64_t end) { body(p, rows, begin, end); });
}

}  // namespace nanovllm::cpu
