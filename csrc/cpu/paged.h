// What decode and prefill attention share on CPU: block tables checked and followed, work handed out one item
// at a time.
#pragma once
#include <algorithm>
#include <atomic>

#include "common/check.h"
#include "cpu/e4m3.h"

namespace nanovllm::cpu {

/// Decode computes a context in tiles of this many tokens and merges them in order, so a result does not
/// depend on how the tiles were spread over threads.
constexpr int64_t kDecodeTile = 256;
/// At most this many sequences of a batch are split over threads, which bounds the workspace.
constexpr int64_t kMaxSplitSeqs = 16;

inline int64_t decode_tiles(int64_t context_len) {
  return std::max<int64_t>(1, (context_len + kDecodeTile - 1) / kDecodeTile);
}

/// Every block id that a context of the batch uses is in the cache.
inline void check_block_tables(const char* op, const int32_t* tables, int64_t stride_row,
                               const int32_t* context_lens, int64_t batch, int64_t max_blocks,
                               int64_t num_blocks, int64_t block_size) {
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t used = (static_cast<int64_t>(context_lens[b]) + block_size - 1) / block_size;
    ops::check(context_lens[b] >= 0 && used <= max_blocks, op, "context_lens", "expected 0 to ",
               max_blocks * block_size, " (", max_blocks, " blocks of ", block_size, "), got ",
               context_lens[b], " at [", b, "]");
    for (int64_t i = 0; i < used; ++i) {
      const int32_t id = tables[b * stride_row + i];
      if (id < 0 || id >= num_blocks)
        ops::check(false, op, "block_tables", "expected block ids 0 to ", num_blocks - 1,
                   " within the context of ", context_lens[b], " tokens, got ", id, " at [", b, ", ", i, "]");
    }
  }
}

/// Of an e4m3 cache.
inline float value_or_one(const float* scale) { return scale == nullptr ? 1.0f : *scale; }

/// Addresses of `count` tokens of one head from token `begin`, found through the block table.
template <class T>
NV_INLINE void find_rows(const T** rows, const T* head, int64_t stride_block, int64_t stride_slot,
                         const int32_t* table, int64_t block_size, int64_t begin, int64_t count) {
  int64_t block = begin / block_size, slot = begin % block_size;
  for (int64_t i = 0; i < count; ++block, slot = 0) {
    const T* row = head + table[block] * stride_block + slot * stride_slot;
    const int64_t end = std::min(count, i + block_size - slot);
    for (; i < end; ++i, row += stride_slot) rows[i] = row;
  }
}

/// Runs `worker(next)` on every thread, at most one for each item; `next++` is the worker's next item.
template <class Worker>
void parallel_items(int64_t num_items, Worker const& worker) {
  std::atomic<int64_t> next{0};
  const int64_t workers = std::min<int64_t>(num_items, torch::stable::get_num_threads());
  torch::stable::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) worker(next);
  });
}

}  // namespace nanovllm::cpu
