// out[m, n] = sum_k x[m, k] * weight[n, k] + bias[n], m < 16; fp32 sums, rounded once.
//
// Bound by reading the weight once. Tensor cores do the sums (m16n8k16, rows of x on M, rows of the weight on
// N), not for their rate but because they leave few instructions beside the loads: a lane loads 16 bytes of
// a weight row, k .. k + 8, and those are its operands of two MMAs as they lie. That permutes k inside each
// 32, the same way in x and weight, which a sum does not see.
//
// A block owns kTiles * 8 rows of the weight; its 8 warps take its k in turns of 32, and add up through
// shared memory in the order of their index. So the order of a sum depends on k alone: a row's result is
// bitwise the same with any other rows, and with any kTiles. The launcher takes the most rows a block (x is
// read once a block) that still spread evenly over the multiprocessors. The weight's first loads are
// prefetched into L2 while the previous kernel ends: L2 is coherent, so a weight that it writes is read
// right. Where there are few waves of blocks, each also prefetches the rows of the one that is to follow it
// on its multiprocessor; in a long run of them the other blocks keep the memory busy.
//
// Trusted: out overlaps no input (the caller), num_rows <= kSkinnyMaxRows (ops/skinny_linear.cpp).
#include <algorithm>

#include "common/convert.cuh"
#include "common/launch.cuh"
#include "common/prefetch.cuh"
#include "kernels/skinny_linear.h"

namespace nanovllm::kernels {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kStep = 32;              // of k, for a warp
constexpr int kPrefetchBlocks = 1024;  // later ones start long after the previous kernel's end
constexpr int kPrefetchWaves = 4;      // of blocks that prefetch for their followers

/// Loads of a lane, in flight, and blocks a multiprocessor. Two tiles are for weights that fill it with three
/// blocks at once.
constexpr int loads(int tiles) { return tiles == 2 ? 8 : 16; }
constexpr int blocks_per_sm(int tiles) { return tiles == 2 ? 3 : 2; }

using Operand = uint32_t[4];  // 8 elements of a row

/// Streamed: the weight must not push x out of L1.
__device__ void load_weight(Operand& to, const void* from) {
  asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "l"(from));
}
__device__ void load_x(Operand& to, const void* from) {
  const uint4 v = *static_cast<const uint4*>(from);
  to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}
template <class T>
__device__ void load_elements(Operand& to, const T* row, int64_t k, int64_t end) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t bits = k + i < end ? reinterpret_cast<const uint16_t*>(row)[k + i] : 0;
    to[i / 2] = i % 2 == 0 ? bits : to[i / 2] | bits << 16;
  }
}
__device__ void clear(Operand& to) { to[0] = to[1] = to[2] = to[3] = 0; }

template <class T, int kTiles, bool kAligned>
__global__ void __launch_bounds__(kThreads, blocks_per_sm(kTiles))
    skinny_linear_kernel(const SkinnyLinearParams p, int64_t rows_ahead /* 0: no prefetch */) {
  constexpr int kUnroll = loads(kTiles) / kTiles;
  constexpr int kRows = 8 * kTiles;                      // of the weight
  constexpr int kPitch = kRows + (kTiles == 1 ? 0 : 8);  // no bank conflicts
  __shared__ float sums[kWarps][kSkinnyMaxRows][kPitch];
  launch_next_grid();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = lane / 4;  // of a tile, and of x (and row + 8)
  const int64_t lane_k = lane % 4 * 8;
  const int64_t first_n = static_cast<int64_t>(blockIdx.x) * kRows;
  const int64_t steps = (p.k + kStep - 1) / kStep;
  const T* weight[kTiles];
#pragma unroll
  for (int j = 0; j < kTiles; ++j)  // past the end: the last row once more
    weight[j] = static_cast<const T*>(p.weight) + min(first_n + 8 * j + row, p.n - 1) * p.weight_stride_row;
  if (blockIdx.x < kPrefetchBlocks) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t k = (warp + u * kWarps) * kStep + lane_k;
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
        if (k < p.k) asm volatile("prefetch.global.L2 [%0];" ::"l"(weight[j] + k));
    }
  }
  wait_for_previous_grid();
  if constexpr (kAligned) {
    const int64_t ahead = first_n + rows_ahead;
    if (rows_ahead > 0 && threadIdx.x < kRows && ahead + threadIdx.x < p.n)
      prefetch_bulk(static_cast<const T*>(p.weight) + (ahead + threadIdx.x) * p.weight_stride_row,
                    p.k * sizeof(T));
  }

  const T* x = static_cast<const T*>(p.x);
  const T* x_low = row < p.num_rows ? x + row * p.x_stride_row : nullptr;
  const T* x_high = row + 8 < p.num_rows ? x + (row + 8) * p.x_stride_row : nullptr;
  float acc[kTiles][4] = {};
  for (int64_t base = warp; base < steps; base += kUnroll * kWarps) {
    Operand w[kUnroll][kTiles];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t k = (base + u * kWarps) * kStep + lane_k;
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        if constexpr (kAligned) {
          if (k < p.k)
            load_weight(w[u][j], weight[j] + k);
          else
            clear(w[u][j]);
        } else {
          load_elements(w[u][j], weight[j], k, p.k);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t k = (base + u * kWarps) * kStep + lane_k;
      Operand low, high;
      clear(low), clear(high);
      if constexpr (kAligned) {
        if (x_low != nullptr && k < p.k) load_x(low, x_low + k);
        if (x_high != nullptr && k < p.k) load_x(high, x_high + k);
      } else {
        if (x_low != nullptr) load_elements(low, x_low, k, p.k);
        if (x_high != nullptr) load_elements(high, x_high, k, p.k);
      }
#pragma unroll
      for (int half = 0; half < 4; half += 2) {
        const uint32_t a[4] = {low[half], high[half], low[half + 1], high[half + 1]};
#pragma unroll
        for (int j = 0; j < kTiles; ++j) mma_16816<T>(acc[j], a, w[u][j][half], w[u][j][half + 1]);
      }
    }
  }

