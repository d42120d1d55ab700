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
  int half, dim, head_dim, lane, lanes;

  __device__ Head(const Rotary& r, int64_t size, int lane, int lanes)
      : half(r.dim / 2), dim(r.dim), head_dim(static_cast<int>(size)), lane(lane), lanes(lanes) {}

  /// First element of one of the two packs of pair i of this lane, or kNone.
  __device__ int at(int i, int side) const {
    const int pair = lane + i * lanes, rotated = half / kPack;
    if (pair < rotated) return pair * kPack + side * half;
    const int rest = (head_dim - dim) / kPack;
    const int pack = pair - rotated + side * ((rest + 1) / 2);
    return pair - rotated < (rest + 1) / 2 && pack < rest ? dim + pack * kPack : kNone;
  }
  __device__ bool rotates(int i) const { return (lane + i * lanes) * kPack < half; }

  /// f(packs of pair i side s, first element of it)
  template <class F>
  __device__ void for_packs(F const& f) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
#pragma unroll
      for (int side = 0; side < 2; ++side)
        if (const int element = at(i, side); element != kNone) f(packs[i][side], element);
  }

  __device__ void load(const T* x) {
    for_packs([&](Packed& pack, int element) { pack = Packed::load(x + element); });
  }
  __device__ void store(T* x) {
    for_packs([&](Packed& pack, int element) { pack.store(x + element); });
  }

  /// x / rms(x) * weight where there is a weight, then the rotation; fp32 inside, rounded once.
  __device__ void norm_and_rotate(const T* weight, float eps, const float* cos_sin) {
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
        const int element = at(i, side);
        if (element == kNone) continue;
        Packed w;
        if (weight != nullptr) w = Packed::load(weight + element);
#pragma unroll
        for (int j = 0; j < kPack; ++j) {
          x[side][j] = to_float(packs[i][side].data[j]);
          if (weight != nullptr) x[side][j] = x[side][j] * scale * to_float(w.data[j]);
        }
      }
      if (rotates(i)) {
        float cos[kPack], sin[kPack];
        load_floats(cos, cos_sin + at(i, 0));
        load_floats(sin, cos_sin + half + at(i, 0));
#pragma unroll
        for (int j = 0; j < kPack; ++j) {
          const float first = x[0][j], second = x[1][j];
          x[0][j] = first * cos[j] - second * sin[j];
          x[1][j] = second * cos[j] + first * sin[j];
        }
      }
#pragma unroll
      for (int side = 0; side < 2; ++side)
        if (at(i, side) != kNone) packs[i][side] = rounded<T>(x[side]);
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
