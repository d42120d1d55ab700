// Products of a weight matrix with the rows' activations, on the warps that compute.
//
// mma.m16n8k16 with weight rows on M and batch rows on N. A lane loads 16 bytes of a weight row, k .. k + 8,
// and those are its operands of two MMAs as they lie; activations are stored the same way, so k is permuted
// inside each 32 alike in both, which a sum does not see. The warps share out k, in steps of 32 columns (each
// fetches its own part of the activations), and add up through shared memory in the order of their index:
// deterministic.
//
// Loops stay rolled: a block runs through all of the code once a layer, at full rate as long as that fits the
// instruction cache, 128 KB.
#pragma once
#include "common/convert.cuh"
#include "common/reduce.cuh"
#include "kernels/decoder_step_stream.cuh"

namespace nanovllm::kernels::step {

constexpr int kSumsPitch = 20;  // of a batch row's 16 sums: no bank conflicts
constexpr int kSumsTile = kDecoderStepMaxRows * kSumsPitch;
constexpr int kSumsFloats = kGroup * kWarps * kSumsTile;
constexpr int kRows = kDecoderStepMaxRows;

/// Where the pair of columns k, k + 1 of a row is in an exchange buffer, in words: 8 columns of all rows are
/// neighbours, so that a tile of 8 rows is a line of the cache with one writer, and a warp reads whole lines.
template <int kR>
__device__ inline int word_of(int row, int k) {
  if constexpr (kR == 1) return k / 2;
  return (k / 8 * kR + row) * 4 + k % 8 / 2;
}

enum NamedBarrier { kConsumers = 1, kReset = 2, kResetDone = 3 };

/// kR: rows, rounded up to a power of two.
template <int kR>
struct Consumer {
  static constexpr int kVectors = kR < 8 ? 2 : 4;  // of 8 activations, that a lane fetches at a time

  Ring ring;
  uint4* activations;  // [steps of kDepth, kR, 4]: 32 columns of a row are 4 vectors
  float* sums;         // [2, kSumsFloats], taken in turns: one barrier a turn is enough
  float* squares;      // [kR, kWarps]: sums over what a warp has fetched of the residual stream
  int rows;
  int thread;
  int turn = 0;  // the place in `sums`

  /// What follows from the lane and warp is computed again: to keep it would take more registers than there
  /// are.
  __device__ void forget() { asm volatile("" : "+r"(thread)); }
  __device__ int lane() const { return thread % 32u; }
  __device__ int warp() const { return thread / 32u; }
  __device__ void sync() const { named_barrier_sync(kConsumers, kThreads); }

  __device__ float* next_sums() {
    turn = kSumsFloats - turn;
    return sums + turn;
  }

  /// Vectors of a warp's part of `depth` columns.
  template <int kTile>
  __device__ int num_vectors(int depth) const {
    using S = Slot<kTile>;
    return (depth + S::kSlotDepth - 1) / S::kSlotDepth * (S::kSteps * kR * 4);
  }
  /// The 32 columns that vector i of the warp is of. Its row and quarter of them are i's last bits: a lane's
  /// vectors, 32 apart, are of one row.
  template <int kTile>
  __device__ int step_of(int i) const {
    constexpr int kSteps = Slot<kTile>::kSteps;
    const unsigned step = static_cast<unsigned>(i) / (4 * kR);
    return step / kSteps * (kSteps * kWarps) + warp() * kSteps + step % kSteps;
  }
  __device__ int row() const { return lane() / 4 % kR; }
  /// Its place in `activations`.
  __device__ uint4& vector(int step, int i) const { return activations[step * (4 * kR) + i % (4u * kR)]; }
};

__device__ inline void load_shared(uint32_t (&to)[4], uint32_t from) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from));
}
__device__ inline void load_global(uint32_t (&to)[4], const void* from) {
  const uint4 v = __ldg(static_cast<const uint4*>(from));
  to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}
__device__ inline float2 unpack(uint32_t pair) {
  return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair));
}

