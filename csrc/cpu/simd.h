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

// Without AVX-512 a Vec is no register and goes through the stack: there the operators that matter run in
// half vectors, in tiles that fit 16 registers.
typedef float HalfVec __attribute__((vector_size(kVec * 2), aligned(4)));
template <class V>
constexpr int kLanes = sizeof(V) / sizeof(float);
template <class V>
constexpr bool kIsWide = kLanes<V> == kVec;

inline bool has_wide_registers() {
#if defined(__x86_64__)
  static const bool has = __builtin_cpu_supports("avx512f");
  return has;
#else
  return false;
#endif
}

template <class Element, int kCount>
struct VectorType {
  typedef Element type __attribute__((vector_size(kCount * sizeof(Element)), aligned(sizeof(Element))));
};
/// As many elements as V, a Vec or HalfVec, has lanes.
template <class Element, class V>
using Same = typename VectorType<Element, kLanes<V>>::type;

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

template <class V = Vec>
NV_INLINE V load_vec(const float* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class V = Vec>
NV_INLINE V load_vec(const BFloat16* p) {
  Same<uint16_t, V> h;
  std::memcpy(&h, p, sizeof h);
  using U32 = Same<uint32_t, V>;
  return std::bit_cast<V>(__builtin_convertvector(h, U32) << 16);
}
template <class V>
NV_INLINE void store_vec(float* p, V v) {
  std::memcpy(p, &v, sizeof v);
}
template <class V>
NV_INLINE void store_vec(BFloat16* p, V v) {
  using U32 = Same<uint32_t, V>;
  using U16 = Same<uint16_t, V>;
  const U32 u = std::bit_cast<U32>(v);
  const U32 rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const U32 nan = std::bit_cast<U32>(v != v);
  const U16 h = __builtin_convertvector((nan & 0x7fc0u) | (~nan & rounded), U16);
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

// Lanes picked from two vectors of n: 0..n - 1 from a, n..2n - 1 from b.
#if defined(__clang__) || __GNUC__ >= 12
#define NV_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define NV_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, decltype((a) < (b)){__VA_ARGS__})
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

NV_INLINE float sum(HalfVec v) {
  const float quads[4] = {v[0] + v[4], v[1] + v[5], v[2] + v[6], v[3] + v[7]};
  return (quads[0] + quads[2]) + (quads[1] + quads[3]);
}

/// Lane i of the result, and lane i + 4, is the sum of v[i].
NV_INLINE HalfVec sums(HalfVec const (&v)[4]) {
  const auto add_pairs = [](HalfVec a, HalfVec b) {
    return NV_SHUFFLE(a, b, 0, 2, 8, 10, 4, 6, 12, 14) + NV_SHUFFLE(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
  };
  const HalfVec quads = add_pairs(add_pairs(v[0], v[1]), add_pairs(v[2], v[3]));
  return quads + NV_SHUFFLE(quads, quads, 4, 5, 6, 7, 0, 1, 2, 3);
}

NV_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }
NV_INLINE HalfVec max(HalfVec a, HalfVec b) { return a > b ? a : b; }

NV_INLINE float max(Vec v) {
  v = max(v, NV_SHUFFLE(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = max(v, NV_SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  v = max(v, NV_SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  v = max(v, NV_SHUFFLE(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
  return v[0];
}
NV_INLINE float max(HalfVec v) {
  v = max(v, NV_SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3));
  v = max(v, NV_SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5));
  v = max(v, NV_SHUFFLE(v, v, 1, 0, 3, 2, 5, 4, 7, 6));
  return v[0];
}

/// e^x within 2 units in the last place: 0 below -87.3 (a subnormal result costs a hundred cycles), infinity
/// above 89, NaN stays NaN.
template <class V>
NV_INLINE V exp(V x) {
  using I32 = Same<int32_t, V>;
  const auto tiny = x < -87.3f;
  x = tiny ? V{} : x;
  x = x > 89.0f ? V{} + 89.0f : x;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const V shifted = x * 1.44269504f + kRound;
  const V n = shifted - kRound;
  const V r = (x - n * 0.693359375f) - n * -2.12194440e-4f;  // |r| <= ln(2) / 2; the first product is exact
  V p = r * (1.0f / 5040) + 1.0f / 720;                      // Taylor: the next term is below 2^-27
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r * r + r + 1.0f;
  const I32 i = std::bit_cast<I32>(shifted) - std::bit_cast<int32_t>(kRound);
  const I32 half = i >> 1;  // 2^i in two factors: i reaches 128
  const V e = p * std::bit_cast<V>((half + 127) << 23) * std::bit_cast<V>((i - half + 127) << 23);
  return tiny ? V{} : e;
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
