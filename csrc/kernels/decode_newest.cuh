// The newest token of a sequence in rope_attention_decode: its queries, key and value come from a row of
// projections, are normed and rotated in registers (in the arithmetic of head.cuh), and the key and value go
// to their slot in the cache and to a tile in shared memory.
#pragma once
#include "common/reduce.cuh"
#include "kernels/cache_slot.cuh"
#include "kernels/decode_tile.cuh"
#include "kernels/rope_attention_decode.h"

namespace nanovllm::kernels::decode {

using RopeParams = RopeAttentionDecodeParams;

/// All features rotate, and the pairs i and kDim / 2 + i are one lane's, of queries as of keys.
constexpr bool rotates_in_lanes(int64_t head_dim, int64_t rotary_dim) {
  return (head_dim == 64 || head_dim == 128) && rotary_dim == head_dim;
}

/// Queries as load_queries left them, normed and rotated.
template <class Out, class Cache, int kDim, int kHeadTiles>
__device__ void rotate_queries(uint32_t (&q)[kHeadTiles][kDim / 16][2], const RopeParams& r, int position) {
  constexpr int kHalf = kDim / 32, kStep = kPairStep<Cache>;
  const int first = first_feature<Cache>();
  const float* cos_sin = r.cos_sin + int64_t{position} * kDim + first;
  const Out* weight = static_cast<const Out*>(r.q_weight) + first;
  float2 cos[kHalf][2], sin[kHalf][2];
  uint32_t weights[2 * kHalf][2];
#pragma unroll
  for (int i = 0; i < kHalf; ++i)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      cos[i][j] = *reinterpret_cast<const float2*>(cos_sin + i * 16 + j * kStep);
      sin[i][j] = *reinterpret_cast<const float2*>(cos_sin + kDim / 2 + i * 16 + j * kStep);
    }
  if (r.q_weight != nullptr) {
#pragma unroll
    for (int i = 0; i < 2 * kHalf; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        weights[i][j] = *reinterpret_cast<const uint32_t*>(weight + i * 16 + j * kStep);
  }
#pragma unroll
  for (int t = 0; t < kHeadTiles; ++t) {
    float2 x[2 * kHalf][2];
    float squares = 0;
#pragma unroll
    for (int i = 0; i < 2 * kHalf; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        x[i][j] = to_float_pair<Out>(q[t][i][j]);
        squares += x[i][j].x * x[i][j].x + x[i][j].y * x[i][j].y;
      }
    if (r.q_weight != nullptr) {
      const float scale = rsqrtf(reduce_lanes(squares, Sum{}, 4) / kDim + r.eps);
#pragma unroll
      for (int i = 0; i < 2 * kHalf; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float2 w = to_float_pair<Out>(weights[i][j]);
          x[i][j] = {x[i][j].x * scale * w.x, x[i][j].y * scale * w.y};
        }
    }
#pragma unroll
    for (int i = 0; i < kHalf; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float2 a = x[i][j], b = x[i + kHalf][j], c = cos[i][j], s = sin[i][j];
        q[t][i][j] = pack_pair<Out>(a.x * c.x - b.x * s.x, a.y * c.y - b.y * s.y);
        q[t][i + kHalf][j] = pack_pair<Out>(b.x * c.x + a.x * s.x, b.y * c.y + a.y * s.y);
      }
  }
}

/// Key and value of a KV head's newest token, held by the warp whose rows of the last tile it is among: lane
/// l has features kEach * l to kEach * l + kEach - 1 of both halves of the head.
template <class Out, class Cache, int kDim>
struct NewestToken {
  static constexpr int kEach = kDim >= 64 ? kDim / 64 : 1;
  using Part = Pack<Out, kEach>;
  using Angles = Pack<float, kEach>;
  using L = Layout<Cache, kDim>;

  Part key[2], value[2], weight[2];
  Angles cos, sin;
  int block, slot;

  static __device__ int feature(int half) {
    return half * (kDim / 2) + static_cast<int>(threadIdx.x % kWarp) * kEach;
  }

  __device__ void load(const RopeParams& r, const Cursor& at) {
    const Params& p = r.attention;
    const int position = at.len - 1, shift = __ffsll(p.block_size) - 1;
    block = p.block_tables[at.seq * p.table_stride_row + (position >> shift)];
    slot = position & ((1 << shift) - 1);
    const Out* from =
        static_cast<const Out*>(p.q) + at.seq * p.q_stride_row + (p.num_q_heads + at.head) * kDim;
    const float* cos_sin = r.cos_sin + int64_t{position} * kDim;
    cos = Angles::load(cos_sin + feature(0));
    sin = Angles::load(cos_sin + feature(1));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      key[half] = Part::load(from + feature(half));
      value[half] = Part::load(from + p.num_kv_heads * kDim + feature(half));
      if (r.k_weight != nullptr)
        weight[half] = Part::load(static_cast<const Out*>(r.k_weight) + feature(half));
    }
  }

  __device__ void rotate(const RopeParams& r) {
    float x[2][kEach], squares = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        x[half][i] = to_float(key[half].data[i]);
        squares += x[half][i] * x[half][i];
      }
    if (r.k_weight != nullptr) {
      const float scale = rsqrtf(reduce_lanes(squares, Sum{}) / kDim + r.eps);
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < kEach; ++i) x[half][i] = x[half][i] * scale * to_float(weight[half].data[i]);
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const float first = x[0][i], second = x[1][i];
      x[0][i] = first * cos.data[i] - second * sin.data[i];
      x[1][i] = second * cos.data[i] + first * sin.data[i];
    }
    key[0] = rounded<Out>(x[0]);
    key[1] = rounded<Out>(x[1]);
  }

  /// `key` or `value` into a row of a warp's buffer and into a cache, `head` elements into its slot.
  __device__ void store(const Part (&parts)[2], char* buffer, int row, void* cache, int64_t stride_block,
                        int64_t stride_slot, int64_t head, const float* scale) const {
    const float divisor = scale == nullptr ? 1.0f : *scale;
    Cache* to = static_cast<Cache*>(cache) + block * stride_block + slot * stride_slot + head;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto part = to_cache<Cache>(parts[half], divisor);
      const int byte = feature(half) * static_cast<int>(sizeof(Cache));
      using Raw = typename Pack<Cache, kEach>::Raw;
      *reinterpret_cast<Raw*>(buffer + L::chunk(row, byte / 16) + byte % 16) = part.raw;
      part.store(to + feature(half));
    }
  }
};

}  // namespace nanovllm::kernels::decode
