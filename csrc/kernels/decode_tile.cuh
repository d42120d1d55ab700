// Tiles of paged_attention_decode: which come in what order, how a warp copies its tokens of one to shared
// memory, and how it reads them as operands of mma.m16n8k16.
#pragma once
#include <cuda_fp8.h>

#include "common/convert.cuh"
#include "common/mma.cuh"
#include "common/pack.cuh"
#include "kernels/decode_split.cuh"
#include "kernels/paged_attention_decode.h"

namespace nanovllm::kernels::decode {

using Params = PagedAttentionDecodeParams;

constexpr int kWarp = 32, kWarps = 4, kThreads = kWarp * kWarps;
constexpr int kTokens = kTileTokens / kWarps;  // of a tile, that a warp owns: the rows of an mma
constexpr int kHeads = 8;                      // the columns of an mma
/// In flight in a block: two keep the memory busy; more lengthens the queue that every load waits in.
constexpr int kRingBytes = 65536;

/// Sizes in shared memory and workspace. A result row is head_dim weighted values (the sum of p v), their
/// maximum score m (in powers of two), the sum l of p = 2^(score - m), and two floats to keep 16-byte rows.
template <class Cache, int kDim>
struct Layout {
  static constexpr int kRowChunks = kDim * sizeof(Cache) / 16;
  static constexpr int kBufferBytes = kTokens * kDim * sizeof(Cache);  // keys of a warp's tokens, or values
  static constexpr int kResultRow = kDim + 4;                          // floats
  static constexpr int kResultBytes = kWarps * kHeads * kResultRow * 4;

  /// The ring takes kRingBytes, or less where two blocks would not fit an SM of 228 KB (of 164 KB: sm_80).
  static constexpr int stages(int arch) {
    const int limit = arch >= 90 && arch < 120 ? (233472 / kBlocksPerSm) - 1024 : 82944;
    const int room = limit - kResultBytes - 16 < kRingBytes ? limit - kResultBytes - 16 : kRingBytes;
    const int stages = room / (kWarps * 2 * kBufferBytes);
    return stages < 1 ? 1 : stages;
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

__device__ inline Rows find_rows(const Params& p, const Cursor& c, int warp) {
  const int token = c.tile * kTileTokens + warp * kTokens, shift = __ffsll(p.block_size) - 1;
  const int count = c.len - token;
  const int32_t* table = p.block_tables + c.seq * p.table_stride_row;
  return {count > 0 ? table[token >> shift] : 0, token & ((1 << shift) - 1), c.head, count};
}

/// Copies keys or values of 16 tokens; zeros past the context, where the cache may hold NaN, and for the
/// newest token unless `kNewest`.
template <class Cache, int kDim, bool kNewest>
__device__ void copy_rows(uint32_t buffer, const void* cache, int64_t stride_block, int64_t stride_slot,
                          int64_t stride_head, const Rows& rows) {
  using L = Layout<Cache, kDim>;
  constexpr int kChunks = kTokens * L::kRowChunks, kPack = 16 / sizeof(Cache);
  const int lane = threadIdx.x % kWarp;
  const int count = !kNewest && rows.count <= kTokens ? rows.count - 1 : rows.count;
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
        cp_async_16((to ^ L::swizzle(row) * 16) + row * L::kRowChunks * 16, from, first_row + row < count);
    } else {
#pragma unroll
      for (int i = 0; i < kChunks; i += kWarp) {
        const int row = (i + lane) / L::kRowChunks, column = (i + lane) % L::kRowChunks;
        if (i + kWarp <= kChunks || i + lane < kChunks)
          cp_async_16(buffer + L::chunk(row, column), from + row * stride_slot + column * kPack, row < count);
      }
    }
  }
  cp_async_commit();
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
    widen_e4m3(x[0], a[0], a[2]);
    widen_e4m3(x[1], a[1], a[3]);
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
    widen_e4m3(__byte_perm(x[0], 0, 0x3120), a[0], a[1]);
    widen_e4m3(__byte_perm(x[1], 0, 0x3120), a[2], a[3]);
  }
}

template <class Out, class Cache>
using MmaType = std::conditional_t<sizeof(Cache) == 1, __half, Out>;

/// Of a query, a lane holds the pairs of features first_feature + 16 i and first_feature + 16 i + kPairStep.
template <class Cache>
constexpr int kPairStep = sizeof(Cache) == 2 ? 8 : 2;
template <class Cache>
__device__ int first_feature() {
  return static_cast<int>(threadIdx.x) % 4 * (sizeof(Cache) == 2 ? 2 : 4);
}

/// The group's queries as the mma's columns, zeros in columns past the group.
template <class Out, class Cache, int kDim, int kHeadTiles>
__device__ void load_queries(uint32_t (&q)[kHeadTiles][kDim / 16][2], const Params& p, int seq, int kv_head,
                             int group) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int t = 0; t < kHeadTiles; ++t) {
    const int head = t * kHeads + lane / 4;
    const Out* from = static_cast<const Out*>(p.q) + seq * p.q_stride_row +
                      (static_cast<int64_t>(kv_head) * group + head) * p.q_stride_head +
                      first_feature<Cache>();
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        q[t][i][j] =
            head < group ? *reinterpret_cast<const uint32_t*>(from + i * 16 + j * kPairStep<Cache>) : 0;
  }
}

/// To the type that they are multiplied in: bfloat16 to float16, saturating, for a float8 cache.
template <class Out, class Cache, int kPairs>
__device__ void convert_queries(uint32_t (&pairs)[kPairs][2]) {
  if constexpr (!std::is_same_v<Out, MmaType<Out, Cache>>) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) pairs[i][j] = to_float16_pair(pairs[i][j]);
  }
}

}  // namespace nanovllm::kernels::decode
