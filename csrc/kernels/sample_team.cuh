// The blocks of a row of `sample`, and what they do together: reductions and histograms, in an order that
// does not depend on timing.
#pragma once
#include "common/cluster.cuh"
#include "common/mma.cuh"
#include "common/reduce.cuh"

namespace nanovllm::kernels {

constexpr int kSampleThreads = 256, kSampleWarps = kSampleThreads / 32;
constexpr int kMaxTeam = 8;  // blocks
constexpr int kBins = 2048;  // of a histogram
constexpr uint32_t kAllLanes = 0xffffffff;

/// `p` in shared memory, by an address that a register holds: the compiler would compute it at each use.
template <class T>
__device__ T* by_register(T* p) {
  uint32_t address = shared_address(p);
  asm volatile("" : "+r"(address));
  return static_cast<T*>(__cvta_shared_to_generic(address));
}

/// Floats in their order as integers.
__device__ inline uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ inline float from_ordered(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}
/// A value of a token (or a group): the greater, the better; of equals, the lower token.
__device__ inline uint64_t ranked(float value, uint32_t token) {
  return static_cast<uint64_t>(ordered(value)) << 32 | ~token;
}
__device__ inline uint32_t token_of(uint64_t rank) { return ~static_cast<uint32_t>(rank); }

/// What a block tells the others of a row after reading its part.
struct Found {
  uint64_t best;   // ranked(-time, group) of its race
  float greatest;  // logit
  float anchor;    // times and weights are relative to 2^anchor
  float mass;      // sum of the weights
};

/// Two of each that the next call writes while slow threads may still read: no barrier between calls.
struct TeamShared {
  uint64_t warps[2][kSampleWarps];
  Found blocks[2][kMaxTeam];
  alignas(16) float groups[kSampleThreads];  // of all blocks
  uint32_t warp_counts[kSampleWarps];
  uint32_t bin, below;
  float found;
};

/// All threads call each method; all get the result.
struct Team {
  struct Bin {
    uint32_t index, below;  // `below`: counted in lower bins
  };

  TeamShared& shared;
  uint32_t (*histograms)[kBins];  // [2]
  const int rank, size;
  int block_round = 0, round = 0, histogram_round = 0;

  __device__ void sync() const {
    if (size == 1) return __syncthreads();
    cluster_arrive();
    cluster_wait();
  }

  template <class T, class Op>
  __device__ T reduce_block(T x, Op const& op) {
    T* warps = reinterpret_cast<T*>(shared.warps[block_round ^= 1]);
    const int lane = threadIdx.x % 32;
    x = reduce_lanes(x, op);
    if (lane == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    return reduce_lanes(warps[lane % kSampleWarps], op, kSampleWarps);
  }

  /// Tells all blocks the greatest of each group of threads; there are kSampleThreads groups in the team. The
  /// next exchange() makes them known.
  __device__ void send_groups(float own) const {
    own = reduce_lanes(own, Max{}, size);
    const int lane = threadIdx.x % size;  // writes to that block
    const int place = rank * (kSampleThreads / size) + threadIdx.x / size;
    in_block(shared.groups, lane)[place] = own;
  }
  /// The k-th greatest (from 1) of the groups.
  __device__ float kth_group(int k) const {
    const float own = shared.groups[threadIdx.x];
    int above = 0;  // or equal and earlier
#pragma unroll 4
    for (int i = 0; i < kSampleThreads; i += 4) {
      const float4 x = *reinterpret_cast<const float4*>(shared.groups + i);
      above += x.x > own || (x.x == own && i < static_cast<int>(threadIdx.x));
      above += x.y > own || (x.y == own && i + 1 < static_cast<int>(threadIdx.x));
      above += x.z > own || (x.z == own && i + 2 < static_cast<int>(threadIdx.x));
      above += x.w > own || (x.w == own && i + 3 < static_cast<int>(threadIdx.x));
    }
    if (above == k - 1) shared.found = own;
    __syncthreads();
    return shared.found;
  }

  /// Every block's `own`. [size]
  template <class T>
  __device__ const T* exchange(T own) {
    T* blocks = reinterpret_cast<T*>(shared.blocks[round ^= 1]);
    if (threadIdx.x < size) in_block(blocks, threadIdx.x)[rank] = own;
    sync();
    return blocks;
  }

  template <class T, class Op>
  __device__ T reduce(T x, Op const& op) {
    const T* blocks = exchange(reduce_block(x, op));
    x = blocks[0];
    for (int i = 1; i < size; ++i) x = op(x, blocks[i]);
    return x;
  }

  /// The bin with entry number `rank_of` (from 1), bins in rising order; for_bins(add) calls add(bin).
  template <class F>
  __device__ Bin find_bin(uint32_t rank_of, F const& for_bins) {
    constexpr int kOwn = kBins / kSampleThreads;
    uint32_t* histogram = histograms[histogram_round ^= 1];
    for (int i = threadIdx.x; i < kBins; i += kSampleThreads) histogram[i] = 0;
    __syncthreads();
    for_bins([&](uint32_t bin) { atomicAdd(histogram + bin, 1); });
    sync();
    uint32_t count[kOwn]{}, own = 0;
#pragma unroll 4
    for (int block = 0; block < size; ++block) {
      const uint4* counts = reinterpret_cast<const uint4*>(in_block(histogram, block) + kOwn * threadIdx.x);
#pragma unroll
      for (int i = 0; i < kOwn; i += 4) {
        const uint4 c = counts[i / 4];
        count[i] += c.x, count[i + 1] += c.y, count[i + 2] += c.z, count[i + 3] += c.w;
      }
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) own += count[i];
    uint32_t end = own;  // counted up to this thread's bins and in them
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const uint32_t before = __shfl_up_sync(kAllLanes, end, offset);
      if (lane >= offset) end += before;
    }
    if (lane == 31) shared.warp_counts[warp] = end;
    __syncthreads();
    for (int i = 0; i < warp; ++i) end += shared.warp_counts[i];
    uint32_t below = end - own;
    if (below < rank_of && rank_of <= end) {
      int bin = 0;
#pragma unroll
      for (int i = 0; i < kOwn - 1; ++i) {
        if (bin < i || rank_of <= below + count[i]) continue;
        below += count[i];
        ++bin;
      }
      shared.bin = kOwn * threadIdx.x + bin;
      shared.below = below;
    }
    __syncthreads();
    return {shared.bin, shared.below};
  }
};

}  // namespace nanovllm::kernels
