// A block's part of a row of logits: read once as a stream, later again where it matters.
#pragma once
#include "common/convert.cuh"
#include "common/mma.cuh"
#include "common/philox.h"
#include "kernels/sample_team.cuh"

namespace nanovllm::kernels {

constexpr int kStepTokens = kBlockTokens;  // of a thread
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

/// A step of a thread is 8 neighbouring tokens, one or two accesses of 16 bytes. A warp's threads share their
/// copies, so that each copies what lies next to its neighbours': a ring is a warp's.
template <class T>
struct Slice {
  static constexpr int kStages = 16 / sizeof(T);           // steps of a thread in flight
  static constexpr int kAccess = 16 / sizeof(T);           // tokens
  static constexpr int kAccesses = kStepTokens / kAccess;  // of a step
  static constexpr int kBlockStep = kStepTokens * kSampleThreads;
  using Access = Pack<T, kAccess>;
  using Ring = uint4[kStages][kAccesses * kSampleThreads];
  using Index = float[kIndexSize][kSampleThreads];

  const T* logits;  // [tokens]
  uint32_t first;   // token
  int tokens;
  int whole_steps;  // that every thread reads by whole, aligned accesses
  int steps;        // of this warp
  int index_shift;  // log2 of the steps of one entry of the index
  Ring& ring;       // shared memory
  Index& index;     // shared memory

  __device__ Slice(const T* row, int64_t vocab, int rank, int tokens_per_block, bool aligned, Ring& ring,
                   Index& index)
      : ring(ring), index(index) {
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

  /// Starts the copies of the first steps.
  __device__ void start() const {
#pragma unroll 1
    for (int step = 0; step < kStages; ++step) fetch(step);
  }
  /// After start(): the logits of the first step.
  __device__ void peek(float (&x)[kStepTokens]) const { take(x, 0); }
  /// After start(): use(step, logits) for all steps. Logits past the end are -inf.
  template <class F>
  __device__ void stream(F const& use) const {
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      float x[kStepTokens];
      take(x, step);
      __syncwarp();  // all have taken
      fetch(step + kStages);
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
    for (int j = 0; j < kStepTokens; ++j) x[j] = to_float(access[j / kAccess].data[j % kAccess]);
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

  __device__ void fetch(int step) const {
    auto& slot = ring[step % kStages];
    const int lane = threadIdx.x % 32, first_access = kAccesses * (static_cast<int>(threadIdx.x) - lane);
    if (step < whole_steps) {
      const T* from = logits + step * kBlockStep + (first_access + lane) * kAccess;
#pragma unroll
      for (int a = 0; a < kAccesses; ++a)
        cp_async_16(shared_address(&slot[first_access + lane + 32 * a]), from + 32 * kAccess * a);
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

  __device__ void take(float (&x)[kStepTokens], int step) const {
    cp_async_wait<kStages - 1>();
    __syncwarp();  // of all lanes
    Access access[kAccesses];
#pragma unroll
    for (int a = 0; a < kAccesses; ++a) access[a].raw = ring[step % kStages][kAccesses * threadIdx.x + a];
    to_floats(x, access);
  }
};

}  // namespace nanovllm::kernels
