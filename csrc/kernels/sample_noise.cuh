// The noise of `sample` (common/philox.h), and the choice of the token with the greatest x + noise without
// the logarithms of most tokens.
#pragma once
#include "common/mma.cuh"
#include "common/philox.h"

namespace nanovllm::kernels {

constexpr float kLowest = -INFINITY;

/// -log(-log(u)), u = (word + 0.5) / 2^32.
__device__ inline float gumbel(uint32_t word) {
  const float u = (static_cast<float>(word) + 0.5f) * 0x1p-32f;
  const float rest = (static_cast<float>(~word) + 0.5f) * 0x1p-32f;  // 1 - u, not rounded to 0
  return -logf(rest < 0.25f ? -log1pf(-rest) : -logf(u));
}

/// The words of a row's tokens.
struct Noise {
  uint32_t key0, key1, low, high;
  __device__ Noise(int64_t seed, int64_t position)
      : key0(static_cast<uint32_t>(seed)),
        key1(static_cast<uint32_t>(seed >> 32)),
        low(static_cast<uint32_t>(position)),
        high(static_cast<uint32_t>(position >> 32)) {}
  /// Output 0 or 1 of the block of `token`.
  __device__ PhiloxBlock<uint32_t> output(uint32_t token, uint32_t i) const {
    return philox(PhiloxBlock<uint32_t>{{token / kBlockTokens, low, high, i}}, key0, key1);
  }
  /// Of token j of the block.
  static __device__ uint32_t half(const PhiloxBlock<uint32_t>& output, int j) {
    return j % 2 == 0 ? output.word[j / 2] & 0xffff : output.word[j / 2] >> 16;
  }
  __device__ float of(uint32_t token) const {
    const auto upper = output(token, 0), lower = output(token, 1);
    uint32_t word = 0;
#pragma unroll
    for (int j = 0; j < kBlockTokens; ++j)
      if (token % kBlockTokens == j) word = half(upper, j) << 16 | half(lower, j);
    return gumbel(word);
  }
};

/// A thread's search for the token with the greatest score = x + noise, x = (logit - anchor) / temperature.
/// The threads of a block share a score that one of them has reached. -log(u) >= 1 - u, so a token gets there
/// only if 1 - u <= exp(x - reached): no logarithm for the others.
///
/// What they share is (score + kLift) * log2(e), as the bits of a float: integers in the same order as long
/// as it is not negative. It starts at 0, which a token with x = 0 always reaches.
struct Draw {
  static constexpr float kLift = 3.2f;      // no noise is below -log(-log(2^-33)) = -3.13
  static constexpr float kScale = 24.557f;  // exp(kLift) * 1.001: some slack for the rounding
  static constexpr float kLog2e = 1.44269504f;

  const Noise noise;
  const float anchor, inv_temperature;
  int* reached;  // shared memory
  float score = kLowest;
  uint32_t token = UINT32_MAX;

  /// 1 + the chance of x, as `rest` compares it.
  __device__ float limit(float logit, float lift) const {
    return fmaf(exp2_approx(fmaf(logit - anchor, inv_temperature * kLog2e, -lift)), kScale, 1.0f);
  }
  /// 1 + (1 - u), rounded down to 23 bits.
  static __device__ float rest(uint32_t word) { return __uint_as_float(0x3f800000u | (~word >> 9)); }

  /// The tokens of one Philox block, those with x >= cut; `top` is their greatest logit. A NaN is never
  /// drawn.
  __device__ void offer(const float (&logit)[kBlockTokens], float top, uint32_t first, float cut) {
    const float lift = __int_as_float(*const_cast<volatile int*>(reached));
    const auto upper = noise.output(first, 0);
    const auto& word = upper.word;
    // The least 1 - u, by the upper half of its word, against the greatest x: most end here. (Not so where
    // the limit is NaN.)
    const uint32_t pair = __vmaxu2(__vmaxu2(word[0], word[1]), __vmaxu2(word[2], word[3]));
    const uint32_t most = max(pair << 16, pair);
    if (rest(most | 0xffff) > limit(top, lift)) return;
    const auto lower = noise.output(first, 1);
#pragma unroll
    for (int j = 0; j < kBlockTokens; ++j) {
      const uint32_t own = Noise::half(upper, j) << 16 | Noise::half(lower, j);
      if (!(rest(own) > limit(logit[j], lift)))
        finish((logit[j] - anchor) * inv_temperature, own, first + j, cut);
    }
  }

 private:
  __device__ void finish(float x, uint32_t word, uint32_t at, float cut) {
    if (!(x >= cut)) return;
    const float own = x + gumbel(word);
    if (!(own > score)) return;
    score = own;
    token = at;
    atomicMax(reached, __float_as_int((own + kLift) * kLog2e));
  }
};

}  // namespace nanovllm::kernels
