// Results of paged_attention_decode on their way out: merged over the warps of a block in shared memory, and
// over the blocks that share a head in the workspace.
//
// workspace: a counter for each block of the grid (of the head whose parts begin there; zero between
// launches), then [block][2][group][kResultRow] parts.
#pragma once
#include "common/mma.cuh"
#include "kernels/decode_tile.cuh"

namespace nanovllm::kernels::decode {

/// Floats of the workspace that hold a counter for each block of the grid, of a head whose parts begin there.
__host__ __device__ constexpr int64_t counters_numel(int num_blocks) { return (num_blocks + 3) / 4 * 4; }

/// A merge of result rows in progress: 4 neighbouring values of one head.
struct Merge {
  float m = -INFINITY, l = 0.0f;
  float4 o{0.0f, 0.0f, 0.0f, 0.0f};

  __device__ void add(float4 values, float2 stats) {
    const float top = fmaxf(m, stats.x);
    if (top == -INFINITY) return;  // nothing yet
    const float a = exp2_approx(m - top), b = exp2_approx(stats.x - top);
    m = top;
    l = l * a + stats.y * b;
    o = {o.x * a + values.x * b, o.y * a + values.y * b, o.z * a + values.z * b, o.w * a + values.w * b};
  }
};

/// Merges the warps' result rows in shared memory in order and hands each 4 values to store(row, d, merge).
template <int kDim, class Store>
__device__ void merge_warps(const float* results, int rows, int ways, Store const& store) {
  constexpr int kRow = kDim + 4, kQuads = kDim / 4;
  for (int i = threadIdx.x; i < rows * kQuads; i += kThreads) {
    const int row = i / kQuads, d = i % kQuads * 4;
    Merge merge;
#pragma unroll kWarps
    for (int w = 0; w < ways; ++w) {
      const float* from = results + (w * kHeads + row) * kRow;
      merge.add(*reinterpret_cast<const float4*>(from + d), *reinterpret_cast<const float2*>(from + kDim));
    }
    store(row, d, merge);
  }
}

/// Part of a head in the workspace: [group][kResultRow]. Block c has two: of the head that its range begins
/// inside of (0), and of the head that begins in its range and goes on in the next block's (1).
__device__ inline float* part(const Params& p, int64_t block, int which, int group, int result_row) {
  return p.workspace + counters_numel(gridDim.x) + (block * 2 + which) * group * result_row;
}

/// Merges the parts of a head, of blocks first to first + count - 1, to result rows, each in `ways` pieces.
template <int kDim>
__device__ int gather_parts(float* results, const Params& p, int first, int count, int group, int head,
                            int rows) {
  constexpr int kRow = kDim + 4, kUnroll = 8;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int ways = max(1, kWarps / rows);
  for (int slot = warp; slot < rows * ways; slot += kWarps) {
    const int row = slot / ways, way = slot % ways;
    for (int d = lane * 4; d < kDim; d += kWarp * 4) {
      Merge merge;
      for (int c = way; c < count; c += ways * kUnroll) {
        float4 values[kUnroll];
        float2 stats[kUnroll];
#pragma unroll
        for (int j = 0; j < kUnroll; ++j) {  // loads of all, then sums
          const int n = c + j * ways;
          const float* from = part(p, first + n, n == 0, group, kRow) + (head + row) * kRow;
          values[j] = n < count ? __ldcg(reinterpret_cast<const float4*>(from + d)) : float4{};
          stats[j] =
              n < count ? __ldcg(reinterpret_cast<const float2*>(from + kDim)) : float2{-INFINITY, 0.0f};
        }
#pragma unroll
        for (int j = 0; j < kUnroll; ++j) merge.add(values[j], stats[j]);
      }
      float* to = results + (way * kHeads + row) * kRow;
      *reinterpret_cast<float4*>(to + d) = merge.o;
      if (d == 0) *reinterpret_cast<float2*>(to + kDim) = {merge.m, merge.l};
    }
  }
  return ways;
}

/// Counts this block in, after all its writes (a barrier before) and before all it reads of others' (one
/// after); returns how many came earlier.
__device__ inline int arrive(int* counter) {
  int before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

}  // namespace nanovllm::kernels::decode
