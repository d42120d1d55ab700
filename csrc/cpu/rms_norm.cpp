#include "kernels/rms_norm.h"

#include <cmath>

#include "cpu/simd.h"

namespace nanovllm::cpu {
namespace {

template <class T>
NV_INLINE void row(T* out, const T* x, const T* weight, int64_t hidden, float eps) {
  Vec squares{};
  int64_t i = 0;
  for (; i + kVec <= hidden; i += kVec) {
    const Vec v = load_vec(x + i);
    squares += v * v;
  }
  float total = sum(squares);
  for (; i < hidden; ++i) total += to_float(x[i]) * to_float(x[i]);
  const float scale = 1.0f / std::sqrt(total / static_cast<float>(hidden) + eps);
  for (i = 0; i + kVec <= hidden; i += kVec)
    store_vec(out + i, load_vec(x + i) * scale * load_vec(weight + i));
  for (; i < hidden; ++i) store(out + i, to_float(x[i]) * scale * to_float(weight[i]));
}

// target_clones wants a plain function: one per element type.
template <class T>
NV_INLINE void rows(const RmsNormParams& p, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t)
    row(static_cast<T*>(p.out) + t * p.out_stride_row, static_cast<const T*>(p.x) + t * p.x_stride_row,
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
  const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(1, p.hidden));
  torch::stable::parallel_for(0, p.num_tokens, grain,
                              [&](int64_t begin, int64_t end) { body(p, begin, end); });
}

}  // namespace nanovllm::cpu
