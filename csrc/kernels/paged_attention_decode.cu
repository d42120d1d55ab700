// out[b, h] = softmax(scale * q[b, h] . K[b]^T) @ V[b] over a paged cache: one query token a sequence.
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
// Reads each cached key and value once: 2 * head_dim * num_kv_heads elements a token, and is bound by that.
// After flash decoding (Dao et al. 2023); the tile map after the scheduler of Tencent's HPC-Ops.
//
// Trusted: the plan is of these context_lens and these KV heads, block ids within a context are in the cache
// (the caller; checking would wait for the device). Checked below: block_size is a power of two from 16, rows
// are aligned to 16 bytes, the group is at most 16.
#include <cuda_fp8.h>

#include <array>
#include <atomic>

#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/pack.cuh"
#include "kernels/decode_split.cuh"
#include "kernels/paged_attention_decode.h"

namespace nanovllm::kernels {
namespace {

using Params = PagedAttentionDecodeParams;

constexpr int kWarp = 32, kWarps = 4, kThreads = kWarp * kWarps;
constexpr int kTokens = kTileTokens / kWarps;  // of a tile, that a warp owns: the rows of an mma
constexpr int kHeads = 8;                      // the columns of an mma
constexpr int kMaxDevices = 64;

/// Sizes in shared memory and workspace. A result row is head_dim weighted values (the sum of p v), their
/// maximum score m (in powers of two), the sum l of p = 2^(score - m), and two floats to keep 16-byte rows.
template <class Cache, int kDim>
struct Layout {
  static constexpr int kRowChunks = kDim * sizeof(Cache) / 16;
  static constexpr int kBufferBytes = kTokens * kDim * sizeof(Cache);  // keys of a warp's tokens, or values
  static constexpr int kResultRow = kDim + 4;                          // floats
  static constexpr int kResultBytes = kWarps * kHeads * kResultRow * 4;

  /// Two blocks fit an SM of 228 KB, and of 164 KB (sm_80), where head_dim allows.
  static constexpr int stages(int arch) {
    const int limit = arch >= 90 && arch < 120 ? 115712 : 82944;
    const int stages = (limit - kResultBytes - 16) / (kWarps * 2 * kBufferBytes);
    return stages < 1 ? 1 : stages > 8 ? 8 : stages;
  }
  static constexpr int smem_bytes(int arch) {
    return stages(arch) * kWarps * 2 * kBufferBytes + kResultBytes + 16;
  }
  /// What a row's columns are xored with: 8 rows of one column lie in different banks then.
  static __device__ constexpr int swizzle(int row) {
    constexpr int kShared = kRowChunks % 8 == 0 ? 8 : kRowChunks % 4 == 0 ? 4 : kRowChunks % 2 == 0 ? 2 : 1;
    return row / (8 / kShared) % kShared;
  }
  /// Byte of a 16-byte chunk in a buffer.
  static __device__ int chunk(int row, int column) {
    return (row * kRowChunks + (column ^ swizzle(row))) * 16;
  }
};

/// Floats of the workspace that hold a counter for each block of the grid, of a head whose parts begin there.
__host__ __device__ constexpr int64_t counters_numel(int num_blocks) { return (num_blocks + 3) / 4 * 4; }

/// A tile in the order of the split. `window` holds, in lane l, the context length of sequence first + l.
struct Cursor {
  int seq, head, tile, len;
  int first, window;

