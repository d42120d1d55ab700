// log of fp32 vectors, about 1 unit in the last place: range reduction and polynomial of Cephes (Moshier,
// logf).
#pragma once
#include "cpu/simd.h"

namespace nanovllm::cpu {

/// log((1 + f) * 2^e) for 1 + f in [sqrt(1/2), sqrt(2)); exact in f, so it is log1p where e = 0.
NV_INLINE Vec log_of_parts(Vec f, Vec e) {
  Vec y = f * 7.0376836292e-2f - 1.1514610310e-1f;
  y = y * f + 1.1676998740e-1f;
  y = y * f - 1.2420140846e-1f;
  y = y * f + 1.4249322787e-1f;
  y = y * f - 1.6668057665e-1f;
  y = y * f + 2.0000714765e-1f;
  y = y * f - 2.4999993993e-1f;
  y = y * f + 3.3333331174e-1f;
  const Vec f2 = f * f;
  y = y * f * f2 + e * -2.12194440e-4f - 0.5f * f2;
  return f + y + e * 0.693359375f;
}

/// x as (1 + f) * 2^e, 1 + f in [sqrt(1/2), sqrt(2)), for normal positive x.
struct LogParts {
  Vec f, e;
};
NV_INLINE LogParts log_parts(Vec x) {
  constexpr int32_t kSqrtHalf = 0x3f3504f3;
  const VecI32 bits = std::bit_cast<VecI32>(x) - kSqrtHalf;
  const VecI32 exponent = bits >> 23;
  const Vec mantissa = std::bit_cast<Vec>((bits & 0x7fffff) + kSqrtHalf);
  return {mantissa - 1.0f, __builtin_convertvector(exponent, Vec)};
}

/// log(x) for normal positive x.
NV_INLINE Vec log(Vec x) {
  const LogParts parts = log_parts(x);
  return log_of_parts(parts.f, parts.e);
}

}  // namespace nanovllm::cpu
