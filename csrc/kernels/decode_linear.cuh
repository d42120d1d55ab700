// y = x @ weight^T for 1 to 256 rows of x on Hopper's wgmma, and what an Epilogue makes of it: the kernel of
// decode_linear and decode_linear_add.
//
// The weight's rows are the 64 rows of wgmma and the tokens its columns. A cluster of `split` blocks owns a
// tile of kGroups * 64 weight rows by kTokens tokens, a block of it `1 / split` of k, so that the SMs share a
// short weight evenly. In a block one warp copies the weight and one x by tensor maps into rings of 64
// columns of k, and kGroups warpgroups multiply. At the end each block leaves its sums in its shared memory,
// and the blocks of the cluster each add up a share of the tokens, in the order of k: results do not depend
// on timing. Sums are fp32, rounded once.
//
// The ring of the weight is as deep as shared memory allows: with weight_complete it fills before the
// previous kernel has ended, and what is left after that is a pass over x. Reads the weight once from memory:
// bound by that, and by what an SM takes in, 2 * (k / split) * (weight rows + tokens) bytes.
//
// Where x is normed, it comes as residual * norm weight, and the third of the producer warps makes each
// token's 1 / rms of partial sums of squares (decode_linear.h), by which the sums are scaled.
//
// Trusted: outputs overlap no input, weight_complete keeps its promise (the caller). Checked by the
// operators: at most kDecodeLinearMaxRows rows, whose addresses are multiples of 16 bytes.
#pragma once
#include <cuda.h>

#include <algorithm>
#include <string_view>
#include <type_traits>

#include "common/cluster.cuh"
#include "common/convert.cuh"
#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "common/tensor_map.h"
#include "kernels/decode_linear_tile.cuh"

namespace nanovllm::kernels::decode_linear {

/// How a product is cut.
struct Tiling {
  int groups, tokens, split;
  int weight_stages, x_stages;

  int rows() const { return 64 * groups; }  // of the weight
  int smem_bytes() const {
    const int rings = (weight_stages * rows() + x_stages * tokens) * kRowBytes;
    return std::max(rings, tokens * (rows() + 4) * 4) + 1024;  // room to align
  }
};

/// A quad of one token's outputs.
struct Item {
  int token;   // of the tile
  int row;     // of the tile, in a part of the weight
  int64_t m;   // row of x
  int n;       // first output
  bool valid;  // has a token and a first output
};

/// sum + bias[n .. n + 4] rounded to T.
template <class T>
__device__ Pack<T, kQuad> with_bias(const float4& sum, const void* bias, int64_t n, bool whole, int count) {
  float y[kQuad] = {sum.x, sum.y, sum.z, sum.w};
  if (bias != nullptr) {
#pragma unroll
    for (int i = 0; i < kQuad; ++i)
      if (whole || i < count) y[i] += to_float(static_cast<const T*>(bias)[n + i]);
  }
  return rounded<T>(y);
}

/// This block's share of a tile: quads of the tokens [share * rank, share * (rank + 1)).
template <class T, int kTokens, int kGroups, int kSplit, class Epilogue>
struct Share {
  static constexpr int kParts = Epilogue::kParts, kQuads = kQuadsOfGroup * kGroups / kParts;
  static constexpr int kThreads = 128 * kGroups, kTokensOfBlock = kTokens / kSplit;
  static constexpr int kItems = (kTokensOfBlock * kQuads + kThreads - 1) / kThreads;
  Item items[kItems];
  typename Epilogue::template Early<T> early[kItems];

