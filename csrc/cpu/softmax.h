// The softmax that decode and prefill attention share. Scores carry a factor of log2(e), so that a weight is
// a power of two.
#pragma once
#include <limits>

#include "cpu/simd.h"

namespace nanovllm::cpu {

constexpr float kLog2E = 1.44269504f;
constexpr float kNoScore = -std::numeric_limits<float>::infinity();

/// 2^x for x <= 0, within 2 units in the last place: half the work of exp. 0 below -126, NaN stays NaN.
template <class V>
NV_INLINE V exp2_nonpositive(V x) {
  using I32 = Same<int32_t, V>;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const auto tiny = x < -126.0f;
  const V shifted = x + kRound;
  const V r = x - (shifted - kRound);       // exact, |r| <= 1/2
  V p = r * 1.5403530e-4f + 1.3333558e-3f;  // Taylor: the next term is below 2^-23 / 4
  p = p * r + 9.6181291e-3f;
  p = p * r + 5.5504109e-2f;
  p = p * r + 2.4022651e-1f;
  p = p * r + 6.9314718e-1f;
  p = p * r + 1.0f;
  const V e = std::bit_cast<V>(std::bit_cast<I32>(p) + (std::bit_cast<I32>(shifted) << 23));
  return tiny ? V{} : e;
}

/// The greatest of `top` and `count` scores, `count` a multiple of kVec.
template <class V>
NV_INLINE float greatest(const float* scores, int64_t count, float top) {
  V v = V{} + top;
  for (int64_t t = 0; t < count; t += kLanes<V>) v = max(load_vec<V>(scores + t), v);
  return max(v);
}

/// Scores become 2^(score - top), for top >= all of them; returns their sum.
template <class V>
NV_INLINE float soften(float* scores, int64_t count, float top) {
  V total{};
  for (int64_t t = 0; t < count; t += kLanes<V>) {
    const V e = exp2_nonpositive<V>(load_vec<V>(scores + t) - top);
    store_vec(scores + t, e);
    total += e;
  }
  return sum(total);
}

}  // namespace nanovllm::cpu