  __device__ int length(const Params& p, int b) {
    const int lane = threadIdx.x % kWarp;
    if (b >= first + kWarp) {
      first = b;
      window = b + lane < p.batch ? p.context_lens[b + lane] : 0;
    }
    return __shfl_sync(~0u, window, b - first);
  }
  __device__ bool ends_head() const { return (tile + 1) * kTileTokens >= len; }
  /// To the next tile; there is one.
  __device__ void advance(const Params& p) {
    if (!ends_head()) {
      ++tile;
      return;
    }
    tile = 0;
    if (++head < p.num_kv_heads) return;
    head = 0;
    do len = length(p, ++seq);
    while (len == 0 && seq + 1 < p.batch);
  }
};

/// Where a warp's 16 tokens of a tile are.
struct Rows {
  int block, slot, head;  // id and first slot in the cache, KV head
  int count;              // tokens within the context, at most 0: none
};

__device__ Rows find_rows(const Params& p, const Cursor& c, int warp) {
  const int token = c.tile * kTileTokens + warp * kTokens, shift = __ffsll(p.block_size) - 1;
  const int count = min(kTokens, c.len - token);
  const int32_t* table = p.block_tables + c.seq * p.table_stride_row;
  return {count > 0 ? table[token >> shift] : 0, token & ((1 << shift) - 1), c.head, count};
}

/// Copies keys or values of 16 tokens; zeros past the context, where the cache may hold NaN.
template <class Cache, int kDim>
__device__ void copy_rows(uint32_t buffer, const void* cache, int64_t stride_block, int64_t stride_slot,
                          int64_t stride_head, const Rows& rows) {
  using L = Layout<Cache, kDim>;
  constexpr int kChunks = kTokens * L::kRowChunks, kPack = 16 / sizeof(Cache);
  const int lane = threadIdx.x % kWarp;
  if (rows.count > 0) {
    const int first_row = lane / L::kRowChunks, first_column = lane % L::kRowChunks;
    const Cache* from = static_cast<const Cache*>(cache) + rows.block * stride_block +
                        rows.slot * stride_slot + rows.head * stride_head;
    if constexpr (kWarp % L::kRowChunks == 0) {  // a lane keeps its column
      constexpr int kStep = kWarp / L::kRowChunks;
      from += first_row * stride_slot + first_column * kPack;
      // The swizzle of first_row + row is the xor of both swizzles; buffers are aligned to 128 bytes.
      const uint32_t to = buffer + L::chunk(first_row, first_column);
#pragma unroll
      for (int row = 0; row < kTokens; row += kStep, from += kStep * stride_slot)
        cp_async_16((to ^ L::swizzle(row) * 16) + row * L::kRowChunks * 16, from,
                    first_row + row < rows.count);
    } else {
#pragma unroll
      for (int i = 0; i < kChunks; i += kWarp) {
        const int row = (i + lane) / L::kRowChunks, column = (i + lane) % L::kRowChunks;
        if (i + kWarp <= kChunks || i + lane < kChunks)
          cp_async_16(buffer + L::chunk(row, column), from + row * stride_slot + column * kPack,
                      row < rows.count);
      }
    }
  }
  cp_async_commit();
}

/// Four float8 of a register as two pairs of float16.
__device__ void widen(uint32_t x, uint32_t& low, uint32_t& high) {
  const __half2_raw a = __nv_cvt_fp8x2_to_halfraw2(x & 0xffff, __NV_E4M3);
  const __half2_raw b = __nv_cvt_fp8x2_to_halfraw2(x >> 16, __NV_E4M3);
  low = a.x | static_cast<uint32_t>(a.y) << 16;
  high = b.x | static_cast<uint32_t>(b.y) << 16;
}

/// Keys as the mma's rows, features 16 i to 16 i + 15 as its depth. A float8 register holds 4 neighbouring
/// features, so depth 2j, 2j + 1, 2j + 8, 2j + 9 is feature 4j to 4j + 3 then: load_queries does the same.
template <class Cache, int kDim>
__device__ void load_keys(uint32_t (&a)[4], uint32_t buffer, int i) {
  using L = Layout<Cache, kDim>;
  const int lane = threadIdx.x % kWarp;
  if constexpr (sizeof(Cache) == 2) {
    ldmatrix_x4(a, buffer + L::chunk(lane % 16, 2 * i + lane / 16));
  } else {
    uint32_t x[2];
    ldmatrix_x2(x, buffer + L::chunk(lane % 16, i));
    widen(x[0], a[0], a[2]);
    widen(x[1], a[1], a[3]);
  }
}

/// Features 16 i to 16 i + 15 of the values as the mma's rows, tokens as its depth. Row r is feature r; for
/// float8, whose pairs the transposing load keeps together, rows r and r + 8 are features 2 r and 2 r + 1.
template <class Cache, int kDim>
__device__ void load_values(uint32_t (&a)[4], uint32_t buffer, int i) {
  using L = Layout<Cache, kDim>;
  const int lane = threadIdx.x % kWarp;
  if constexpr (sizeof(Cache) == 2) {
    ldmatrix_x4_trans(a, buffer + L::chunk(lane % 8 + lane / 16 * 8, 2 * i + lane / 8 % 2));
  } else {
    uint32_t x[2];
    ldmatrix_x2_trans(x, buffer + L::chunk(lane % 16, i));
    widen(__byte_perm(x[0], 0, 0x3120), a[0], a[1]);
    widen(__byte_perm(x[1], 0, 0x3120), a[2], a[3]);
  }
}

template <class Out, class Cache>
using MmaType = std::conditional_t<sizeof(Cache) == 1, __half, Out>;

/// The group's queries as the mma's columns, zeros in columns past the group.
template <class Out, class Cache, int kDim, int kHeadTiles>
__device__ void load_queries(uint32_t (&q)[kHeadTiles][kDim / 16][2], const Params& p, int seq, int kv_head,
                             int group) {
  const int lane = threadIdx.x % kWarp;
  constexpr int kStep = sizeof(Cache) == 2 ? 8 : 2;  // from the first pair of features to the second
  const int first = lane % 4 * (sizeof(Cache) == 2 ? 2 : 4);
#pragma unroll
  for (int t = 0; t < kHeadTiles; ++t) {
    const int head = t * kHeads + lane / 4;
    const Out* from = static_cast<const Out*>(p.q) + seq * p.q_stride_row +
                      (static_cast<int64_t>(kv_head) * group + head) * p.q_stride_head + first;
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        uint32_t pair = 0;
        if (head < group) pair = *reinterpret_cast<const uint32_t*>(from + i * 16 + j * kStep);
        if constexpr (!std::is_same_v<Out, MmaType<Out, Cache>>) {  // bfloat16 to float16, saturating
          const float2 x = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair));
          constexpr float kMax = 65504.0f;
          pair = pack_pair<__half>(fminf(fmaxf(x.x, -kMax), kMax), fminf(fmaxf(x.y, -kMax), kMax));
        }
        q[t][i][j] = pair;
      }
  }
}

