#include "kernels/rms_norm.h"

#include "cpu/row_norm.h"

namespace nanovllm::cpu {
namespace {

// target_clones wants a plain function: one per element type.
template <class T>
NV_INLINE void rows(const RmsNormParams& p, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t)
    norm_row(static_cast<T*>(p.out) + t * p.out_stride_row, static_cast<const T*>(p.x) + t * p.x_stride_row,
             static_cast<const T*>(p.weight), p.hidden, p.eps);
}
NV_MULTIVERSION void rows_f32(const RmsNormParams& p, int64_t begin, int64_t end) {
  rows<float>(p, begin, end);
}
NV_MULTIVERSION void rows_bf16(const RmsNormParams& p, int64_t begin, int64_t end) {
  rows<BFloat16>(p, begin, end);
}

}  // namespace

void rms_norm(const RmsNormParams& p) {
  const auto body = p.dtype == DType::kFloat32 ? rows_f32 : rows_bf16;
  parallel_rows(p.num_tokens, p.hidden, [&](int64_t begin, int64_t end) { body(p, begin, end); });
}

}  // namespace nanovllm::cpu