#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    float* to = &sums[warp][row][8 * j + lane % 4 * 2];
    to[0] = acc[j][0], to[1] = acc[j][1];
    to[8 * kPitch] = acc[j][2], to[8 * kPitch + 1] = acc[j][3];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < p.num_rows * kRows; i += kThreads) {
    const int m = i / kRows, n = i % kRows;
    if (first_n + n >= p.n) continue;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += sums[w][m][n];
    if (p.bias != nullptr) sum += to_float(static_cast<const T*>(p.bias)[first_n + n]);
    assign(static_cast<T*>(p.out)[m * p.out_stride_row + first_n + n], sum);
  }
}

template <class T, int kTiles>
cudaError_t launch(const SkinnyLinearParams& p, int64_t num_sms, cudaStream_t stream) {
  const bool aligned = p.k % 8 == 0 && is_aligned(p.x, {p.x_stride_row}, sizeof(T), 16) &&
                       is_aligned(p.weight, {p.weight_stride_row}, sizeof(T), 16);
  const auto kernel =
      aligned ? skinny_linear_kernel<T, kTiles, true> : skinny_linear_kernel<T, kTiles, false>;
  const dim3 blocks((p.n + 8 * kTiles - 1) / (8 * kTiles));
  const int64_t wave = num_sms * blocks_per_sm(kTiles) * 8 * kTiles;  // rows of the weight
  const int64_t rows_ahead = p.n <= kPrefetchWaves * wave ? wave : 0;
  return launch_pdl(kernel, blocks, kThreads, 0, stream, p, rows_ahead);
}

/// Tiles that the busiest multiprocessor reads, with `tiles` a block.
int64_t busiest(int64_t n, int64_t tiles, int64_t num_sms) {
  const int64_t blocks = (n + 8 * tiles - 1) / (8 * tiles);
  return (blocks + num_sms - 1) / num_sms * tiles;
}

}  // namespace

cudaError_t launch_skinny_linear(const SkinnyLinearParams& p, cudaStream_t stream) {
  int device = 0, num_sms = 0;
  if (const cudaError_t status = cudaGetDevice(&device); status != cudaSuccess) return status;
  const cudaError_t status = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess) return status;
  const int64_t best =
      std::min({busiest(p.n, 1, num_sms), busiest(p.n, 2, num_sms), busiest(p.n, 4, num_sms)});
  const auto evenly = [&](int64_t tiles) { return 10 * busiest(p.n, tiles, num_sms) <= 11 * best; };
  return dispatch(p.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    if (evenly(4)) return launch<T, 4>(p, num_sms, stream);
    return evenly(2) ? launch<T, 2>(p, num_sms, stream) : launch<T, 1>(p, num_sms, stream);
  });
}

}  // namespace nanovllm::kernels