  /// What the epilogue reads of memory, on its way before the products begin.
  __device__ void start(const KernelParams& p, const typename Epilogue::Params& e, const Work& w, int rank) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int index = threadIdx.x + i * kThreads;
      const bool mine = index < kTokensOfBlock * kQuads;
      const int token = rank * kTokensOfBlock + (mine ? index / kQuads : 0), row = index % kQuads * kQuad;
      const int m = w.first_token + token, n = w.first_row + row;
      items[i] = {token, row, m, n, mine && m < p.num_rows && n < p.n};
      if (items[i].valid) early[i].load(p, e, items[i]);
    }
  }

  /// Sums over the cluster's blocks, to the epilogue.
  __device__ void finish(const KernelParams& p, const typename Epilogue::Params& e, float* sums,
                         const float* scales) {
    constexpr int kPitch = 64 * kGroups + 4;
    float4 parts[kSplit][kItems][kParts];
#pragma unroll
    for (int r = 0; r < kSplit; ++r) {
      const float* from = kSplit > 1 ? in_block(sums, r) : sums;
#pragma unroll
      for (int i = 0; i < kItems; ++i)
#pragma unroll
        for (int part = 0; part < kParts; ++part)
          parts[r][i][part] = *reinterpret_cast<const float4*>(from + items[i].token * kPitch + items[i].row +
                                                               part * (64 * kGroups / kParts));
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      Pack<T, kQuad> y[kParts];
      const float scale = p.squares.data == nullptr ? 1.0f : scales[items[i].token];
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        float4 sum = parts[0][i][part];
#pragma unroll
        for (int r = 1; r < kSplit; ++r) {
          const float4& more = parts[r][i][part];
          sum = {sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w};
        }
        sum = {sum.x * scale, sum.y * scale, sum.z * scale, sum.w * scale};
        const int left = p.n - items[i].n;
        y[part] = with_bias<T>(sum, p.bias, items[i].n + int64_t{part} * p.n, left >= kQuad, left);
      }
      Epilogue::template finish<T>(p, e, items[i], early[i], y);
    }
  }
};

template <class T, int kTokens, int kGroups, int kSplit, class Epilogue>
__global__ void __launch_bounds__(threads_of(kGroups), 1)
    decode_linear_kernel(const __grid_constant__ KernelParams p,
                         const __grid_constant__ typename Epilogue::Params e) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kWarps = 4 * kGroups, kParts = Epilogue::kParts, kRows = 64 * kGroups, kPitch = kRows + 4;
  extern __shared__ uint8_t shared_bytes[];
  __shared__ Barriers barriers;
  __shared__ float scales[kTokens];
  uint8_t* ring = shared_bytes + (1024 - shared_address(shared_bytes) % 1024) % 1024;
  const uint32_t weights = shared_address(ring), xs = weights + p.weight_stages * kRows * kRowBytes;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), rank = kSplit == 1 ? 0 : cluster_rank();
  const int tile = blockIdx.x / kSplit, first_chunk = p.chunks * rank / kSplit;
  const Work w{.first_row = tile / p.token_tiles * (kRows / kParts),
               .first_token = tile % p.token_tiles * kTokens,
               .first_chunk = first_chunk,
               .chunks = p.chunks * (rank + 1) / kSplit - first_chunk};
  if (threadIdx.x < kMaxStages) {
    mbarrier_init(shared_address(&barriers.weight_full[threadIdx.x]), 1);
    mbarrier_init(shared_address(&barriers.x_full[threadIdx.x]), 1);
    mbarrier_init(shared_address(&barriers.weight_empty[threadIdx.x]), kWarps);
    mbarrier_init(shared_address(&barriers.x_empty[threadIdx.x]), kWarps);
    mbarrier_init_fence();
  }
  __syncthreads();
  launch_next_grid();
  float* sums = reinterpret_cast<float*>(ring);  // [kTokens][kPitch], once the rings are done
  Share<T, kTokens, kGroups, kSplit, Epilogue> share;
  if (warp < kWarps) {
    wait_for_previous_grid();
    share.start(p, e, w, rank);
    Ring weight{p.weight_stages}, x{p.x_stages};
    float acc[kTokens / 2];
    multiply<T, kTokens, kGroups>(barriers, weights, xs, w.chunks, weight, x, acc);
    named_barrier_sync(1, 32 * kWarps);  // no warpgroup reads the rings any more
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, token = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i)
      sums[(i / 4 * 8 + token + i % 2) * kPitch + row + i % 4 / 2 * 8] = acc[i];
  } else if (warp == kWarps) {
    if (threadIdx.x % 32 == 0) {
      if (!p.weight_complete) wait_for_previous_grid();
      fill_ring(w, p.weight_stages, barriers.weight_full, barriers.weight_empty, kRows * kRowBytes,
                [&](int slot, int k, uint32_t barrier) {
#pragma unroll
                  for (int part = 0; part < kParts; ++part)
                    tma_load_2d(weights + (slot * kRows + part * (kRows / kParts)) * kRowBytes, &p.weight,
                                barrier, k, part * p.n + w.first_row);
                });
    }
    __syncwarp();
  } else if (warp == kWarps + 1) {
    if (threadIdx.x % 32 == 0) {
      prefetch_tensor_map(&p.x);
      wait_for_previous_grid();
      fill_ring(w, p.x_stages, barriers.x_full, barriers.x_empty, kTokens * kRowBytes,
                [&](int slot, int k, uint32_t barrier) {
                  tma_load_2d(xs + slot * kTokens * kRowBytes, &p.x, barrier, k, w.first_token);
                });
    }
    __syncwarp();
  } else if (p.squares.data != nullptr) {
    wait_for_previous_grid();
    norm_scales(p, w, scales, rank * (kTokens / kSplit), kTokens / kSplit);
  }
  if constexpr (kSplit > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
  if (warp < kWarps) share.finish(p, e, sums, scales);
  if constexpr (kSplit > 1) {  // nobody leaves while others read its sums
    cluster_arrive();
    cluster_wait();
  }
#endif
}

