// The noise of `sample` (common/philox.h), and the choice of the token with the greatest x + noise without
// the logarithms of most tokens.
#pragma once
#include "common/mma.cuh"
#include "common/philox.h"

namespace nanovllm::kernels {

constexpr int kWords = 4;  // tokens of one Philox block
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
  /// Those of the block of `token`.
  __device__ PhiloxBlock<uint32_t> words(uint32_t token) const {
    return philox(PhiloxBlock<uint32_t>{{token / kWords, low, high, 0}}, key0, key1);
  }
  __device__ float of(uint32_t token) const {
    const auto block = words(token);
    const uint32_t even = token % 4 < 2 ? block.word[0] : block.word[2];
    const uint32_t odd = token % 4 < 2 ? block.word[1] : block.word[3];
    return gumbel(token % 2 == 0 ? even : odd);
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

  /// Tokens token_of(j), those with x >= cut; `top` is their greatest logit. A NaN is never drawn.
  template <int kTokens, class F>
  __device__ void offer(const float (&logit)[kTokens], float top, float cut, F const& token_of) {
    const float lift = __int_as_float(*const_cast<volatile int*>(reached));
    PhiloxBlock<uint32_t> words[kTokens / kWords];
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < kTokens / kWords; ++i) {
      words[i] = noise.words(token_of(kWords * i));
      const auto& word = words[i].word;
      most = max(most, max(max(word[0], word[1]), max(word[2], word[3])));
    }
    // The least 1 - u against the greatest x: most end here. (Not so where the limit is NaN.)
    if (rest(most) > limit(top, lift)) return;
#pragma unroll
    for (int j = 0; j < kTokens; ++j) {
      const uint32_t word = words[j / kWords].word[j % kWords];
      if (!(rest(word) > limit(logit[j], lift)))
        finish((logit[j] - anchor) * inv_temperature, word, token_of(j), cut);
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
