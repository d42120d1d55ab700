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

// Lanes picked from two vectors: 0..15 from a, 16..31 from b.
#if defined(__clang__) || __GNUC__ >= 12
#define NV_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define NV_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, ::nanovllm::cpu::VecI32{__VA_ARGS__})
#endif

/// Adds lane i + kWidth to lane i within every group of 2 * kWidth lanes; the halves of `a`, then of `b`.
template <int kWidth>
NV_INLINE Vec fold(Vec a, Vec b) {
  if constexpr (kWidth == 8)
    return NV_SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           NV_SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  else if constexpr (kWidth == 4)
    return NV_SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           NV_SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  else if constexpr (kWidth == 2)
    return NV_SHUFFLE(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
           NV_SHUFFLE(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
  else
    return NV_SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           NV_SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

/// Lane i of the result is the sum of v[i % kCount]; kCount is 1, 2, 4, 8 or 16. The order of the additions
/// is that of one tree (lanes i and i + 8, then i + 4, ...) whatever kCount, so a sum never depends on its
/// company.
template <int kCount, int kWidth = kVec / 2>
NV_INLINE Vec sums(const Vec (&v)[kCount]) {
  constexpr int kHalf = kCount > 1 ? kCount / 2 : 1;
  Vec half[kHalf];
  for (int i = 0; i < kHalf; ++i) half[i] = fold<kWidth>(v[2 * i % kCount], v[(2 * i + 1) % kCount]);
  if constexpr (kWidth == 1)
    return half[0];
  else
    return sums<kHalf, kWidth / 2>(half);
}

NV_INLINE float sum(Vec v) { return sums<1>({v})[0]; }

NV_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }

NV_INLINE float max(Vec v) {
  v = max(v, NV_SHUFFLE(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = max(v, NV_SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  v = max(v, NV_SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  v = max(v, NV_SHUFFLE(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
  return v[0];
}

/// e^x within 2 units in the last place: 0 below -87.3 (a subnormal result costs a hundred cycles), infinity
/// above 89, NaN stays NaN.
NV_INLINE Vec exp(Vec x) {
  const auto tiny = x < -87.3f;
  x = tiny ? Vec{} : x;
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
  const VecI32 half = i >> 1;  // 2^i in two factors: i reaches 128
  const Vec e = p * std::bit_cast<Vec>((half + 127) << 23) * std::bit_cast<Vec>((i - half + 127) << 23);
  return tiny ? Vec{} : e;
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