/// What a warp has of the current head. Lane l holds columns (heads) l % 4 * 2 and the next of each head
/// tile.
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
__device__ void merge_warps(const float* results, int rows, Store const& store) {
  constexpr int kRow = kDim + 4, kQuads = kDim / 4;
  for (int i = threadIdx.x; i < rows * kQuads; i += kThreads) {
    const int row = i / kQuads, d = i % kQuads * 4;
    Merge merge;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float* from = results + (w * kHeads + row) * kRow;
      merge.add(*reinterpret_cast<const float4*>(from + d), *reinterpret_cast<const float2*>(from + kDim));
    }
    store(row, d, merge);
  }
}

/// Part of a head in the workspace: [group][kResultRow]. Block c has two: of the head that its range begins
/// inside of (0), and of the head that begins in its range and goes on in the next block's (1).
__device__ float* part(const Params& p, int64_t block, int which, int group, int result_row) {
  return p.workspace + counters_numel(gridDim.x) + (block * 2 + which) * group * result_row;
}

/// Every warp merges a quarter of the parts of a head, of blocks first to first + count - 1, to its result
/// rows.
template <int kDim>
__device__ void gather_parts(float* results, const Params& p, int first, int count, int group, int head,
                             int rows) {
  constexpr int kRow = kDim + 4, kQuads = kDim / 4, kUnroll = 4;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  for (int i = lane; i < rows * kQuads; i += kWarp) {
    const int row = i / kQuads, d = i % kQuads * 4;
    Merge merge;
    for (int c = warp; c < count; c += kWarps * kUnroll) {
      float4 values[kUnroll];
      float2 stats[kUnroll];
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) {  // loads of all, then sums
        const int n = c + j * kWarps;
        const float* from = part(p, first + n, n == 0, group, kRow) + (head + row) * kRow;
        values[j] = n < count ? __ldcg(reinterpret_cast<const float4*>(from + d)) : float4{};
        stats[j] = n < count ? __ldcg(reinterpret_cast<const float2*>(from + kDim)) : float2{-INFINITY, 0.0f};
      }
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) merge.add(values[j], stats[j]);
    }
    float* to = results + (warp * kHeads + row) * kRow;
    *reinterpret_cast<float4*>(to + d) = merge.o;
    if (d == 0) *reinterpret_cast<float2*>(to + kDim) = {merge.m, merge.l};
  }
}

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