/// Columns from `block` on of the rows' vectors of `depth` columns in the exchange buffer `from`, which other
/// blocks publish, to `activations`; times `weight` [depth] unless that is null. Returns the sum of the
/// squares of what the lane has fetched.
template <int kTile, int kR>
__device__ float fetch_activations(const Consumer<kR>& c, const uint32_t* from, int depth, int block,
                                   const void* weight = nullptr) {
  constexpr bool kNormed = kTile == 16;
  constexpr int kVectors = Consumer<kR>::kVectors;
  const int count = c.template num_vectors<kTile>(min(depth - block, kDepth));
  float squares = 0;
#pragma unroll 1
  for (int base = c.lane(); base - c.lane() < count; base += 32 * kVectors) {
    uint32_t x[kVectors][4], by[kVectors][4] = {};
    const uint32_t* at[kVectors];
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int i = base + 32 * j, k = block + c.template step_of<kTile>(i) * 32 + c.lane() % 4 * 8;
      at[j] = i < count && c.row() < c.rows && k < depth ? from + word_of<kR>(c.row(), k) : nullptr;
      if (kNormed && at[j] != nullptr) load_global(by[j], static_cast<const bf16*>(weight) + k);
    }
    receive(x, at);
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int i = base + 32 * j;
      if constexpr (kNormed) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float2 v = unpack(x[j][e]), w = unpack(by[j][e]);
          squares += v.x * v.x + v.y * v.y;
          x[j][e] = pack_pair<bf16>(v.x * w.x, v.y * w.y);
        }
      }
      if (i < count)
        c.vector(c.template step_of<kTile>(i), i) = make_uint4(x[j][0], x[j][1], x[j][2], x[j][3]);
    }
  }
  __syncwarp();
  return squares;
}

/// The warp's share of the squares, `of_lane` each, for `inverse_rms` after the next barrier.
template <int kR>
__device__ void put_squares(const Consumer<kR>& c, float of_lane) {
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2)  // over the lanes of one row
    if (lanes < 4 || lanes >= 4 * kR) of_lane += __shfl_xor_sync(~0u, of_lane, lanes);
  if (c.lane() % 4 == 0 && c.lane() < 4 * kR) c.squares[c.row() * kWarps + c.warp()] = of_lane;
}
__device__ inline float inverse_rms(const float* squares, int row, float inverse_depth, float eps) {
  const float4* of_row = reinterpret_cast<const float4*>(squares + row * kWarps);
  const float4 low = of_row[0], high = of_row[1];
  static_assert(kWarps == 8);
  const float total = ((low.x + low.y) + (low.z + low.w)) + ((high.x + high.y) + (high.z + high.w));
  return rsqrtf(total * inverse_depth + eps);
}

/// The sum over warps of one element of a tile: weight row m, batch row n.
__device__ inline float total(const float* sums, int tile, int m, int n) {
  const float* at = sums + tile * kWarps * kSumsTile + n * kSumsPitch + m;
  float x[kWarps];
#pragma unroll
  for (int w = 0; w < kWarps; ++w) x[w] = at[w * kSumsTile];
  static_assert(kWarps == 8);
  return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}

/// Accumulators of a tile, so that not every product waits for the one before.
template <int kTile>
constexpr int kChains = kTile == 16 ? 2 : 4;
__device__ inline float sum_of_chains(const float (&acc)[2][4], int e) { return acc[0][e] + acc[1][e]; }
__device__ inline float sum_of_chains(const float (&acc)[4][4], int e) {
  return (acc[0][e] + acc[1][e]) + (acc[2][e] + acc[3][e]);
}

/// Products of the next slots, kTiles tiles at each of kDeep depths, with the activations at `x_at`, added to
/// `acc`. All loads come before the products: few instructions wait.
template <int kTile, int kTiles, int kDeep, int kR>
__device__ void multiply_slots(Consumer<kR>& c, float (&acc)[kGroup][kChains<kTile>][4],
                               uint32_t weight_offset, uint32_t x_at) {
  using S = Slot<kTile>;
  constexpr int kSides = kTile / 8, kSteps = S::kSteps;
  uint32_t w[kDeep][kTiles][kSteps][kSides][4], x[kDeep][kSteps][4];
#pragma unroll
  for (int d = 0; d < kDeep; ++d) {
#pragma unroll
    for (int j = 0; j < kSteps; ++j) load_shared(x[d][j], x_at + (d * kWarps * kSteps + j) * kR * 64);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if (d + i > 0) c.ring.advance();
      c.ring.wait_full();
      const uint32_t at = c.ring.data() + weight_offset;
#pragma unroll
      for (int j = 0; j < kSteps; ++j)
#pragma unroll
        for (int side = 0; side < kSides; ++side)
          load_shared(w[d][i][j][side], at + j * 64 + side * 8 * S::kPitch);
    }
  }
