// A block's part of a row of logits: read once as a stream, later again where it matters.
#pragma once
#include "common/convert.cuh"
#include "common/mma.cuh"
#include "common/philox.h"
#include "kernels/sample_team.cuh"

namespace nanovllm::kernels {

constexpr int kStepTokens = kGroupTokens;  // of a thread
constexpr int kIndexSize = 10;             // entries of a thread, see Slice::stream

/// The greatest; NaN only if all are.
template <int kSize>
__device__ float greatest_of(const float (&x)[kSize]) {
  float top[kSize / 2];
#pragma unroll
  for (int i = 0; i < kSize / 2; ++i) top[i] = fmaxf(x[2 * i], x[2 * i + 1]);
  if constexpr (kSize == 2)
    return top[0];
  else
    return greatest_of(top);
}

/// A step of a thread is a group of 8 tokens, one or two accesses of 16 bytes. A warp's threads share their
/// copies, so that each copies what lies next to its neighbours': a ring is a warp's.
template <class T>
struct Slice {
  static constexpr int kStages = 16 / sizeof(T);           // steps of a thread in the ring
  static constexpr int kAccess = 16 / sizeof(T);           // tokens
  static constexpr int kAccesses = kStepTokens / kAccess;  // of a step
  static constexpr int kBlockStep = kStepTokens * kSampleThreads;
  using Access = Pack<T, kAccess>;
  using Ring = uint4[kStages][kAccesses * kSampleThreads];
  using Index = float[kIndexSize][kSampleThreads];

  const T* row;     // [vocab]
  const T* logits;  // [tokens], from row + first
  uint32_t vocab;
  uint32_t first;  // token
  int tokens;
  int whole_steps;  // that every thread reads by whole, aligned accesses
  int steps;        // of this warp
  int index_shift;  // log2 of the steps of one entry of the index
  Ring& ring;       // shared memory
  Index& index;     // shared memory

  __device__ Slice(const T* row, int64_t vocab, int rank, int tokens_per_block, bool aligned, Ring& ring,
                   Index& index)
      : row(row), vocab(static_cast<uint32_t>(vocab)), ring(ring), index(index) {
    const int64_t start = int64_t{rank} * tokens_per_block;
    logits = row + start;
    first = static_cast<uint32_t>(start);
    tokens = static_cast<int>(max(int64_t{0}, min(int64_t{tokens_per_block}, vocab - start)));
    whole_steps = aligned ? tokens / kBlockStep : 0;
    const int warp_first = kStepTokens * (threadIdx.x & ~31u);
    steps = tokens > warp_first ? (tokens - warp_first - 1) / kBlockStep + 1 : 0;
    index_shift = 0;
    while ((tokens - 1) / kBlockStep >> index_shift >= kIndexSize) ++index_shift;
  }

  /// Of element j of a step, from the slice's first.
  __device__ int offset_of(int step, int j) const {
    return step * kBlockStep + kStepTokens * static_cast<int>(threadIdx.x) + j;
  }
  __device__ uint32_t token_of(int step, int j) const { return first + offset_of(step, j); }
  __device__ uint32_t group_of(int step) const { return token_of(step, 0) / kGroupTokens; }

  /// Starts the copies of the first steps.
  __device__ void start() const {
#pragma unroll 1
    for (int step = 0; step < kStages - 1; ++step) fetch(step, copied(step));
  }
  /// After start(): use(step, logits) for all steps. Logits past the end are -inf.
  template <class F>
  __device__ void stream(F const& use) const {
    const T* from = copied(kStages - 1);
    const uint4* own = by_register(&ring[0][kAccesses * threadIdx.x]);
#pragma unroll 1
    for (int step = 0; step < steps; ++step, from += kBlockStep) {
      cp_async_wait<kStages - 2>();
      __syncwarp();  // all lanes' copies are there, and all have taken the step before, whose place is free
      fetch(step + kStages - 1, from);
      Access access[kAccesses];
#pragma unroll
      for (int a = 0; a < kAccesses; ++a)
        access[a].raw = own[step % kStages * kAccesses * kSampleThreads + a];
      float x[kStepTokens];
      to_floats(x, access);
      use(step, x);
    }
  }