// ---- host ----

/// Enough blocks to give every SM work, by cutting k where the weight has few rows; and blocks small enough
/// for two an SM, so that the next kernel's weight fills its ring beside this one. A weight with more tiles
/// than that has tiles of kWideGroups, and an SM to each block.
inline Tiling choose_tiling(const DecodeLinearParams& p, int parts, bool may_be_wide, int num_sms) {
  constexpr int kHalfSm = 108 * 1024, kWholeSm = 216 * 1024;
  Tiling t{.groups = 1, .tokens = p.num_rows <= 16 ? 16 : p.num_rows <= 32 ? 32 : 64, .split = 1};
  const int64_t chunks = (p.k + kChunk - 1) / kChunk, token_tiles = (p.num_rows + t.tokens - 1) / t.tokens;
  const int64_t tiles = (p.n + t.rows() - 1) / t.rows() * token_tiles;
  if (may_be_wide && tiles > 2 * num_sms) t.groups = kWideGroups;
  const int64_t min_chunks = t.tokens == 64 ? 4 : 8;  // of a block; below, the exchange of sums costs more
  const int64_t max_blocks = token_tiles > 1 ? num_sms + num_sms / 2 : num_sms;
  while (t.split < kMaxSplit && 2 * t.split * tiles <= max_blocks && 2 * t.split * min_chunks <= chunks)
    t.split *= 2;
  const int of_block = static_cast<int>(std::min<int64_t>(kMaxStages, (chunks + t.split - 1) / t.split));
  const int room = (t.groups == 1 ? kHalfSm : kWholeSm) / kRowBytes;
  t.weight_stages = std::min(of_block, room / (t.rows() + t.tokens));
  t.x_stages = std::min(of_block, (room - t.weight_stages * t.rows()) / t.tokens);
  t.weight_stages = std::min(of_block, (room - t.x_stages * t.tokens) / t.rows());
  return t;
}

