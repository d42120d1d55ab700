// One attention head in the registers of a group of lanes: what rotary_embedding and qk_norm_rope_store
// share.
//
// A lane holds pairs of packs that rotate together: with half = rotary_dim / 2, pair j is the packs from
// elements j * kPack and half + j * kPack. The features past rotary_dim pass through; they are paired too,
// only to be spread over the lanes.
#pragma once
#include "common/convert.cuh"
#include "common/reduce.cuh"
#include "kernels/rotary.h"

namespace nanovllm::kernels {

constexpr int64_t kMaxHeadLanes = 32;

/// Packs of 8 when rotary_dim / 2 and head_dim allow, and the pointers (the caller looks).
inline bool head_fits_packs(const Rotary& r, int64_t head_dim, int64_t pack) {
  return r.dim % (2 * pack) == 0 && head_dim % pack == 0 && is_aligned(r.cos_sin, {r.dim}, 4, 16);
}

/// Lanes of a head: a power of two, one for each pair of packs, at most 32.
inline int head_lanes(int64_t head_dim, int64_t rotary_dim, int64_t pack) {
  const int64_t pairs = rotary_dim / 2 / pack + ((head_dim - rotary_dim) / pack + 1) / 2;
  int lanes = 1;
  while (lanes < pairs && lanes < kMaxHeadLanes) lanes *= 2;
  return lanes;
}

template <class T, int kPack>
struct Head {
  using Packed = Pack<T, kPack>;
  static constexpr int kPairs = kMaxHeadDim / (2 * kPack * kMaxHeadLanes);  // of a lane
  static constexpr int kNone = -1;

  Packed packs[kPairs][2];
  int first[kPairs][2];  // element of a pack, or kNone
  bool rotates[kPairs];
  int half, head_dim, lanes;

  __device__ Head(const Rotary& r, int64_t size, int lane, int lanes)
      : half(static_cast<int>(r.dim / 2)), head_dim(static_cast<int>(size)), lanes(lanes) {
    const int dim = static_cast<int>(r.dim), rotated = half / kPack, rest = (head_dim - dim) / kPack;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int pair = lane + i * lanes;
      rotates[i] = pair < rotated;
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int other = pair - rotated + side * ((rest + 1) / 2);  // pack of those past dim
        const bool has = pair - rotated < (rest + 1) / 2 && other < rest;
        first[i][side] = rotates[i] ? pair * kPack + side * half : (has ? dim + other * kPack : kNone);
      }
    }
  }

  /// f(packs of pair i side s, first element of it)
  template <class F>
  __device__ void for_packs(F const& f) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
#pragma unroll
      for (int side = 0; side < 2; ++side)
        if (first[i][side] != kNone) f(packs[i][side], first[i][side]);
  }

  __device__ void load(const T* x) {
    for_packs([&](Packed& pack, int element) { pack = Packed::load(x + element); });
  }
  __device__ void store(T* x) {
    for_packs([&](Packed& pack, int element) { pack.store(x + element); });
  }

  /// x / rms(x) * weight where there is a weight, then the rotation; fp32 inside, rounded once.
  __device__ void norm_and_rotate(const T* weight, float eps, const float* cos_sin) {
    Packed w[kPairs][2];
    float cos[kPairs][kPack], sin[kPairs][kPack];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {  // all loads before the first use
#pragma unroll
      for (int side = 0; side < 2; ++side)
        if (weight != nullptr && first[i][side] != kNone) w[i][side] = Packed::load(weight + first[i][side]);
      if (!rotates[i]) continue;
      load_floats(cos[i], cos_sin + first[i][0]);
      load_floats(sin[i], cos_sin + half + first[i][0]);
    }
    float scale = 1;
    if (weight != nullptr) {
      float squares = 0;
      for_packs([&](Packed& pack, int) {
#pragma unroll
        for (int j = 0; j < kPack; ++j) squares += to_float(pack.data[j]) * to_float(pack.data[j]);
      });
      scale = rsqrtf(reduce_lanes(squares, Sum{}, lanes) / static_cast<float>(head_dim) + eps);
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      float x[2][kPack];
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        if (first[i][side] == kNone) continue;
#pragma unroll
        for (int j = 0; j < kPack; ++j) {
          x[side][j] = to_float(packs[i][side].data[j]);
          if (weight != nullptr) x[side][j] = x[side][j] * scale * to_float(w[i][side].data[j]);
        }
      }
      if (rotates[i]) {
#pragma unroll
        for (int j = 0; j < kPack; ++j) {
          const float first = x[0][j], second = x[1][j];
          x[0][j] = first * cos[i][j] - second * sin[i][j];
          x[1][j] = second * cos[i][j] + first * sin[i][j];
        }
      }
#pragma unroll
      for (int side = 0; side < 2; ++side)
        if (first[i][side] != kNone) packs[i][side] = rounded<T>(x[side]);
    }
  }

  static __device__ void load_floats(float (&to)[kPack], const float* from) {
    constexpr int kFloats = kPack == 1 ? 1 : 4;
#pragma unroll
    for (int j = 0; j < kPack; j += kFloats) {
      const auto some = Pack<float, kFloats>::load(from + j);
#pragma unroll
      for (int i = 0; i < kFloats; ++i) to[j + i] = some.data[i];
    }
  }
};

}  // namespace nanovllm::kernels
