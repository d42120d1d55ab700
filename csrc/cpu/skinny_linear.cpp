// Bound by reading the weight once; cpu/skinny.h says how.
#include "kernels/skinny_linear.h"

#include "cpu/skinny.h"

namespace nanovllm::cpu {
namespace {

template <class T>
NV_INLINE void columns(const SkinnyLinearParams& p, SkinnyRows rows, int64_t begin, int64_t end) {
  const T* weight = static_cast<const T*>(p.weight);
  for (int64_t n = begin; n < end; n += kTile)
    all_rows<T>(p, rows, n, std::min<int64_t>(kTile, end - n),
                [&](int64_t j) { return weight + (n + j) * p.weight_stride_row; });
}
NV_MULTIVERSION void columns_f32(const SkinnyLinearParams& p, SkinnyRows rows, int64_t begin, int64_t end) {
  columns<float>(p, rows, begin, end);
}
NV_MULTIVERSION void columns_bf16(const SkinnyLinearParams& p, SkinnyRows rows, int64_t begin, int64_t end) {
  columns<BFloat16>(p, rows, begin, end);
}

}  // namespace

void skinny_linear(const SkinnyLinearParams& p) {
  const auto body = p.dtype == DType::kFloat32 ? columns_f32 : columns_bf16;
  parallel_columns(p, [&](SkinnyRows rows, int64_t begin, int64_t end) { body(p, rows, begin, end); });
}

}  // namespace nanovllm::cpu
