// The weights of the decoder step, streamed through a ring in shared memory. Some warps copy them in the
// order in which the others use them: weights do not depend on the step, so copies go on under every wait of
// the computation. But a word that other blocks wait for travels behind the copies issued before it. So the
// slots of a matrix that are filled before its product begins come in small pieces, one at a time: few bytes
// in flight, just enough for the rate needed. Later slots have room only once the product runs; hardly any
// block waits for words then, and as much is in flight as there is room for.
#pragma once
#include <cuda_bf16.h>

#include "common/exchange.cuh"
#include "common/mma.cuh"
#include "common/ptx.cuh"
#include "kernels/decoder_step.h"

namespace nanovllm::kernels::step {

using bf16 = __nv_bfloat16;

constexpr int kWarps = 8;              // that compute
constexpr int kThreads = 32 * kWarps;  // that compute
constexpr int kStreamWarps = 2;
constexpr int kPiece = 16;    // copies of 16 bytes that a lane has in flight: 8 KB a warp
constexpr int kDepth = 4096;  // columns of a matrix, whose activations are in shared memory at a time
constexpr int kGroup = 3;     // tiles that are summed up together; a warp may wait for as many slots at once

/// A slot holds part of a tile: kTile rows of a matrix, `kSlotDepth` columns. Neighbouring rows are 64 bytes
/// apart modulo 128, so that 8 lanes reading two rows meet all banks.
template <int kTile>
struct Slot {
  static constexpr int kSlotDepth = 8192 / kTile;
  static constexpr int kPitch = kSlotDepth * 2 + 64;       // bytes
  static constexpr int kSteps = kSlotDepth / 32 / kWarps;  // of 32 columns, for a warp
};
constexpr int kSlotBytes = 16 * Slot<16>::kPitch;
static_assert(8 * Slot<8>::kPitch <= kSlotBytes);

/// Tiles i of a block: blockIdx.x + i * gridDim.x.
__device__ inline int tile_of(int i) { return blockIdx.x + i * gridDim.x; }
__device__ inline int num_tiles(int total) { return (total - 1 - blockIdx.x + gridDim.x) / gridDim.x; }

/// mbarrier_wait that ends the launch instead of hanging.
__device__ inline void wait_patiently(uint32_t barrier, uint32_t parity) {
  Patience<1 << 26> patience;
  while (true) {
    uint32_t done;
    asm volatile(
        "{\n.reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.b32 %0, 1, 0, done;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    if (done) return;
    patience.tick();
  }
}

struct Ring {
  uint32_t slots, full, empty;  // addresses in shared memory: of slots, of a barrier each
  int count;
  int slot = 0;
  uint32_t parity = 0;

  __device__ uint32_t data() const { return slots + slot * kSlotBytes; }
  __device__ void advance() {
    if (++slot == count) slot = 0, parity ^= 1;
  }
  __device__ void wait_full() const { wait_patiently(full + slot * 8, parity); }
  __device__ void wait_empty() const { wait_patiently(empty + slot * 8, parity ^ 1); }
  /// A warp that computes is done with this slot and those before it, `slots` in all; after a __syncwarp.
  __device__ void release_last(int slots, int lane) {
    if (lane < slots) {
      const int before = slot - lane;
      mbarrier_arrive(empty + (before < 0 ? before + count : before) * 8);
    }
    advance();
  }
};

/// Eight neighbouring rows of a weight, of which `count` exist; the last stands in for the others.
struct EightRows {
  const bf16* first;
  int count;
};

/// One of the streaming warps, which take the slots in turns.
struct Streamer {
  Ring ring;
  int turn;         // slots until this warp's next
  uint64_t policy;  // weights are read once, so the first to leave L2

  __device__ Streamer(const Ring& ring, int warp) : ring(ring), turn(warp) {
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  }

  /// Copies this block's `tiles` of a matrix with `depth` columns; `rows(tile, i)`: rows 8 i .. 8 i + 7 of
  /// one. `alone`: no block waits for another now, not even for the first slots.
  template <int kTile, class Rows>
  __device__ void matrix(int depth, int tiles, bool alone, Rows const& rows) {
    using S = Slot<kTile>;
    int number = 0;  // of the slot
#pragma unroll 1
    for (int first = 0; first < tiles; first += kGroup)
#pragma unroll 1
      for (int block = 0; block < depth; block += kDepth)
#pragma unroll 1
        for (int k = block; k < min(block + kDepth, depth); k += S::kSlotDepth)
#pragma unroll 1
          for (int i = first; i < min(first + kGroup, tiles); ++i) {
            if (turn == 0) slot<kTile>(depth, k, tile_of(i), alone || number >= ring.count, rows);
            ++number;
            turn = turn == 0 ? kStreamWarps - 1 : turn - 1;
            ring.advance();
          }
  }

  template <int kTile, class Rows>
  __device__ void slot(int depth, int k, int tile, bool alone, Rows const& rows) {
    using S = Slot<kTile>;
    constexpr int kCopies = S::kSlotDepth / 8 / 32;  // of a row, for a lane
    static_assert(kPiece % kCopies == 0);
    const int column = k + threadIdx.x % 32 * 8;
    ring.wait_empty();
    uint32_t to = ring.data() + threadIdx.x % 32 * 16;
#pragma unroll 1
    for (int half = 0; half < kTile / 8; ++half) {
      const EightRows eight = rows(tile, half);
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        if (r * kCopies % kPiece == 0 && !alone) asm volatile("cp.async.wait_all;" ::: "memory");
        const bf16* from = eight.first + static_cast<int64_t>(min(r, eight.count - 1)) * depth + column;
#pragma unroll
        for (int i = 0; i < kCopies; ++i) copy(to + i * 512, from + i * 256, column + i * 256 < depth);
        to += S::kPitch;
      }
    }
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(ring.full + ring.slot * 8)
                 : "memory");
  }
  /// 16 bytes, or zeros past the end of a row.
  __device__ void copy(uint32_t to, const bf16* from, bool valid) const {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from),
                 "r"(valid ? 16 : 0), "l"(policy)
                 : "memory");
  }
};

}  // namespace nanovllm::kernels::step
