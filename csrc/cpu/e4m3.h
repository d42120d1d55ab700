// The 8-bit floats of an fp8 cache: sign, 4 bits of exponent with bias 7, 3 of mantissa; 0x7f and 0xff are
// NaN.
#pragma once
#include "cpu/simd.h"

namespace nanovllm::cpu {

typedef uint8_t VecU8 __attribute__((vector_size(kVec), aligned(1)));

struct Float8E4M3 {
  uint8_t bits;
};

template <class V = Vec>
NV_INLINE V load_vec(const Float8E4M3* p) {
  using U32 = Same<uint32_t, V>;
  using I32 = Same<int32_t, V>;
  Same<uint8_t, V> bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  const U32 code = __builtin_convertvector(bytes, U32), magnitude = code & 0x7fu;
  // Codes below 8 are multiples of 2^-9. They go through integers: as subnormal floats they would be slow.
  const V small = __builtin_convertvector(std::bit_cast<I32>(magnitude), V) * 0x1p-9f;
  const U32 normal = (magnitude << 20) + (120u << 23);  // exponent bias 7 to 127
  const U32 is_small = std::bit_cast<U32>(magnitude < 8u), is_nan = std::bit_cast<U32>(magnitude == 0x7fu);
  const U32 bits = (is_small & std::bit_cast<U32>(small)) | (~is_small & normal) | (is_nan & 0x7fc00000u);
  return std::bit_cast<V>(bits | ((code & 0x80u) << 24));
}

/// Round to nearest even, saturating at 448; NaN becomes 0x7f with its sign.
NV_INLINE void store_e4m3(uint8_t* p, Vec x, int64_t n) {
  const VecU32 bits = std::bit_cast<VecU32>(x);
  const VecU32 sign = (bits >> 24) & 0x80u, magnitude = bits & 0x7fffffffu;
  Vec a = std::bit_cast<Vec>(magnitude);
  const VecU32 nan = std::bit_cast<VecU32>(a != a);
  a = a > 448.0f ? Vec{} + 448.0f : a;
  // Below 2^-6 the spacing is 2^-9, that of floats at 2^14: adding 2^14 rounds, and leaves the code in the
  // low bits.
  const VecU32 subnormal = std::bit_cast<VecU32>(a + 16384.0f) - std::bit_cast<uint32_t>(16384.0f);
  const VecU32 u = std::bit_cast<VecU32>(a);
  const VecU32 normal = ((u + 0x7ffffu + ((u >> 20) & 1u)) >> 20) - (120u << 3);  // exponent bias 127 to 7
  const VecU32 small = std::bit_cast<VecU32>(a < 0.015625f);
  const VecU32 code = (nan & 0x7fu) | (~nan & ((small & subnormal) | (~small & normal)));
  const VecU8 bytes = __builtin_convertvector(code | sign, VecU8);
  std::memcpy(p, &bytes, n);
}

}  // namespace nanovllm::cpu
