// Rotating one head in place, with an optional RMS norm before it: fp32 inside, rounded once at the store.
#pragma once
#include "common/check.h"
#include "cpu/row_norm.h"
#include "kernels/rotary.h"

namespace nanovllm::cpu {

/// Called before the first write, so a bad position changes nothing.
inline void check_positions(const char* op, const Rotary& rotary, int64_t num_tokens) {
  for (int64_t t = 0; t < num_tokens; ++t)
    ops::check(rotary.positions[t] >= 0 && rotary.positions[t] < rotary.max_pos, op, "positions",
               "expected a position from 0 to below ", rotary.max_pos, " (rows of cos_sin), got ",
               rotary.positions[t], " for token ", t);
}

/// x [head_dim]: x / rms(x) * weight where there is a weight, then the rotation by `cos_sin` [dim].
template <class T>
NV_INLINE void norm_rotate_head(T* x, const T* weight, int64_t head_dim, float eps, const float* cos_sin,
                                int64_t dim) {
  const float scale = weight == nullptr ? 1.0f : inverse_rms(x, head_dim, eps);
  const auto load = [&](int64_t at, int64_t n) {
    const auto some = [n](const auto* p) { return n == kVec ? load_vec(p) : load_part(p, n); };
    return weight == nullptr ? some(x + at) : some(x + at) * scale * some(weight + at);
  };
  const auto store = [&](int64_t at, Vec v, int64_t n) {
    n == kVec ? store_vec(x + at, v) : store_part(x + at, v, n);
  };
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; i += kVec) {
    const int64_t n = std::min<int64_t>(kVec, half - i);
    const Vec cos = n == kVec ? load_vec(cos_sin + i) : load_part(cos_sin + i, n);
    const Vec sin = n == kVec ? load_vec(cos_sin + half + i) : load_part(cos_sin + half + i, n);
    const Vec first = load(i, n), second = load(half + i, n);
    store(i, first * cos - second * sin, n);
    store(half + i, second * cos + first * sin, n);
  }
  if (weight == nullptr) return;  // the rest of the head passes through
  for (int64_t i = dim; i < head_dim; i += kVec) {
    const int64_t n = std::min<int64_t>(kVec, head_dim - i);
    store(i, load(i, n), n);
  }
}

}  // namespace nanovllm::cpu
