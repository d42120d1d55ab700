// The split of one decode step that decode_plan writes and paged_attention_decode follows. Work is a line of
// tiles of kTileTokens tokens, ordered by (sequence, KV head, tile of the context); block c of a grid of
// decode_grid() blocks owns the next `quota` of them, one more where c < extra. plan, as int4:
//   [0]      num_tiles, quota, extra, 0
//   [1 + c]  of block c's first tile: sequence, KV head, tile in its context, context length
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace nanovllm::kernels {

constexpr int kTileTokens = 64;
/// As many blocks as shared memory holds at once on sm_80 and sm_90; smaller GPUs run them in two waves.
constexpr int kBlocksPerSm = 2;

struct DecodeSplit {
  int num_tiles, quota, extra, unused;

  __host__ __device__ int begin(int block) const { return block * quota + (block < extra ? block : extra); }
  /// The block that owns a tile.
  __host__ __device__ int owner(int tile) const {
    const int longer = extra * (quota + 1);
    return tile < longer ? tile / (quota + 1) : extra + (tile - longer) / quota;
  }
};
static_assert(sizeof(DecodeSplit) == sizeof(int4));

/// Blocks of a decode grid on `device`.
inline cudaError_t decode_grid(int device, int* blocks) {
  const cudaError_t status = cudaDeviceGetAttribute(blocks, cudaDevAttrMultiProcessorCount, device);
  *blocks *= kBlocksPerSm;
  return status;
}

}  // namespace nanovllm::kernels
