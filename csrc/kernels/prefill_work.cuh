// What the roles of paged_attention_prefill_sm90 share: sizes, the tiles of work and who gets them, and what
// lies in shared memory.
#pragma once
#include <cuda.h>

#include "common/ptx.cuh"
#include "kernels/paged_attention_prefill.cuh"

namespace nanovllm::kernels::prefill {

using Params = PagedAttentionPrefillParams;

constexpr int kConsumers = 2;           // warpgroups
constexpr int kRows = 64 * kConsumers;  // query tokens of a tile
constexpr int kKeys = 128;              // of a tile
constexpr int kStages = 2;              // of the rings of K and V
constexpr int kQueryStages = 2;         // of the ring of Q
constexpr int kWorkSlots = 2;           // of the ring of work
constexpr int kRowBytes = 128;          // of 64 columns: one swizzled row in shared memory

/// A tile of work; head -1: no more.
struct Work {
  int seq, head;
  int first_row, rows;  // of q and out
  int position;         // the context position of first_row
  int context;          // tokens of the sequence
  int first_key_row;    // packed: the row of k and v that holds the sequence's token 0
  __device__ int num_tiles() const { return (position + rows + kKeys - 1) / kKeys; }  // of keys
};

/// What the products are of: an e4m3 cache becomes float16.
template <class Out, class Cache>
using MmaType = std::conditional_t<sizeof(Cache) == 1, __half, Out>;

struct KernelParams {
  CUtensorMap q, k, v;  // k, v: not of an e4m3 cache
  Params op;
  int block_shift;  // packed: 30, all keys are one page
  int page_rows;    // keys of a box
  float scale_log2;
  bool out_aligned;  // to 16 bytes
};

template <int kHeadDim>
struct alignas(1024) Shared {
  static constexpr int kHalves = kHeadDim / 64;  // a tile is kHalves blocks of [rows][64 columns]
  uint8_t k[kStages][kKeys * kHeadDim * 2];
  uint8_t v[kStages][kKeys * kHeadDim * 2];
  uint8_t q[kQueryStages][kRows * kHeadDim * 2];
  Work work[kWorkSlots];
  uint64_t k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  uint64_t q_full[kQueryStages], q_empty[kQueryStages], work_full[kWorkSlots], work_empty[kWorkSlots];
};

// ---- work: tiles ordered by level, the longest first ----

/// Sequences of the lanes of one chunk of 32.
struct Lengths {
  int begin = 0, len = 0, context = 0;
  __device__ Lengths(const Params& p, int seq) {
    if (seq >= p.batch) return;
    begin = p.cu_seqlens_q[seq];
    len = p.cu_seqlens_q[seq + 1] - begin;
    context = p.block_tables == nullptr ? len : p.context_lens[seq];
  }
  /// A sequence has one tile a level in [bottom, top]; its work grows with the level.
  __device__ int bottom() const { return (context - len) / kRows; }
  __device__ int top() const { return len == 0 ? -1 : bottom() + (len - 1) / kRows; }
  __device__ bool has(int level) const { return level <= top() && level >= bottom(); }
};

/// A warp's walk over all work: items of one level are its sequences times heads.
class WorkList {
 public:
  __device__ explicit WorkList(const Params& p) : p_(p) { descend(); }

  /// Item `index` of the list; indices must not fall from call to call.
  __device__ Work find(int64_t index) {
    while (level_ >= 0 && index >= level_begin_ + count_) descend();
    if (level_ < 0) return {.head = -1};
    const int item = static_cast<int>(index - level_begin_);
    const int heads = static_cast<int>(p_.num_q_heads);
    int rank = item / heads;
    for (int base = 0;; base += 32) {
      const Lengths s(p_, base + lane_);
      const unsigned owners = __ballot_sync(~0u, s.has(level_));
      if (rank >= __popc(owners)) {
        rank -= __popc(owners);
        continue;
      }
      const int owner = __fns(owners, 0, rank + 1);
      const int tile = level_ - s.bottom();
      const Work mine{.seq = base + lane_,
                      .head = item % heads,
                      .first_row = s.begin + tile * kRows,
                      .rows = min(kRows, s.len - tile * kRows),
                      .position = s.context - s.len + tile * kRows,
                      .context = s.context,
                      .first_key_row = s.begin};
      return {.seq = base + owner,
              .head = mine.head,
              .first_row = __shfl_sync(~0u, mine.first_row, owner),
              .rows = __shfl_sync(~0u, mine.rows, owner),
              .position = __shfl_sync(~0u, mine.position, owner),
              .context = __shfl_sync(~0u, mine.context, owner),
              .first_key_row = __shfl_sync(~0u, mine.first_key_row, owner)};
    }
  }

 private:
  /// To the highest level below this one that has a tile; -1: none.
  __device__ void descend() {
    level_begin_ += count_;
    int below = -1;
    for (int base = 0; base < p_.batch; base += 32) {
      const Lengths s(p_, base + lane_);
      const int top = min(s.top(), level_ - 1);
      if (top >= s.bottom()) below = max(below, top);
    }
    level_ = __reduce_max_sync(~0u, below);
    int sequences = 0;
    for (int base = 0; base < p_.batch && level_ >= 0; base += 32)
      sequences += __popc(__ballot_sync(~0u, Lengths(p_, base + lane_).has(level_)));
    count_ = sequences * p_.num_q_heads;
  }

  const Params& p_;
  const int lane_ = threadIdx.x % 32;
  int level_ = INT32_MAX;
  int64_t level_begin_ = 0, count_ = 0;
};

template <int kHeadDim>
__device__ void deal_work(const Params& p, Shared<kHeadDim>& shared) {
  WorkList list(p);
  RingPosition<kWorkSlots> at;
  for (int round = 0;; ++round) {
    // Every other round runs backwards, so that no block gets the longest item of every round.
    const int place = round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
    const Work w = list.find(int64_t{round} * gridDim.x + place);
    mbarrier_wait(shared_address(&shared.work_empty[at.slot]), at.parity ^ 1);
    if (threadIdx.x % 32 == 0) {
      shared.work[at.slot] = w;
      mbarrier_arrive(shared_address(&shared.work_full[at.slot]));
    }
    if (w.head < 0) return;
    at.advance();
  }
}

}  // namespace nanovllm::kernels::prefill
