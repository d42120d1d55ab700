// What the CPU kernels share: fp32 vectors as GCC/Clang vector types (the compiler splits them to what the
// target has), loads and stores from float and bfloat16, and the macro that compiles one function for three
// x86-64 levels.
#pragma once
#include <torch/csrc/stable/ops.h>

#include <bit>
#include <cstdint>
#include <cstring>

#include "common/dtype.h"

// One function, three machine codes, chosen when the library loads: baseline, x86-64-v3 (AVX2, FMA),
// x86-64-v4 (AVX-512). Everything the function calls must inline into it (NV_INLINE), or it runs at the
// baseline level.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define NV_MULTIVERSION __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4"), flatten))
#else
#define NV_MULTIVERSION
#endif
#define NV_INLINE inline __attribute__((always_inline))

namespace nanovllm::cpu {

constexpr int kVec = 16;  // fp32 lanes
typedef float Vec __attribute__((vector_size(kVec * 4), aligned(4)));
typedef uint32_t VecU32 __attribute__((vector_size(kVec * 4), aligned(4)));
typedef int32_t VecI32 __attribute__((vector_size(kVec * 4), aligned(4)));
typedef uint16_t VecU16 __attribute__((vector_size(kVec * 2), aligned(2)));

struct BFloat16 {
  uint16_t bits;
};

NV_INLINE float to_float(float x) { return x; }
NV_INLINE float to_float(BFloat16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

/// Round to nearest even; NaN stays NaN.
NV_INLINE void store(float* p, float x) { *p = x; }
NV_INLINE void store(BFloat16* p, float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  p->bits = static_cast<uint16_t>(x != x ? 0x7fc0u : rounded);
}

NV_INLINE Vec load_vec(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
NV_INLINE Vec load_vec(const BFloat16* p) {
  VecU16 h;
  std::memcpy(&h, p, sizeof h);
  return std::bit_cast<Vec>(__builtin_convertvector(h, VecU32) << 16);
}
NV_INLINE void store_vec(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
NV_INLINE void store_vec(BFloat16* p, Vec v) {
  const VecU32 u = std::bit_cast<VecU32>(v);
  const VecU32 rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const VecU32 nan = std::bit_cast<VecU32>(v != v);
  const VecU16 h = __builtin_convertvector((nan & 0x7fc0u) | (~nan & rounded), VecU16);
  std::memcpy(p, &h, sizeof h);
}

NV_INLINE float sum(Vec v) {
  float s[kVec];
  std::memcpy(s, &v, sizeof v);
  for (int width = kVec / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) s[i] += s[i + width];
  return s[0];
}

/// Calls `f` with a null pointer of the C++ type of `dtype` (float or BFloat16).
template <class F>
NV_INLINE void dispatch(DType dtype, F const& f) {
  dtype == DType::kFloat32 ? f(static_cast<float*>(nullptr)) : f(static_cast<BFloat16*>(nullptr));
}

}  // namespace nanovllm::cpu
