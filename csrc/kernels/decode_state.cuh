// What a warp of decode attention has of the head it is in: online softmax over its tokens.
#pragma once
#include "kernels/decode_tile.cuh"

namespace nanovllm::kernels::decode {

/// Maxima, sums and outputs. Lane l holds columns (heads) l % 4 * 2 and the next of each head tile.
template <int kDim, int kHeadTiles>
struct State {
  float m[kHeadTiles][2], l[kHeadTiles][2];  // l: over the lane's own tokens
  float o[kHeadTiles][kDim / 16][4];

  __device__ void clear() {
#pragma unroll
    for (int t = 0; t < kHeadTiles; ++t) {
      m[t][0] = m[t][1] = -INFINITY;
      l[t][0] = l[t][1] = 0.0f;
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) o[t][i][j] = 0.0f;
    }
  }

  /// Scores of 16 tokens to their weights p, as columns of the next mma's B; scales what was there before.
  template <class T>
  __device__ void soften(uint32_t (&weights)[kHeadTiles][2], float (&s)[kHeadTiles][4], float scale,
                         int count) {
    const int token = threadIdx.x % kWarp / 4;
#pragma unroll
    for (int t = 0; t < kHeadTiles; ++t) {
#pragma unroll
      for (int j = 0; j < 4; ++j) s[t][j] = token + j / 2 * 8 < count ? s[t][j] * scale : -INFINITY;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float top = fmaxf(s[t][h], s[t][h + 2]);
#pragma unroll
        for (int lanes = 4; lanes < kWarp; lanes *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, lanes));
        top = fmaxf(top, m[t][h]);
        const float kept = exp2_approx(m[t][h] - top);
        m[t][h] = top;
        s[t][h] = exp2_approx(s[t][h] - top);
        s[t][h + 2] = exp2_approx(s[t][h + 2] - top);
        l[t][h] = l[t][h] * kept + (s[t][h] + s[t][h + 2]);
#pragma unroll
        for (int i = 0; i < kDim / 16; ++i) {
          o[t][i][h] *= kept;
          o[t][i][h + 2] *= kept;
        }
      }
      weights[t][0] = movmatrix_trans(pack_pair<T>(s[t][0], s[t][1]));
      weights[t][1] = movmatrix_trans(pack_pair<T>(s[t][2], s[t][3]));
    }
  }

  /// The first `rows` heads of head tile t, to result rows.
  template <class Cache>
  __device__ void store(float* results, int t, int rows) {
    constexpr int kRow = Layout<Cache, kDim>::kResultRow;
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = l[t][h];
#pragma unroll
      for (int lanes = 4; lanes < kWarp; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
      const int head = lane % 4 * 2 + h;
      if (head >= rows) continue;
      float* row = results + head * kRow;
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i) {
        row[i * 16 + (sizeof(Cache) == 2 ? lane / 4 : lane / 4 * 2)] = o[t][i][h];
        row[i * 16 + (sizeof(Cache) == 2 ? lane / 4 + 8 : lane / 4 * 2 + 1)] = o[t][i][h + 2];
      }
      if (lane < 4) {
        row[kDim] = m[t][h];
        row[kDim + 1] = sum;
      }
    }
  }
};

}  // namespace nanovllm::kernels::decode