#pragma unroll
  for (int d = 0; d < kDeep; ++d)
#pragma unroll
    for (int j = 0; j < kSteps; ++j)
#pragma unroll
      for (int half = 0; half < 4; half += 2)
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          const uint32_t (&low)[4] = w[d][i][j][0], (&high)[4] = w[d][i][j][kSides - 1];
          const uint32_t a[4] = {low[half], kSides == 2 ? high[half] : 0, low[half + 1],
                                 kSides == 2 ? high[half + 1] : 0};
          mma_16816<bf16>(acc[i][(2 * j + half / 2) % kChains<kTile>], a, x[d][j][half], x[d][j][half + 1]);
        }
  __syncwarp();
  c.ring.release_last(kTiles * kDeep, c.lane());
}

/// This block's `tiles` of a matrix times `activations`. `fetch(block)` puts the columns from `block` on
/// there and returns their squares; `emit(first, count, sums)` takes the sums of tiles first .. first +
/// count.
template <int kTile, int kR, class Fetch, class Emit>
__device__ void multiply(Consumer<kR>& c, int depth, int tiles, Fetch const& fetch, Emit const& emit) {
  using S = Slot<kTile>;
  const uint32_t weight_offset = c.lane() / 4 * S::kPitch + c.warp() * S::kSteps * 64 + c.lane() % 4 * 16;
  // Columns of the product past the rows mean nothing: their lanes repeat another row.
  const uint32_t x_lane = shared_address(&c.vector(c.warp() * S::kSteps, c.lane()));
#pragma unroll 1
  for (int first = 0; first < tiles; first += kGroup) {
    const int count = min(kGroup, tiles - first);
    float* sums = c.next_sums();
    float acc[kGroup][kChains<kTile>][4] = {}, squares = 0;
#pragma unroll 1
    for (int block = 0; block < depth; block += kDepth) {
      if (first == 0 || depth > kDepth) squares = fetch(block);
      uint32_t x_at = x_lane;
#pragma unroll 1
      for (int left = (min(kDepth, depth - block) + S::kSlotDepth - 1) / S::kSlotDepth; left > 0;) {
        const auto slots = [&]<int kTiles, int kDeep>() {
          multiply_slots<kTile, kTiles, kDeep>(c, acc, weight_offset, x_at);
          left -= kDeep, x_at += kDeep * kWarps * S::kSteps * kR * 64;
        };
        static_assert(kGroup == 3);
        const bool deep = left >= 2 && c.ring.count >= 2 * count + kStreamWarps;
        if constexpr (kTile == 16) {
          if (count == 3)
            deep ? slots.template operator()<3, 2>() : slots.template operator()<3, 1>();
          else if (count == 2)
            deep ? slots.template operator()<2, 2>() : slots.template operator()<2, 1>();
          else
            deep ? slots.template operator()<1, 2>() : slots.template operator()<1, 1>();
        } else {
          if (count == 3)
            slots.template operator()<3, 1>();
          else if (count == 2)
            slots.template operator()<2, 1>();
          else if (left >= kGroup)
            slots.template operator()<1, kGroup>();
          else
            left == 2 ? slots.template operator()<1, 2>() : slots.template operator()<1, 1>();
        }
      }
    }
    if (kTile == 16 && first == 0) put_squares(c, squares);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (i >= count) break;
      float* to = sums + (i * kWarps + c.warp()) * kSumsTile + c.lane() / 4;
#pragma unroll
      for (int e = 0; e < (kTile == 16 ? 4 : 2); ++e) {
        const int n = c.lane() % 4 * 2 + e % 2;
        if (n < kR) to[n * kSumsPitch + e / 2 * 8] = sum_of_chains(acc[i], e);
      }
    }
    c.sync();
    emit(first, count, sums);
  }
}

}  // namespace nanovllm::kernels::step
