// Reads 4.5 to 8.5 bits a weight instead of 32: a tile of weight rows is widened to fp32 once, in a
// buffer that stays in L1, and from there it is the product of cpu/skinny.h. The widened numbers are what a
// dequantised weight holds, so the result has the bits of skinny_linear on that.
#include "kernels/skinny_linear_gguf.h"

#include <memory>

#include "cpu/gguf_blocks.h"
#include "cpu/skinny.h"

namespace nanovllm::cpu {
namespace {

template <class T>
NV_INLINE void columns(const SkinnyLinearGgufParams& p, SkinnyRows rows, WidenRow widen, float* wide,
                       int64_t begin, int64_t end) {
  const auto& linear = p.linear;
  for (int64_t n = begin; n < end; n += kTile) {
    const int64_t weights = std::min<int64_t>(kTile, end - n);
    for (int64_t j = 0; j < weights; ++j)
      widen(static_cast<const uint8_t*>(linear.weight) + (n + j) * linear.weight_stride_row,
            linear.k / kGgufBlock, wide + j * linear.k);
    all_rows<T>(linear, rows, n, weights,
                [&](int64_t j) { return static_cast<const float*>(wide) + j * linear.k; });
  }
}
NV_MULTIVERSION void columns_f32(const SkinnyLinearGgufParams& p, SkinnyRows rows, WidenRow widen,
                                 float* wide, int64_t begin, int64_t end) {
  columns<float>(p, rows, widen, wide, begin, end);
}
NV_MULTIVERSION void columns_bf16(const SkinnyLinearGgufParams& p, SkinnyRows rows, WidenRow widen,
                                  float* wide, int64_t begin, int64_t end) {
  columns<BFloat16>(p, rows, widen, wide, begin, end);
}

/// A cache line: the buffer is aligned to it, no vector load is split.
struct alignas(kVec * sizeof(float)) Line {
  float values[kVec];
};

}  // namespace

void skinny_linear_gguf(const SkinnyLinearGgufParams& p) {
  const auto body = p.linear.dtype == DType::kFloat32 ? columns_f32 : columns_bf16;
  const WidenRow widen = widen_row_of(p.quant);
  parallel_columns(p.linear, [&](SkinnyRows rows, int64_t begin, int64_t end) {
    const auto wide = std::make_unique_for_overwrite<Line[]>(kTile * p.linear.k / kVec);
    body(p, rows, widen, wide[0].values, begin, end);
  });
}

}  // namespace nanovllm::cpu