template <class Out, class Cache, int kDim, int kHeadTiles>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    paged_attention_decode_kernel(const __grid_constant__ Params p) {
#ifdef __CUDA_ARCH__
  using L = Layout<Cache, kDim>;
  constexpr int kStages = L::stages(__CUDA_ARCH__ / 10), kRow = L::kResultRow;
  constexpr int kPending = 2 * kStages - 1;  // copies younger than the one that a step waits for
  extern __shared__ __align__(128) char smem[];
  float* results = reinterpret_cast<float*>(smem + kStages * kWarps * 2 * L::kBufferBytes);
  int* is_last = reinterpret_cast<int*>(smem + L::smem_bytes(__CUDA_ARCH__ / 10) - 16);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const uint32_t ring = shared_address(smem) + warp * kStages * 2 * L::kBufferBytes;
  const int group = static_cast<int>(p.num_q_heads / p.num_kv_heads);

  wait_for_previous_grid();
  const int4 header = reinterpret_cast<const int4*>(p.plan)[0];
  const int4 start = reinterpret_cast<const int4*>(p.plan)[1 + blockIdx.x];
  const DecodeSplit split{header.x, header.y, header.z, 0};
  const int begin = split.begin(blockIdx.x), count = split.begin(blockIdx.x + 1) - begin;
  if (count == 0) {
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
    copy_rows<Cache, kDim>(ring + stage * 2 * L::kBufferBytes, p.k_cache, p.k_stride_block, p.k_stride_slot,
                           p.k_stride_head, rows);
  };
  const auto copy_values = [&](int stage, const Rows& rows) {
    copy_rows<Cache, kDim>(ring + (stage * 2 + 1) * L::kBufferBytes, p.v_cache, p.v_stride_block,
                           p.v_stride_slot, p.v_stride_head, rows);
  };
  {
    Rows rows[kStages];
#pragma unroll
    for (int s = 0; s < kStages; ++s) rows[s] = next_rows();
#pragma unroll
    for (int s = 0; s < kStages; ++s) {
      copy_keys(s, rows[s]);
      copy_values(s, rows[s]);
    }
  }
  launch_next_grid();
  const float scale = p.scale * 1.44269504f * (p.k_scale == nullptr ? 1.0f : *p.k_scale);
  const float v_scale = p.v_scale == nullptr ? 1.0f : *p.v_scale;
  zero_padding_rows<Out>(p);

  uint32_t q[kHeadTiles][kDim / 16][2];
  State<kDim, kHeadTiles> state;
  Rows next = next_rows();
  int first_tile = now.tile;  // of the current head in this block
  for (int i = 0, stage = 0; i < count; ++i) {
    if (i == 0 || now.tile == 0) {
      load_queries<Out, Cache, kDim, kHeadTiles>(q, p, now.seq, now.head, group);
      state.clear();
      first_tile = now.tile;
    }
    const int tokens = now.len - now.tile * kTileTokens - warp * kTokens;
    const uint32_t keys = ring + stage * 2 * L::kBufferBytes, values = keys + L::kBufferBytes;
    uint32_t weights[kHeadTiles][2];
    cp_async_wait<kPending>();
    __syncwarp();
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
    stage = stage + 1 == kStages ? 0 : stage + 1;

    const bool ends = now.ends_head();
    if (ends || i + 1 == count) {
      const bool whole = ends && first_tile == 0;
      Out* out = static_cast<Out*>(p.out) + now.seq * p.out_stride_row +
                 static_cast<int64_t>(now.head) * group * p.out_stride_head;
      for (int pass = 0;; ++pass) {  // 0: the warps' values; 1: the parts of all blocks, by the last to come
        const int num_tiles = (now.len + kTileTokens - 1) / kTileTokens;
        const int head_begin = begin + i - now.tile;
        const int first = split.owner(head_begin);
        const int parts = split.owner(head_begin + num_tiles - 1) - first + 1;
#pragma unroll
        for (int t = 0; t < kHeadTiles; ++t) {
          const int rows = min(kHeads, group - t * kHeads);
          if (pass == 0)
            state.template store<Cache>(results + warp * kHeads * kRow, t, rows);
          else
            gather_parts<kDim>(results, p, first, parts, group, t * kHeads, rows);
          __syncthreads();
          merge_warps<kDim>(results, rows, [&](int row, int d, const Merge& x) {
            const int head = t * kHeads + row;
            if (whole || pass == 1) {
              const float norm = v_scale / x.l;
              const uint2 pairs{pack_pair<Out>(x.o.x * norm, x.o.y * norm),
                                pack_pair<Out>(x.o.z * norm, x.o.w * norm)};
              *reinterpret_cast<uint2*>(out + head * p.out_stride_head + d) = pairs;
            } else {
              float* to = part(p, blockIdx.x, first_tile == 0, group, kRow) + head * kRow;
              *reinterpret_cast<float4*>(to + d) = x.o;
              if (d == 0) *reinterpret_cast<float2*>(to + kDim) = {x.m, x.l};
            }
          });
          __syncthreads();
        }
        if (whole || pass == 1) break;
        if (threadIdx.x == 0) {
          int* counter = reinterpret_cast<int*>(p.workspace) + first;
          __threadfence();
          *is_last = atomicAdd(counter, 1) == parts - 1;
          __threadfence();
          if (*is_last) *counter = 0;  // for the next launch
        }
        __syncthreads();
        if (!*is_last) break;
      }
    }
    if (i + 1 < count) now.advance(p);
  }
#endif
}