  /// Writes the index, by which revisit() skips what does not matter: the greatest logit of the steps of an
  /// entry. `top` is that of the entry so far.
  __device__ void note(int step, float& top, float top_of_step) const {
    const bool starts = (step & ((1 << index_shift) - 1)) == 0;
    top = starts ? top_of_step : fmaxf(top, top_of_step);
    index[step >> index_shift][threadIdx.x] = top;
  }

  /// After a stream with note(): use(step, logits) for the steps where may_matter(greatest logit), and some
  /// others.
  template <class P, class F>
  __device__ void revisit(P const& may_matter, F const& use) const {
    constexpr int kBatch = 4 / kAccesses;  // steps read at a time
    for (int base = 0; base < steps; base += kBatch) {
      Access access[kBatch][kAccesses];
      bool wanted[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int step = base + i;
        wanted[i] = step < steps && may_matter(index[step >> index_shift][threadIdx.x]);
        if (wanted[i]) read(access[i], step);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (!wanted[i]) continue;
        float x[kStepTokens];
        to_floats(x, access[i]);
        use(base + i, x);
      }
    }
  }

 private:
  static __device__ void to_floats(float (&x)[kStepTokens], const Access (&access)[kAccesses]) {
#pragma unroll
    for (int j = 0; j < kStepTokens; j += 2) {
      const Access& from = access[j / kAccess];
      if constexpr (sizeof(T) == 4) {
        x[j] = from.data[j % kAccess];
        x[j + 1] = from.data[j % kAccess + 1];
      } else {  // one instruction each; nvcc takes two from their data
        const float2 pair = to_float_pair<T>(reinterpret_cast<const uint32_t*>(&from.raw)[j / 2]);
        x[j] = pair.x;
        x[j + 1] = pair.y;
      }
    }
  }

  __device__ void read(Access (&access)[kAccesses], int step) const {
#pragma unroll
    for (int j = 0; j < kStepTokens; j += kAccess) {
      if (step < whole_steps) {
        access[j / kAccess] = Access::load(logits + offset_of(step, j));
        continue;
      }
#pragma unroll
      for (int k = j; k < j + kAccess; ++k) {
        const int offset = offset_of(step, k);
        if (offset < tokens)
          access[j / kAccess].data[k % kAccess] = logits[offset];
        else
          assign(access[j / kAccess].data[k % kAccess], -INFINITY);
      }
    }
  }

  /// A warp's threads copy neighbouring accesses: the first of this thread, in a step.
  static __device__ int first_copy() {
    const int lane = threadIdx.x % 32;
    return kAccesses * (static_cast<int>(threadIdx.x) - lane) + lane;
  }
  __device__ const T* copied(int step) const { return logits + step * kBlockStep + first_copy() * kAccess; }

  /// `from` is copied(step).
  __device__ void fetch(int step, const T* from) const {
    auto& slot = ring[step % kStages];
    if (step < whole_steps) {
#pragma unroll
      for (int a = 0; a < kAccesses; ++a)
        cp_async_16(shared_address(&slot[first_copy() + 32 * a]), from + 32 * kAccess * a);
    } else if (step < steps) {
      T* to = reinterpret_cast<T*>(&slot[kAccesses * threadIdx.x]);
#pragma unroll
      for (int j = 0; j < kStepTokens; ++j) {
        const int offset = offset_of(step, j);
        if (offset >= tokens)
          assign(to[j], -INFINITY);
        else if constexpr (sizeof(T) == 4)
          cp_async_4(shared_address(to + j), logits + offset);
        else
          to[j] = logits[offset];
      }
    }
    cp_async_commit();
  }
};

}  // namespace nanovllm::kernels
