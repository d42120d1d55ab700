// A block's part of a product of decode_linear.cuh: rings of weight and x in shared memory, the products of
// its warpgroups, and the norm of its tokens.
#pragma once
#include <cuda.h>

#include "common/ptx.cuh"
#include "kernels/decode_linear.h"

// Passes for other architectures leave the kernel's body out, and its parts without a use.
#pragma nv_diag_suppress 177

namespace nanovllm::kernels::decode_linear {

constexpr int kChunk = 64;      // of k, in a stage of a ring
constexpr int kRowBytes = 128;  // of a chunk: one swizzled row in shared memory
constexpr int kMaxStages = 16;  // of a ring
constexpr int kQuad = 4;        // neighbouring outputs of a thread
constexpr int kProducerWarps = 3;
constexpr int kMaxSplit = 8;    // blocks of a cluster
constexpr int kWideGroups = 3;  // of a tile where there are many
constexpr int kQuadsOfGroup = 64 / kQuad;

constexpr int threads_of(int groups) { return 128 * groups + 32 * kProducerWarps; }

struct KernelParams {
  CUtensorMap weight, x;
  const void* bias;
  Squares squares;  // of x, or null
  int num_rows;
  int n;  // rows of a part of the weight
  int k;
  int chunks, token_tiles, weight_stages, x_stages;
  bool weight_complete;
};

struct Barriers {
  uint64_t weight_full[kMaxStages], weight_empty[kMaxStages], x_full[kMaxStages], x_empty[kMaxStages];
};

/// A position in a ring whose depth is known at run time.
struct Ring {
  int stages, slot = 0;
  uint32_t parity = 0;
  __device__ void advance() {
    if (++slot == stages) slot = 0, parity ^= 1;
  }
};

/// What a block computes.
struct Work {
  int first_row;    // of a part of the weight
  int first_token;  // of the tile
  int first_chunk, chunks;
};

/// One thread: `load(slot, k, barrier)` for every chunk, as the ring has room.
template <class Load>
__device__ void fill_ring(const Work& w, int stages, uint64_t* full, uint64_t* empty, uint32_t bytes,
                          Load const& load) {
  Ring at{stages};
  for (int i = 0; i < w.chunks; ++i) {
    const uint32_t barrier = shared_address(&full[at.slot]);
    if (i >= stages) mbarrier_wait(shared_address(&empty[at.slot]), at.parity ^ 1);
    mbarrier_arrive_expect(barrier, bytes);
    load(at.slot, (w.first_chunk + i) * kChunk, barrier);
    at.advance();
  }
}

/// 64 rows of a chunk of the weight times a chunk of x, both in shared memory; a group of wgmma on its way.
template <class T, int kCount>
__device__ __forceinline__ void multiply_chunk(float (&acc)[kCount], uint32_t weight, uint32_t x, bool adds) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kChunk; k += 16)
    wgmma_ss<T>(acc, wgmma_descriptor(weight + 2 * k, 16), wgmma_descriptor(x + 2 * k, 16), adds || k > 0);
  wgmma_commit();
}

/// The warpgroup's 64 rows of the weight times all tokens, over the next `chunks` of both rings.
template <class T, int kTokens, int kGroups>
__device__ void multiply(Barriers& barriers, uint32_t weights, uint32_t xs, int chunks, Ring& weight, Ring& x,
                         float (&acc)[kTokens / 2]) {
  const int group = threadIdx.x / 128;
  int weight_done = 0, x_done = 0;  // slots of the chunk before
  const auto release = [&] {
    if (threadIdx.x % 32 != 0) return;
    mbarrier_arrive(shared_address(&barriers.weight_empty[weight_done]));
    mbarrier_arrive(shared_address(&barriers.x_empty[x_done]));
  };
  for (int i = 0; i < chunks; ++i) {
    mbarrier_wait(shared_address(&barriers.weight_full[weight.slot]), weight.parity);
    mbarrier_wait(shared_address(&barriers.x_full[x.slot]), x.parity);
    const uint32_t a = weights + (weight.slot * kGroups + group) * 64 * kRowBytes;
    const uint32_t b = xs + x.slot * kTokens * kRowBytes;
    multiply_chunk<T>(acc, a, b, i > 0);
    if (i > 0) {
      wgmma_wait<1>();
      release();
    }
    weight_done = weight.slot, x_done = x.slot;
    weight.advance(), x.advance();
  }
  wgmma_wait<0>();
  release();
  pin_registers(acc);
}

/// Of this block's share of the tokens: 1 / rms, from partial sums of squares. A warp's call.
__device__ inline void norm_scales(const KernelParams& p, const Work& w, float* scales, int first,
                                   int count) {
  for (int i = threadIdx.x % 32; i < count; i += 32) {
    const int m = w.first_token + first + i;
    float total = 0;
#pragma unroll 16
    for (int j = 0; j < p.squares.parts; ++j)
      total += m < p.num_rows ? p.squares.data[int64_t{j} * p.num_rows + m] : 0.0f;
    scales[first + i] = rsqrtf(total / static_cast<float>(p.k) + p.squares.eps);
  }
}

}  // namespace nanovllm::kernels::decode_linear
