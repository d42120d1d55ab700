// out[b, h] = softmax(scale * q[b, h] . K[b]^T) @ V[b] over a paged cache: one query token a sequence. The
// kernel of paged_attention_decode, and of rope_attention_decode, which has the newest token of each sequence
// from a row of projections.
// q, out [batch, num_q_heads, head_dim] bfloat16 or float16; caches [num_blocks, block_size, num_kv_heads,
// head_dim] of that type, or float8_e4m3fn, which becomes float16 in registers.
//
// A grid of kBlocksPerSm blocks an SM walks the tiles that decode_plan gave each block (decode_split.cuh). A
// tile is 64 tokens of one KV head; each of the 4 warps owns 16 of them, in every tile, with its own ring of
// kStages buffers in shared memory, filled by cp.async across the borders of heads and sequences: no barrier
// until a block leaves a head. 16 tokens lie in one cache block, so a warp needs one block id for them,
// loaded a tile ahead. Tokens are the rows of the tensor-core products and the query heads of the group the
// columns (8, or 16 for groups over 8): S = K q^T, O^T += V^T P^T, P^T by movmatrix from S. A head's values
// of the 4 warps are merged in shared memory. If other blocks hold tiles of it, the merge goes to the
// workspace, and the last block to come merges all parts in the order of blocks (a counter tells who), so
// results do not depend on timing.
//
// With past_complete the first tiles are on their way before the previous kernel has ended, up to one whose
// newest token is read from the cache. A newest token that comes from a row of projections goes from
// registers into the tile, by the warp that owns it (decode_newest.cuh).
//
// Reads each cached key and value once: 2 * head_dim * num_kv_heads elements a token, and is bound by that.
// After flash decoding (Dao et al. 2023); the tile map after the scheduler of Tencent's HPC-Ops.
//
// Trusted: the plan is of these context_lens and these KV heads, block ids within a context are in the cache,
// past_complete keeps its promise (the caller; checking would wait for the device). Checked by the operator:
// block_size is a power of two from 16, rows are aligned to 16 bytes, the group is at most 16.
#pragma once
#include <array>
#include <atomic>

#include "common/launch.cuh"
#include "kernels/decode_merge.cuh"
#include "kernels/decode_newest.cuh"
#include "kernels/decode_state.cuh"

