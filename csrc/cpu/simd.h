// What the CPU kernels share: fp32 vectors as GCC/Clang vector types (the compiler splits them to what the
// target has), loads and stores from float and bfloat16, and the macro that compiles one function for three
// x86-64 levels.
#pragma once
#include <torch/csrc/stable/ops.h>

#include <algorithm>
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

/// The first `n` < kVec elements, zeros after them; and their store. For the last part of a row.
template <class T>
NV_INLINE Vec load_part(const T* p, int64_t n) {
  T part[kVec] = {};
  std::memcpy(part, p, n * sizeof(T));
  return load_vec(part);
}
template <class T>
NV_INLINE void store_part(T* p, Vec v, int64_t n) {
  T part[kVec];
  store_vec(part, v);
  std::memcpy(p, part, n * sizeof(T));
}

NV_INLINE float sum(Vec v) {
  float s[kVec];
  std::memcpy(s, &v, sizeof v);
  for (int width = kVec / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) s[i] += s[i + width];
  return s[0];
}

/// e^x within 2 units in the last place over the whole range: 0 below -104, infinity above 89, NaN stays NaN.
NV_INLINE Vec exp(Vec x) {
  x = x < -104.0f ? Vec{} - 104.0f : x;
  x = x > 89.0f ? Vec{} + 89.0f : x;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const Vec shifted = x * 1.44269504f + kRound;
  const Vec n = shifted - kRound;
  const Vec r = (x - n * 0.693359375f) - n * -2.12194440e-4f;  // |r| <= ln(2) / 2; the first product is exact
  Vec p = r * (1.0f / 5040) + 1.0f / 720;                      // Taylor: the next term is below 2^-27
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r * r + r + 1.0f;
  const VecI32 i = std::bit_cast<VecI32>(shifted) - std::bit_cast<int32_t>(kRound);
  const VecI32 half = i >> 1;  // 2^i in two factors: i reaches 128 and, for subnormal results, -150
  return p * std::bit_cast<Vec>((half + 127) << 23) * std::bit_cast<Vec>((i - half + 127) << 23);
}

/// Runs body(begin, end) over rows of `row_elements` elements each; a thread gets at least some microseconds
/// of work, so a small problem stays on the calling thread.
template <class Body>
void parallel_rows(int64_t num_rows, int64_t row_elements, Body const& body) {
  constexpr int64_t kElementsPerThread = 16384;
  const int64_t grain = std::max<int64_t>(1, kElementsPerThread / std::max<int64_t>(1, row_elements));
  torch::stable::parallel_for(0, num_rows, grain, body);
}

/// Calls `f` with a null pointer of the C++ type of `dtype` (float or BFloat16).
template <class F>
NV_INLINE void dispatch(DType dtype, F const& f) {
  dtype == DType::kFloat32 ? f(static_cast<float*>(nullptr)) : f(static_cast<BFloat16*>(nullptr));
}

}  // namespace nanovllm::cpu
