// The warps of paged_attention_prefill_sm90 that bring queries, keys and values to shared memory: by tensor
// maps, or from an e4m3 cache through registers, as float16.
#pragma once
#include "common/convert.cuh"
#include "kernels/prefill_work.cuh"

namespace nanovllm::kernels::prefill {

/// A key tile on its way: what a lane of the loading warp knows of it.
struct KeyTile {
  int seq_first_key;  // packed: the row of k and v that holds the sequence's token 0
  int kv_head, first_key, context;
  int block;                 // cache block of the lane's page
  uint32_t to, full, empty;  // shared memory: the tile and its barriers
  uint32_t parity;           // of the wait for `empty`
};

/// A warp's walk over the key tiles (is_k) or the value tiles of its work: load(tile) for each. One warp
/// copies q too. `page`: that of the tile whose block the lane wants to know.
template <int kHeadDim, class Load>
__device__ void for_key_tiles(const KernelParams& p, Shared<kHeadDim>& shared, bool is_k, bool copies_q,
                              int page, Load const& load) {
  constexpr int kHalves = Shared<kHeadDim>::kHalves;
  const int lane = threadIdx.x % 32, group = p.op.num_q_heads / p.op.num_kv_heads;
  const uint32_t tiles = shared_address(is_k ? shared.k : shared.v);
  const uint32_t full = shared_address(is_k ? shared.k_full : shared.v_full);
  const uint32_t empty = shared_address(is_k ? shared.k_empty : shared.v_empty);
  const int first_of_page = page * p.page_rows;
  RingPosition<kWorkSlots> at;
  RingPosition<kStages> stage;
  RingPosition<kQueryStages> q_stage;
  for (;;) {
    mbarrier_wait(shared_address(&shared.work_full[at.slot]), at.parity);
    const Work w = shared.work[at.slot];
    mbarrier_arrive(shared_address(&shared.work_empty[at.slot]));
    at.advance();
    if (w.head < 0) return;
    if (copies_q) {
      const uint32_t q_full = shared_address(&shared.q_full[q_stage.slot]);
      mbarrier_wait(shared_address(&shared.q_empty[q_stage.slot]), q_stage.parity ^ 1);
      if (lane == 0) {
        mbarrier_arrive_expect(q_full, kRows * kHeadDim * 2);
        for (int i = 0; i < kHalves; ++i)
          tma_load_4d(shared_address(shared.q[q_stage.slot]) + i * kRows * kRowBytes, &p.q, q_full, i * 64,
                      w.first_row, w.head, 0);
      }
      q_stage.advance();
    }
    const int32_t* table = p.op.block_tables + w.seq * p.op.table_stride_row;
    auto block_of = [&](int tile) {
      const int key = tile * kKeys + first_of_page;
      const bool exists =
          p.op.block_tables != nullptr && tile >= 0 && first_of_page < kKeys && key < w.context;
      return exists ? table[key >> p.block_shift] : 0;
    };
    int block = block_of(w.num_tiles() - 1);
    for (int tile = w.num_tiles() - 1; tile >= 0; --tile) {
      const int next_block = block_of(tile - 1);
      load(KeyTile{.seq_first_key = w.first_key_row,
                   .kv_head = w.head / group,
                   .first_key = tile * kKeys,
                   .context = w.context,
                   .block = block,
                   .to = tiles + stage.slot * kKeys * kHeadDim * 2,
                   .full = full + stage.slot * 8,
                   .empty = empty + stage.slot * 8,
                   .parity = stage.parity ^ 1});
      block = next_block;
      stage.advance();
    }
  }
}

/// From a cache or packed rows of the queries' type.
template <int kHeadDim>
__device__ void copy_tiles(const KernelParams& p, Shared<kHeadDim>& shared, bool is_k) {
  constexpr int kHalves = Shared<kHeadDim>::kHalves;
  const CUtensorMap* map = is_k ? &p.k : &p.v;
  // A lane copies 64 columns of one page.
  const int lane = threadIdx.x % 32, page = lane / kHalves, half = lane % kHalves;
  const int first_of_page = page * p.page_rows;
  for_key_tiles(p, shared, is_k, is_k, page, [&](const KeyTile& t) {
    const int pages = min(kKeys, t.context - t.first_key + p.page_rows - 1) / p.page_rows;
    mbarrier_wait(t.empty, t.parity);
    if (lane == 0) mbarrier_arrive_expect(t.full, pages * p.page_rows * kHeadDim * 2);
    __syncwarp();
    if (page < pages) {
      const int key = t.first_key + first_of_page;
      const bool paged = p.op.block_tables != nullptr;
      const int row = paged ? key & ((1 << p.block_shift) - 1) : t.seq_first_key + key;
      tma_load_4d(t.to + half * kKeys * kRowBytes + first_of_page * kRowBytes, map, t.full, half * 64, row,
                  t.kv_head, t.block);
    }
    __syncwarp();
  });
}

/// From an e4m3 cache, to float16 at the places where a tensor map would swizzle them to: rows `first_row`
/// and the 63 after it, of each tile. Zeros past the context.
template <int kHeadDim>
__device__ void widen_tiles(const KernelParams& p, Shared<kHeadDim>& shared, bool is_k, int first_row) {
  constexpr int kRowLanes = kHeadDim / 16;                      // 16 bytes each
  constexpr int kAccessRows = 32 / kRowLanes;                   // of one access of the warp
  constexpr int kGroupRows = 16;                                // in one cache block
  constexpr int kGroup = kGroupRows / kAccessRows, kBatch = 8;  // accesses; kBatch in flight
  const int lane = threadIdx.x % 32, row_of_lane = lane / kRowLanes, pack = lane % kRowLanes;
  const int half = pack / 4, first_chunk = pack % 4 * 2;  // of 8 columns each
  const int page_shift = 31 - __clz(p.page_rows);
  const bool paged = p.op.block_tables != nullptr;
  const int64_t stride_block = is_k ? p.op.k_stride_block : p.op.v_stride_block;
  const int64_t stride_slot = is_k ? p.op.k_stride_slot : p.op.v_stride_slot;
  const int64_t stride_head = is_k ? p.op.k_stride_head : p.op.v_stride_head;
  const uint8_t* data =
      static_cast<const uint8_t*>(is_k ? p.op.k : p.op.v) + pack * 16 + row_of_lane * stride_slot;
  for_key_tiles(p, shared, is_k, is_k && first_row == 0, lane, [&](const KeyTile& t) {
    const uint8_t* of_head = data + t.kv_head * stride_head;
#pragma unroll 1
    for (int begin = first_row; begin < first_row + kKeys / 2; begin += kBatch * kAccessRows) {
      uint4 codes[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; i += kGroup) {
        const int row = begin + i * kAccessRows, key = t.first_key + row;
        const int block = __shfl_sync(~0u, t.block, row >> page_shift);
        const int slot = paged ? key & ((1 << p.block_shift) - 1) : t.seq_first_key + key;
        const uint8_t* rows = of_head + block * stride_block + slot * stride_slot;
#pragma unroll
        for (int j = 0; j < kGroup; ++j) {
          const bool exists = key + j * kAccessRows + row_of_lane < t.context;
          codes[i + j] = exists ? __ldg(reinterpret_cast<const uint4*>(rows)) : uint4{};
          rows += kAccessRows * stride_slot;
        }
      }
      if (begin == first_row) mbarrier_wait(t.empty, t.parity);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int row = begin + i * kAccessRows + row_of_lane;
        const uint32_t to = t.to + (half * kKeys + row) * kRowBytes;
        uint4 wide[2];
        widen_e4m3(codes[i].x, wide[0].x, wide[0].y);
        widen_e4m3(codes[i].y, wide[0].z, wide[0].w);
        widen_e4m3(codes[i].z, wide[1].x, wide[1].y);
        widen_e4m3(codes[i].w, wide[1].z, wide[1].w);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int chunk = j ^ half;  // the halves' lanes meet different banks
          store_shared(to + ((first_chunk + chunk) ^ row % 8) * 16, chunk == 0 ? wide[0] : wide[1]);
        }
      }
    }
    fence_async_shared();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(t.full);
  });
}

/// Queries of one warpgroup's 64 rows, bfloat16 to float16 in place, saturating. Ends with the warpgroup's
/// barrier.
template <int kHeadDim>
__device__ void queries_to_float16(uint8_t* q, int warpgroup, int barrier) {
#pragma unroll
  for (int half = 0; half < Shared<kHeadDim>::kHalves; ++half) {
    uint4* rows = reinterpret_cast<uint4*>(q + (half * kRows + warpgroup * 64) * kRowBytes);
#pragma unroll
    for (int i = threadIdx.x % 128; i < 64 * kRowBytes / 16; i += 128) {
      uint4 x = rows[i];
      for (uint32_t* pair : {&x.x, &x.y, &x.z, &x.w}) *pair = to_float16_pair(*pair);
      rows[i] = x;
    }
  }
  fence_async_shared();
  named_barrier_sync(barrier, 128);
}

}  // namespace nanovllm::kernels::prefill
