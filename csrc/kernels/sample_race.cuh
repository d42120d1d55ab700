// The race of groups of `sample` (common/philox.h): random words, weights, and the search for the least time
// without the logarithms of most groups.
#pragma once
#include "common/mma.cuh"
#include "common/philox.h"

namespace nanovllm::kernels {

constexpr float kLowest = -INFINITY;
constexpr float kLog2e = 1.44269504f;

/// -log(u), u = (word + 0.5) / 2^32.
__device__ inline float wait_of(uint32_t word) {
  const float u = (static_cast<float>(word) + 0.5f) * 0x1p-32f;
  const float rest = (static_cast<float>(~word) + 0.5f) * 0x1p-32f;  // 1 - u, not rounded to 0
  return rest < 0.25f ? -log1pf(-rest) : -__logf(u);
}

/// The random words of a row.
struct Random {
  uint32_t key0, key1, low, high;
  __device__ Random(int64_t seed, int64_t position)
      : key0(static_cast<uint32_t>(seed)),
        key1(static_cast<uint32_t>(seed >> 32)),
        low(static_cast<uint32_t>(position)),
        high(static_cast<uint32_t>(position >> 32)) {}
  __device__ PhiloxBlock<uint32_t> block(uint32_t block, uint32_t i) const {
    return philox(PhiloxBlock<uint32_t>{{block, low, high, i}}, key0, key1);
  }
  /// Of u(n, i).
  __device__ uint32_t word(uint32_t n, uint32_t i) const {
    const auto [word] = block(n / kBlockWords, i);
    const uint32_t even = n & 2 ? word[2] : word[0], odd = n & 2 ? word[3] : word[1];
    return n & 1 ? odd : even;
  }
};

/// The weight of a group, weight_of(j) that of its token j.
template <class F>
__device__ float weight_of_group(F const& weight_of) {
  float w[kGroupTokens];
#pragma unroll
  for (int j = 0; j < kGroupTokens; ++j) w[j] = weight_of(j);
  return ((w[0] + w[4]) + (w[2] + w[6])) + ((w[1] + w[5]) + (w[3] + w[7]));
}

/// A thread's search for the group with the least time, its weights relative to 2^anchor. The threads of a
/// block share a score that one of them has reached: anchor - log2(time), the greater, the sooner. -log(u) >=
/// 1 - u, so a group gets there only if 1 - u is at most that time its weight: no logarithm for the others.
struct Race {
  static constexpr float kMaxAnchor = 0x1p14f;         // of either sign
  static constexpr float kLift = kMaxAnchor + 0x1p8f;  // makes a shared score positive: ordered as its bits
  static constexpr float kSlack = 0x1p-6f;             // for its rounding
  static constexpr int kNone = 0x43200000;             // 160: the limit of the least anchor is 2^96
  static constexpr float kLongestLog = 4.53f;          // above that of the longest wait, 4.516

  int* reached;  // shared memory: the bits of a lifted score
  float anchor;
  float time = INFINITY;
  uint32_t group = UINT32_MAX;

  /// Whether `weight` may bring a better time; yes for NaN and infinity.
  __device__ bool may_win(float weight, uint32_t word) const {
    const float score = __int_as_float(*const_cast<volatile int*>(reached));
    const float rest = __uint_as_float(0x3f800000u | (~word >> 9));  // 1 + (1 - u), rounded down to 23 bits
    return !(rest > fmaf(weight, exp2_approx(anchor + kLift - score), 1.0f));
  }
  __device__ void run(float weight, uint32_t word, uint32_t at) {
    const float own = __fdividef(wait_of(word), weight);  // no weight is near 2^126
    if (!(own < time)) return;
    time = own;
    group = at;
    atomicMax(reached, __float_as_int(anchor + kLift - __log2f(own) - kSlack));
  }
};

}  // namespace nanovllm::kernels