namespace nanovllm::kernels::decode {

constexpr int kMaxDevices = 64;

__host__ __device__ inline const Params& attention_of(const Params& p) { return p; }
__host__ __device__ inline const Params& attention_of(const RopeParams& p) { return p.attention; }

template <class Out>
__device__ void zero_padding_rows(const Params& p) {
  const int packs = static_cast<int>(p.head_dim) / 8;
  for (int64_t b = blockIdx.x; b < p.batch; b += gridDim.x) {
    if (p.context_lens[b] != 0) continue;
    for (int i = threadIdx.x; i < p.num_q_heads * packs; i += kThreads) {
      Out* row = static_cast<Out*>(p.out) + b * p.out_stride_row + i / packs * p.out_stride_head;
      *reinterpret_cast<uint4*>(row + i % packs * 8) = {0, 0, 0, 0};
    }
  }
}

/// AnyParams: Params or RopeParams.
template <class Out, class Cache, int kDim, int kHeadTiles, class AnyParams>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    paged_attention_decode_kernel(const __grid_constant__ AnyParams all) {
#ifdef __CUDA_ARCH__
  using L = Layout<Cache, kDim>;
  constexpr bool kRope = std::is_same_v<AnyParams, RopeParams>;
  const Params& p = attention_of(all);
  constexpr int kStages = L::stages(__CUDA_ARCH__ / 10), kRow = L::kResultRow;
  constexpr int kPending = 2 * kStages - 1;  // copies younger than the one that a step waits for
  extern __shared__ __align__(128) char smem[];
  float* results = reinterpret_cast<float*>(smem + kStages * kWarps * 2 * L::kBufferBytes);
  int* is_last = reinterpret_cast<int*>(smem + L::smem_bytes(__CUDA_ARCH__ / 10) - 16);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const uint32_t ring = shared_address(smem) + warp * kStages * 2 * L::kBufferBytes;
  const int group = static_cast<int>(p.num_q_heads / p.num_kv_heads);

  const int4* plan = reinterpret_cast<const int4*>(p.plan);
  if (!p.past_complete) wait_for_previous_grid();
  const int4 header = __ldcg(plan), start = __ldcg(plan + 1 + blockIdx.x);
  const DecodeSplit split{header.x, header.y, header.z, 0};
  const int begin = split.begin(blockIdx.x), count = split.begin(blockIdx.x + 1) - begin;
  if (count == 0) {
    wait_for_previous_grid();
    launch_next_grid();
    zero_padding_rows<Out>(p);
    return;
  }
  Cursor now{start.x, start.y, start.z, start.w, start.x, 0};
  now.window = now.seq + lane < p.batch ? p.context_lens[now.seq + lane] : 0;
  Cursor ahead = now;  // kStages tiles further
  int left = count;    // tiles from `ahead` on

  const auto next_rows = [&]() -> Rows {
    if (left == 0) return {};
    const Rows rows = find_rows(p, ahead, warp);
    if (--left > 0) ahead.advance(p);
    return rows;
  };
  const auto copy_keys = [&](int stage, const Rows& rows) {
    copy_rows<Cache, kDim, !kRope>(ring + stage * 2 * L::kBufferBytes, p.k_cache, p.k_stride_block,
                                   p.k_stride_slot, p.k_stride_head, rows);
  };
  const auto copy_values = [&](int stage, const Rows& rows) {
    copy_rows<Cache, kDim, !kRope>(ring + (stage * 2 + 1) * L::kBufferBytes, p.v_cache, p.v_stride_block,
                                   p.v_stride_slot, p.v_stride_head, rows);
  };
  {
    Rows rows[kStages];
#pragma unroll
    for (int s = 0; s < kStages; ++s) rows[s] = next_rows();
#pragma unroll
    for (int s = 0; s < kStages; ++s) {
      const bool has_newest = rows[s].count > 0 && rows[s].count <= kTokens;
      if (!kRope && has_newest) wait_for_previous_grid();
      copy_keys(s, rows[s]);
      copy_values(s, rows[s]);
    }
  }
  wait_for_previous_grid();
  const float scale = p.scale * 1.44269504f * (p.k_scale == nullptr ? 1.0f : *p.k_scale);
  const float v_scale = p.v_scale == nullptr ? 1.0f : *p.v_scale;
  zero_padding_rows<Out>(p);

  const auto write_out = [&](int seq, int kv_head, int head, int d, const Merge& x) {
    const float norm = v_scale / x.l;
    const uint2 pairs{pack_pair<Out>(x.o.x * norm, x.o.y * norm), pack_pair<Out>(x.o.z * norm, x.o.w * norm)};
    Out* row = static_cast<Out*>(p.out) + seq * p.out_stride_row +
               (static_cast<int64_t>(kv_head) * group + head) * p.out_stride_head;
    *reinterpret_cast<uint2*>(row + d) = pairs;
  };
  uint32_t q[kHeadTiles][kDim / 16][2];
  State<kDim, kHeadTiles> state;
  [[maybe_unused]] NewestToken<Out, Cache, kDim> newest;
  Rows next = next_rows();
  // The next kernel reads ahead: not before this block has asked for all that it reads.
  if (left == 0) launch_next_grid();
  int first_tile = now.tile;  // of the current head in this block
  for (int i = 0, stage = 0; i < count; ++i) {
    if (i == 0 || now.tile == 0) {
      load_queries<Out, Cache, kDim, kHeadTiles>(q, p, now.seq, now.head, group);
      if constexpr (kRope) {
        const int last = now.len - 1;
        const bool owns_newest =
            last / kTileTokens - now.tile < count - i && last % kTileTokens / kTokens == warp;
        if (owns_newest) newest.load(all, now);
        rotate_queries<Out, Cache, kDim, kHeadTiles>(q, all, last);
        if (owns_newest) newest.rotate(all);
      }
#pragma unroll
      for (int t = 0; t < kHeadTiles; ++t) convert_queries<Out, Cache>(q[t]);
      state.clear();
      first_tile = now.tile;
    }
    const int tokens = now.len - now.tile * kTileTokens - warp * kTokens;
    const uint32_t keys = ring + stage * 2 * L::kBufferBytes, values = keys + L::kBufferBytes;
    [[maybe_unused]] char* buffer = smem + (warp * kStages + stage) * 2 * L::kBufferBytes;
    [[maybe_unused]] const bool has_newest = tokens > 0 && tokens <= kTokens;
    uint32_t weights[kHeadTiles][2];
    cp_async_wait<kPending>();
    __syncwarp();
    if constexpr (kRope) {
      if (has_newest) {
        newest.store(newest.key, buffer, tokens - 1, p.k_cache, p.k_stride_block, p.k_stride_slot,
                     now.head * p.k_stride_head, p.k_scale);
        __syncwarp();
      }
    }
    if (tokens > 0) {
      float s[kHeadTiles][4] = {};
#pragma unroll
      for (int k = 0; k < kDim / 16; ++k) {
        uint32_t a[4];
        load_keys<Cache, kDim>(a, keys, k);
#pragma unroll
        for (int t = 0; t < kHeadTiles; ++t) mma_16816<MmaType<Out, Cache>>(s[t], a, q[t][k][0], q[t][k][1]);
      }
      state.template soften<MmaType<Out, Cache>>(weights, s, scale, tokens);
    }
    __syncwarp();
    copy_keys(stage, next);

    cp_async_wait<kPending>();
    __syncwarp();
    if constexpr (kRope) {
      if (has_newest) {
        newest.store(newest.value, buffer + L::kBufferBytes, tokens - 1, p.v_cache, p.v_stride_block,
                     p.v_stride_slot, now.head * p.v_stride_head, p.v_scale);
        __syncwarp();
      }
    }
    if (tokens > 0) {
#pragma unroll
      for (int d = 0; d < kDim / 16; ++d) {
        uint32_t a[4];
        load_values<Cache, kDim>(a, values, d);
#pragma unroll
        for (int t = 0; t < kHeadTiles; ++t)
          mma_16816<MmaType<Out, Cache>>(state.o[t][d], a, weights[t][0], weights[t][1]);
      }
    }
    __syncwarp();
    copy_values(stage, next);
    next = next_rows();
    if (left == 0) launch_next_grid();
    stage = stage + 1 == kStages ? 0 : stage + 1;

    const bool ends = now.ends_head();
    if (ends || i + 1 == count) {
      const bool whole = ends && first_tile == 0;
#pragma unroll
      for (int t = 0; t < kHeadTiles; ++t) {
        const int rows = min(kHeads, group - t * kHeads);
        state.template store<Cache>(results + warp * kHeads * kRow, t, rows);
        __syncthreads();
        merge_warps<kDim>(results, rows, kWarps, [&](int row, int d, const Merge& x) {
          const int head = t * kHeads + row;
          if (whole) {
            write_out(now.seq, now.head, head, d, x);
          } else {
            float* to = part(p, blockIdx.x, first_tile == 0, group, kRow) + head * kRow;
            *reinterpret_cast<float4*>(to + d) = x.o;
            if (d == 0) *reinterpret_cast<float2*>(to + kDim) = {x.m, x.l};
          }
        });
        __syncthreads();
      }
    }
    if (i + 1 < count) now.advance(p);
  }

  // Heads that this block shares: the one its range begins inside of, and the one that goes on after it.
  struct Shared {
    bool exists;
    int seq, head, first, parts;
  };
  const auto shared_head = [&](int which) -> Shared {
    const bool exists = which == 0 ? start.z != 0 : !now.ends_head() && first_tile == 0;
    if (!exists) return {};
    const int len = which == 0 ? start.w : now.len;
    const int head_begin = which == 0 ? begin - start.z : begin + count - 1 - now.tile;
    const int first = split.owner(head_begin);
    const int last = split.owner(head_begin + (len + kTileTokens - 1) / kTileTokens - 1);
    return {true, which == 0 ? start.x : now.seq, which == 0 ? start.y : now.head, first, last - first + 1};
  };
  if (threadIdx.x < 2) {
    const Shared s = shared_head(threadIdx.x);
    bool last = false;
    if (s.exists) {
      int* counter = reinterpret_cast<int*>(p.workspace) + s.first;
      last = arrive(counter) == s.parts - 1;
      if (last) *counter = 0;  // for the next launch
    }
    is_last[threadIdx.x] = last;
  }
  __syncthreads();
  for (int which = 0; which < 2; ++which) {
    if (!is_last[which]) continue;
    const Shared s = shared_head(which);
#pragma unroll
    for (int t = 0; t < kHeadTiles; ++t) {
      const int rows = min(kHeads, group - t * kHeads);
      const int ways = gather_parts<kDim>(results, p, s.first, s.parts, group, t * kHeads, rows);
      __syncthreads();
      merge_warps<kDim>(results, rows, ways, [&](int row, int d, const Merge& x) {
        write_out(s.seq, s.head, t * kHeads + row, d, x);
      });
      __syncthreads();
    }
  }
#endif
}

template <class Out, class Cache, int kDim, int kHeadTiles, class AnyParams>
cudaError_t launch(const AnyParams& p, int device, int num_blocks, cudaStream_t stream) {
  constexpr auto kKernel = paged_attention_decode_kernel<Out, Cache, kDim, kHeadTiles, AnyParams>;
  using L = Layout<Cache, kDim>;
  static std::array<std::atomic<int>, kMaxDevices>
      known_arch;  // that the kernel was compiled for; 0: not yet
  int arch = known_arch[device];
  if (arch == 0) {
    cudaFuncAttributes attributes;
    cudaError_t status = cudaFuncGetAttributes(&attributes, kKernel);
    if (status != cudaSuccess) return status;
    arch = attributes.ptxVersion;
    status = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, L::smem_bytes(arch));
    if (status != cudaSuccess) return status;
    known_arch[device] = arch;
  }
  return launch_pdl(kKernel, num_blocks, kThreads, L::smem_bytes(arch), stream, p);
}

