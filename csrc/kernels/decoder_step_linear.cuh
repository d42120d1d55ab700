// Products of a weight matrix with the rows' activations, on the warps that compute.
//
// mma.m16n8k16 with weight rows on M and batch rows on N. A lane loads 16 bytes of a weight row, k .. k + 8,
// and those are its operands of two MMAs as they lie; activations are stored the same way, so k is permuted
// inside each 32 alike in both, which a sum does not see. The warps share out k, in steps of 32 columns (each
// fetches its own part of the activations), and add up through shared memory in the order of their index:
// deterministic.
//
// Loops stay rolled: a block runs through all of the code once a layer, and what does not fit the instruction
// cache costs more than the arithmetic.
#pragma once
#include "common/convert.cuh"
#include "common/reduce.cuh"
#include "kernels/decoder_step_stream.cuh"

namespace nanovllm::kernels::step {

constexpr int kSumsPitch = 20;  // of a batch row's 16 sums: no bank conflicts
constexpr int kSumsTile = kDecoderStepMaxRows * kSumsPitch;
constexpr int kSumsFloats = kGroup * kWarps * kSumsTile;
constexpr int kRows = kDecoderStepMaxRows;

enum NamedBarrier { kConsumers = 1, kReset = 2, kResetDone = 3 };

/// kR: rows, rounded up to a power of two.
template <int kR>
struct Consumer {
  static constexpr int kVectors = kR < 2 ? 1 : kR / 2;  // of 8 activations, that a lane fetches at a time

  Ring ring;
  uint4* activations;  // [steps of kDepth, kR, 4]: 32 columns of a row are 4 vectors
  float* sums[2];      // [kSumsFloats] each, taken in turns: one barrier a turn is enough
  float* squares[2];   // [kR][kWarps], in turns too
  int turn = 0, norm_turn = 0;
  int warp, lane, rows;

  __device__ void sync() const { named_barrier_sync(kConsumers, kThreads); }

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
    return step / kSteps * (kSteps * kWarps) + warp * kSteps + step % kSteps;
  }
  __device__ int row() const { return lane / 4 % kR; }
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

/// Columns from `block` on of the vectors [rows, depth] `from`, which other blocks publish, to `activations`.
/// Returns the sum of the squares of what the lane has fetched.
template <int kTile, int kR>
__device__ float fetch_activations(const Consumer<kR>& c, const uint32_t* from, int depth, int block) {
  constexpr int kVectors = Consumer<kR>::kVectors;
  const int count = c.template num_vectors<kTile>(min(depth - block, kDepth));
  const uint32_t* from_row = from + c.row() * (depth / 2);
  float squares = 0;
#pragma unroll 1
  for (int base = c.lane; base - c.lane < count; base += 32 * kVectors) {
    uint32_t x[kVectors][4];
    const uint32_t* at[kVectors];
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int i = base + 32 * j, k = block + c.template step_of<kTile>(i) * 32 + c.lane % 4 * 8;
      at[j] = i < count && c.row() < c.rows && k < depth ? from_row + k / 2 : nullptr;
    }
    receive(x, at);
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int i = base + 32 * j;
      if (i < count)
        c.vector(c.template step_of<kTile>(i), i) = make_uint4(x[j][0], x[j][1], x[j][2], x[j][3]);
      if constexpr (kTile == 16) {  // of what is normed
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float2 v = unpack(x[j][e]);
          squares += v.x * v.x + v.y * v.y;
        }
      }
    }
  }
  __syncwarp();
  return squares;
}

/// x / rms(x) * weight of vectors [rows, depth], depth <= kDepth, to `activations`, rounded as rms_norm does.
template <int kR>
__device__ void fetch_normed(Consumer<kR>& c, const uint32_t* from, const void* weight, int depth,
                             float inverse_depth, float eps) {
  constexpr int kTile = 16, kVectors = Consumer<kR>::kVectors;
  const int count = c.template num_vectors<kTile>(depth);
  uint32_t w[kVectors][4];  // the first ones, under the wait for x
  const auto load_weight = [&](int j, int i) {
    const int k = c.template step_of<kTile>(i) * 32 + c.lane % 4 * 8;
    if (i < count && k < depth) load_global(w[j], static_cast<const bf16*>(weight) + k);
  };
#pragma unroll
  for (int j = 0; j < kVectors; ++j) load_weight(j, c.lane + 32 * j);
  float squares = fetch_activations<kTile>(c, from, depth, 0);
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2)  // over the lanes of one row
    if (lanes < 4 || lanes >= 4 * kR) squares += __shfl_xor_sync(~0u, squares, lanes);
  float* all = c.squares[c.norm_turn];
  c.norm_turn ^= 1;
  if (c.lane % 4 == 0 && c.lane < 4 * kR) all[c.row() * kWarps + c.warp] = squares;
  c.sync();
  const float4* of_row = reinterpret_cast<const float4*>(all + c.row() * kWarps);
  const float4 low = of_row[0], high = of_row[1];
  static_assert(kWarps == 8);
  const float total = ((low.x + low.y) + (low.z + low.w)) + ((high.x + high.y) + (high.z + high.w));
  const float scale = rsqrtf(total * inverse_depth + eps);