/// [rows, k], in boxes of `box_rows` rows and 64 columns. False: the driver takes no such map.
inline bool encode(CUtensorMap& map, DType dtype, const void* data, int64_t rows, int64_t k,
                   int64_t stride_row, int box_rows) {
  const auto encode_tiled = tensor_map_encoder();
  if (encode_tiled == nullptr) return false;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(k), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(rows == 1 ? k : stride_row) * 2};
  const cuuint32_t box[2] = {kChunk, static_cast<cuuint32_t>(box_rows)}, steps[2] = {1, 1};
  const auto type =
      dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return encode_tiled(&map, type, 2, const_cast<void*>(data), sizes, strides, box, steps,
                      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <class Epilogue, class T, int kTokens, int kGroups, int kSplit>
cudaError_t launch_kernel(const KernelParams& p, const typename Epilogue::Params& e, const Tiling& t,
                          cudaStream_t stream) {
  const auto kernel = decode_linear_kernel<T, kTokens, kGroups, kSplit, Epilogue>;
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, t.smem_bytes());
  if (status != cudaSuccess) return status;
  const int rows = 64 * kGroups / Epilogue::kParts;
  const int blocks = (p.n + rows - 1) / rows * p.token_tiles * kSplit;
  return launch_pdl_clusters(kernel, kSplit, blocks, threads_of(kGroups), t.smem_bytes(), stream, p, e);
}

template <class Epilogue, class T, int kTokens>
cudaError_t launch_tokens(const KernelParams& p, const typename Epilogue::Params& e, const Tiling& t,
                          cudaStream_t stream) {
  if constexpr (Epilogue::kMayBeWide)
    if (t.groups == kWideGroups) return launch_kernel<Epilogue, T, kTokens, kWideGroups, 1>(p, e, t, stream);
  switch (t.split) {
    case 1:
      return launch_kernel<Epilogue, T, kTokens, 1, 1>(p, e, t, stream);
    case 2:
      return launch_kernel<Epilogue, T, kTokens, 1, 2>(p, e, t, stream);
    case 4:
      return launch_kernel<Epilogue, T, kTokens, 1, 4>(p, e, t, stream);
    default:
      return launch_kernel<Epilogue, T, kTokens, 1, 8>(p, e, t, stream);
  }
}

/// Multiprocessors of the current device; 0 where this file has no kernel for it.
inline int num_hopper_sms() {
  constexpr bool kBuilt = std::string_view(NV_CUDA_ARCHS).find("9.0a") != std::string_view::npos;
  int device = 0, major = 0, num_sms = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  return kBuilt && major == 9 ? num_sms : 0;
}

/// But for what depends on how the product is cut.
inline KernelParams kernel_params(const DecodeLinearParams& p, int parts) {
  return {.bias = p.bias,
          .squares = p.squares,
          .num_rows = static_cast<int>(p.num_rows),
          .n = static_cast<int>(p.n / parts),
          .k = static_cast<int>(p.k),
          .chunks = static_cast<int>((p.k + kChunk - 1) / kChunk),
          .weight_complete = p.weight_complete};
}

template <class Epilogue>
cudaError_t launch(const DecodeLinearParams& p, const typename Epilogue::Params& e, int num_sms,
                   cudaStream_t stream) {
  const Tiling t = choose_tiling(p, Epilogue::kParts, Epilogue::kMayBeWide, num_sms);
  KernelParams kernel = kernel_params(p, Epilogue::kParts);
  kernel.token_tiles = static_cast<int>((p.num_rows + t.tokens - 1) / t.tokens);
  kernel.weight_stages = t.weight_stages;
  kernel.x_stages = t.x_stages;
  if (!encode(kernel.weight, p.dtype, p.weight, p.n, p.k, p.weight_stride_row, t.rows() / Epilogue::kParts) ||
      !encode(kernel.x, p.dtype, p.x, p.num_rows, p.k, p.x_stride_row, t.tokens))
    return cudaErrorNotSupported;
  return dispatch(p.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    if (t.tokens == 16) return launch_tokens<Epilogue, T, 16>(kernel, e, t, stream);
    return t.tokens == 32 ? launch_tokens<Epilogue, T, 32>(kernel, e, t, stream)
                          : launch_tokens<Epilogue, T, 64>(kernel, e, t, stream);
  });
}

}  // namespace nanovllm::kernels::decode_linear