template <class Out, class Cache, int kDim, class AnyParams>
cudaError_t launch_group(const AnyParams& p, int device, int num_blocks, cudaStream_t stream) {
  return attention_of(p).num_q_heads / attention_of(p).num_kv_heads <= kHeads
             ? launch<Out, Cache, kDim, 1>(p, device, num_blocks, stream)
             : launch<Out, Cache, kDim, 2>(p, device, num_blocks, stream);
}

template <class Out, class Cache, class AnyParams>
cudaError_t launch_dim(const AnyParams& p, int device, int num_blocks, cudaStream_t stream) {
  switch (attention_of(p).head_dim) {
    case 64:
      return launch_group<Out, Cache, 64>(p, device, num_blocks, stream);
    case 128:
      return launch_group<Out, Cache, 128>(p, device, num_blocks, stream);
  }
  if constexpr (std::is_same_v<AnyParams, Params>) {
    switch (p.head_dim) {
      case 80:
        return launch_group<Out, Cache, 80>(p, device, num_blocks, stream);
      case 96:
        return launch_group<Out, Cache, 96>(p, device, num_blocks, stream);
      case 256:
        return launch_group<Out, Cache, 256>(p, device, num_blocks, stream);
    }
  }
  return cudaErrorInvalidValue;
}

template <class Out, class AnyParams>
cudaError_t launch_cache(const AnyParams& p, int device, int num_blocks, cudaStream_t stream) {
  return attention_of(p).cache_dtype == DType::kFloat8E4M3
             ? launch_dim<Out, uint8_t>(p, device, num_blocks, stream)
             : launch_dim<Out, Out>(p, device, num_blocks, stream);
}

template <class AnyParams>
cudaError_t launch_on_device(const AnyParams& p, cudaStream_t stream) {
  int device = 0, num_blocks = 0;
  if (const cudaError_t status = cudaGetDevice(&device); status != cudaSuccess) return status;
  if (const cudaError_t status = decode_grid(device, &num_blocks); status != cudaSuccess) return status;
  return attention_of(p).dtype == DType::kBFloat16
             ? launch_cache<__nv_bfloat16>(p, device, num_blocks, stream)
             : launch_cache<__half>(p, device, num_blocks, stream);
}

}  // namespace nanovllm::kernels::decode