#pragma unroll 1
  for (int base = c.lane; base - c.lane < count; base += 32 * kVectors) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int i = base + 32 * j, step = c.template step_of<kTile>(i);
      if (base != c.lane) load_weight(j, i);
      if (i >= count || step * 32 + c.lane % 4 * 8 >= depth) continue;
      uint4& at = c.vector(step, i);
      uint32_t x[4] = {at.x, at.y, at.z, at.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 v = unpack(x[e]), by = unpack(w[j][e]);
        x[e] = pack_pair<bf16>(v.x * scale * by.x, v.y * scale * by.y);
      }
      at = make_uint4(x[0], x[1], x[2], x[3]);
    }
  }
  __syncwarp();
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

/// Products of the next kCount slots, of as many tiles, with the activations at `x_at`, added to `acc`. All
/// loads come before the products: few instructions wait.
template <int kTile, int kCount, int kR>
__device__ void multiply_slots(Consumer<kR>& c, float (&acc)[kGroup][4][4], uint32_t weight_offset,
                               uint32_t x_at) {
  using S = Slot<kTile>;
  constexpr int kSides = kTile / 8;
  uint32_t w[kCount][S::kSteps][kSides][4], x[S::kSteps][4];
#pragma unroll
  for (int j = 0; j < S::kSteps; ++j) load_shared(x[j], x_at + j * kR * 64);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    c.ring.wait_full();
    const uint32_t at = c.ring.data() + weight_offset;
#pragma unroll
    for (int j = 0; j < S::kSteps; ++j)
#pragma unroll
      for (int side = 0; side < kSides; ++side)
        load_shared(w[i][j][side], at + j * 64 + side * 8 * S::kPitch);
    if (i + 1 < kCount) c.ring.advance();
  }
#pragma unroll
  for (int j = 0; j < S::kSteps; ++j)
#pragma unroll
    for (int half = 0; half < 4; half += 2)
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const uint32_t (&low)[4] = w[i][j][0], (&high)[4] = w[i][j][kSides - 1];
        const uint32_t a[4] = {low[half], kSides == 2 ? high[half] : 0, low[half + 1],
                               kSides == 2 ? high[half + 1] : 0};
        mma_16816<bf16>(acc[i][(2 * j + half / 2) % 4], a, x[j][half], x[j][half + 1]);
      }
  __syncwarp();
  c.ring.release_last(kCount);
}

/// This block's `tiles` of a matrix times `activations`. `fetch(block)` puts the columns from `block` on
/// there; `emit(first, count, sums)` takes the sums of tiles first .. first + count.
template <int kTile, int kR, class Fetch, class Emit>
__device__ void multiply(Consumer<kR>& c, int depth, int tiles, Fetch const& fetch, Emit const& emit) {
  using S = Slot<kTile>;
  const uint32_t weight_offset = c.lane / 4 * S::kPitch + c.warp * S::kSteps * 64 + c.lane % 4 * 16;
  // Columns of the product past the rows mean nothing: their lanes repeat another row.
  const uint32_t x_lane = shared_address(&c.vector(c.warp * S::kSteps, c.lane));
#pragma unroll 1
  for (int first = 0; first < tiles; first += kGroup) {
    const int count = min(kGroup, tiles - first);
    float* sums = c.sums[c.turn];
    float acc[kGroup][4][4] = {};
#pragma unroll 1
    for (int block = 0; block < depth; block += kDepth) {
      if (first == 0 || depth > kDepth) fetch(block);
      uint32_t x_at = x_lane;
#pragma unroll 1
      for (int k = block; k < min(block + kDepth, depth);
           k += S::kSlotDepth, x_at += kWarps * S::kSteps * kR * 64) {
        static_assert(kGroup == 3);
        if (count == 3)
          multiply_slots<kTile, 3>(c, acc, weight_offset, x_at);
        else if (count == 2)
          multiply_slots<kTile, 2>(c, acc, weight_offset, x_at);
        else
          multiply_slots<kTile, 1>(c, acc, weight_offset, x_at);
      }
    }
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (i >= count) break;
      float* to = sums + (i * kWarps + c.warp) * kSumsTile + c.lane / 4;
#pragma unroll
      for (int e = 0; e < (kTile == 16 ? 4 : 2); ++e) {
        const int n = c.lane % 4 * 2 + e % 2;
        if (n < kR)
          to[n * kSumsPitch + e / 2 * 8] = (acc[i][0][e] + acc[i][1][e]) + (acc[i][2][e] + acc[i][3][e]);
      }
    }
    c.turn ^= 1;
    c.sync();
    emit(first, count, sums);
  }
}

}  // namespace nanovllm::kernels::step