template <class Out, class Cache, int kDim, int kHeadTiles>
cudaError_t launch(const Params& p, int device, int num_blocks, cudaStream_t stream) {
  constexpr auto kKernel = paged_attention_decode_kernel<Out, Cache, kDim, kHeadTiles>;
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

template <class Out, class Cache, int kDim>
cudaError_t launch_group(const Params& p, int device, int num_blocks, cudaStream_t stream) {
  return p.num_q_heads / p.num_kv_heads <= kHeads
             ? launch<Out, Cache, kDim, 1>(p, device, num_blocks, stream)
             : launch<Out, Cache, kDim, 2>(p, device, num_blocks, stream);
}

template <class Out, class Cache>
cudaError_t launch_dim(const Params& p, int device, int num_blocks, cudaStream_t stream) {
  switch (p.head_dim) {
    case 64:
      return launch_group<Out, Cache, 64>(p, device, num_blocks, stream);
    case 80:
      return launch_group<Out, Cache, 80>(p, device, num_blocks, stream);
    case 96:
      return launch_group<Out, Cache, 96>(p, device, num_blocks, stream);
    case 128:
      return launch_group<Out, Cache, 128>(p, device, num_blocks, stream);
    case 256:
      return launch_group<Out, Cache, 256>(p, device, num_blocks, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

template <class Out>
cudaError_t launch_cache(const Params& p, int device, int num_blocks, cudaStream_t stream) {
  return p.cache_dtype == DType::kFloat8E4M3 ? launch_dim<Out, uint8_t>(p, device, num_blocks, stream)
                                             : launch_dim<Out, Out>(p, device, num_blocks, stream);
}

}  // namespace

int64_t decode_workspace_numel(int device, int64_t group, int64_t head_dim) {
  int blocks = 0;
  if (decode_grid(device, &blocks) != cudaSuccess) return 0;
  return counters_numel(blocks) + blocks * 2 * group * (head_dim + 4);
}

cudaError_t launch_paged_attention_decode(const Params& p, cudaStream_t stream) {
  int device = 0, num_blocks = 0;
  if (const cudaError_t status = cudaGetDevice(&device); status != cudaSuccess) return status;
  if (const cudaError_t status = decode_grid(device, &num_blocks); status != cudaSuccess) return status;
  return p.dtype == DType::kBFloat16 ? launch_cache<__nv_bfloat16>(p, device, num_blocks, stream)
                                     : launch_cache<__half>(p, device, num_blocks, stream);
}

}  // namespace nanovllm::kernels
