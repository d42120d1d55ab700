// RMS norm of one contiguous run of values, fp32 inside: what the norm kernels share.
#pragma once
#include <cmath>

#include "cpu/simd.h"

namespace nanovllm::cpu {

/// 1 / sqrt(mean(x^2) + eps)
template <class T>
NV_INLINE float inverse_rms(const T* x, int64_t n, float eps) {
  Vec squares{};
  int64_t i = 0;
  for (; i + kVec <= n; i += kVec) {
    const Vec v = load_vec(x + i);
    squares += v * v;
  }
  if (i < n) {
    const Vec v = load_part(x + i, n - i);
    squares += v * v;
  }
  return 1.0f / std::sqrt(sum(squares) / static_cast<float>(n) + eps);
}

/// out = x / rms(x) * weight; `out` may be `x`.
template <class T>
NV_INLINE void norm_row(T* out, const T* x, const T* weight, int64_t n, float eps) {
  const float scale = inverse_rms(x, n, eps);
  int64_t i = 0;
  for (; i + kVec <= n; i += kVec) store_vec(out + i, load_vec(x + i) * scale * load_vec(weight + i));
  if (i < n) store_part(out + i, load_part(x + i, n - i) * scale * load_part(weight + i, n - i), n - i);
}

}  // namespace nanovllm::cpu
