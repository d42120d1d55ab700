// The products of decode_linear.cuh for a large weight and 1 to 32 rows of x: every multiprocessor reads the
// same share of the weight, to the chunk ("stream-K"), whatever its shape.
//
// A tile is 128 weight rows by all tokens. The chunks of k of all tiles, one tile after the other, are a line
// that is cut into equal pieces, one for each block; a block an SM. Its rings run on over the borders of
// tiles. A tile that several pieces share belongs to the block of its first chunk: the others leave their
// sums in the workspace, each word its own signal (common/exchange.cuh), and the owner, which meets the tile
// at the end of its piece where they met it at the start of theirs, adds them up in the order of k: results
// do not depend on timing. Blocks leave sums before they wait, and wait only for the next ones; so where not
// all find room at once, the last that runs waits for one that has not begun, and the others end.
//
// Trusted and checked as in decode_linear.cuh; the workspace is all ones before and after each call.
#pragma once
#include "common/exchange.cuh"
#include "kernels/decode_linear.cuh"

namespace nanovllm::kernels::decode_linear {

constexpr int kStreamGroups = 2, kStreamRows = 64 * kStreamGroups, kStreamWarps = 4 * kStreamGroups;
constexpr int kStreamPitch = kStreamRows + 4;
constexpr int kStreamTokens = 32;
constexpr int kStreamSmem = 226 * 1024;                // dynamic
constexpr int64_t kStreamMinNumel = int64_t{1} << 24;  // of a weight; smaller ones are spread over clusters

/// A block's part of the line of `chunks` a tile.
struct Piece {
  int64_t begin, end;
  __device__ Piece(int64_t units, int block)
      : begin(units * block / gridDim.x), end(units * (block + 1) / gridDim.x) {}
};

/// One thread: `load(slot, tile, chunk, barrier)` for every chunk of the piece, as the ring has room.
template <class Load>
__device__ void fill_stream(const Piece& piece, int chunks, int stages, uint64_t* full, uint64_t* empty,
                            uint32_t bytes, Load const& load) {
  Ring at{stages};
  int tile = static_cast<int>(piece.begin / chunks), chunk = static_cast<int>(piece.begin % chunks);
  for (int64_t i = piece.begin; i < piece.end; ++i) {
    const uint32_t barrier = shared_address(&full[at.slot]);
    if (i - piece.begin >= stages) mbarrier_wait(shared_address(&empty[at.slot]), at.parity ^ 1);
    mbarrier_arrive_expect(barrier, bytes);
    load(at.slot, tile, chunk, barrier);
    at.advance();
    if (++chunk == chunks) chunk = 0, ++tile;
  }
}

template <int kPacks>
__device__ uint32_t* sums_of(uint32_t* workspace, int block, int pack) {
  return workspace + ((int64_t{block} * kPacks + pack) * 128 * kStreamGroups + threadIdx.x) * 4;
}

template <int kPacks>
__device__ void leave_sums(uint32_t* workspace, const float (&acc)[4 * kPacks]) {
  const auto word = [&](int i) { return min(__float_as_uint(acc[i]), kAbsent - 1); };  // a NaN stays one
#pragma unroll
  for (int i = 0; i < kPacks; ++i)
    publish(sums_of<kPacks>(workspace, blockIdx.x, i),
            uint4{word(4 * i), word(4 * i + 1), word(4 * i + 2), word(4 * i + 3)});
}

template <int kPacks>
__device__ void add_sums(uint32_t* workspace, int block, float (&acc)[4 * kPacks]) {
  uint32_t sums[kPacks][4];
  const uint32_t* from[kPacks];
#pragma unroll
  for (int i = 0; i < kPacks; ++i) from[i] = sums_of<kPacks>(workspace, block, i);
  receive(sums, from);
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    publish(sums_of<kPacks>(workspace, block, i), uint4{kAbsent, kAbsent, kAbsent, kAbsent});
#pragma unroll
    for (int j = 0; j < 4; ++j) acc[4 * i + j] += __uint_as_float(sums[i][j]);
  }
}

template <class T, int kTokens, class Epilogue>
__global__ void __launch_bounds__(threads_of(kStreamGroups), 1)
    stream_kernel(const __grid_constant__ KernelParams p, const __grid_constant__ typename Epilogue::Params e,
                  uint32_t* workspace) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kParts = Epilogue::kParts, kRowsOfPart = kStreamRows / kParts, kPacks = kTokens / 8;
  extern __shared__ uint8_t shared_bytes[];
  __shared__ Barriers barriers;
  __shared__ uint64_t scales_ready;
  __shared__ float scales[kTokens];
  uint8_t* ring = shared_bytes + (1024 - shared_address(shared_bytes) % 1024) % 1024;
  const uint32_t weights = shared_address(ring), xs = weights + p.weight_stages * kStreamRows * kRowBytes;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int64_t units = int64_t{(p.n + kRowsOfPart - 1) / kRowsOfPart} * p.chunks;
  const Piece piece(units, blockIdx.x);
  if (threadIdx.x < kMaxStages) {
    mbarrier_init(shared_address(&barriers.weight_full[threadIdx.x]), 1);
    mbarrier_init(shared_address(&barriers.x_full[threadIdx.x]), 1);
    mbarrier_init(shared_address(&barriers.weight_empty[threadIdx.x]), kStreamWarps);
    mbarrier_init(shared_address(&barriers.x_empty[threadIdx.x]), kStreamWarps);
    if (threadIdx.x == 0) mbarrier_init(shared_address(&scales_ready), 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  launch_next_grid();
  if (warp == kStreamWarps) {
    if (threadIdx.x % 32 != 0) return;
    if (!p.weight_complete) wait_for_previous_grid();
    fill_stream(piece, p.chunks, p.weight_stages, barriers.weight_full, barriers.weight_empty,
                kStreamRows * kRowBytes, [&](int slot, int tile, int chunk, uint32_t barrier) {
#pragma unroll
                  for (int part = 0; part < kParts; ++part)
                    tma_load_2d(weights + (slot * kStreamRows + part * kRowsOfPart) * kRowBytes, &p.weight,
                                barrier, chunk * kChunk, part * p.n + tile * kRowsOfPart);
                });
    return;
  }
  if (warp == kStreamWarps + 1) {
    if (threadIdx.x % 32 != 0) return;
    prefetch_tensor_map(&p.x);
    wait_for_previous_grid();
    fill_stream(piece, p.chunks, p.x_stages, barriers.x_full, barriers.x_empty, kTokens * kRowBytes,
                [&](int slot, int, int chunk, uint32_t barrier) {
                  tma_load_2d(xs + slot * kTokens * kRowBytes, &p.x, barrier, chunk * kChunk, 0);
                });
    return;
  }
  if (warp == kStreamWarps + 2) {
    if (p.squares.data == nullptr) return;
    wait_for_previous_grid();
    norm_scales(p, Work{}, scales, 0, kTokens);
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&scales_ready));
    return;
  }

  float* sums = reinterpret_cast<float*>(ring) +
                (p.weight_stages * kStreamRows + p.x_stages * kTokens) * (kRowBytes / 4);
  const int lane = threadIdx.x % 32;
  const int row = warp * 16 + lane / 4, token = lane % 4 * 2;  // of acc[0] in the tile
  Ring weight{p.weight_stages}, x{p.x_stages};
  wait_for_previous_grid();
  for (int64_t at = piece.begin; at < piece.end;) {
    const int tile = static_cast<int>(at / p.chunks), first = static_cast<int>(at % p.chunks);
    const int count = static_cast<int>(min(int64_t{p.chunks - first}, piece.end - at));
    at += count;
    Share<T, kTokens, kStreamGroups, 1, Epilogue> share;
    if (first == 0)
      share.start(p, e,
                  Work{.first_row = tile * kRowsOfPart, .first_token = 0, .first_chunk = 0, .chunks = 0}, 0);
    float acc[kTokens / 2];
    multiply<T, kTokens, kStreamGroups>(barriers, weights, xs, count, weight, x, acc);
    if (first > 0) {
      leave_sums<kPacks>(workspace, acc);
      continue;
    }
    const int64_t tile_end = int64_t{tile + 1} * p.chunks;
    for (int block = blockIdx.x + 1; Piece(units, block).begin < tile_end; ++block)
      add_sums<kPacks>(workspace, block, acc);
    named_barrier_sync(1, 32 * kStreamWarps);  // the sums of the tile before have been read
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i)
      sums[(i / 4 * 8 + token + i % 2) * kStreamPitch + row + i % 4 / 2 * 8] = acc[i];
    if (p.squares.data != nullptr) mbarrier_wait(shared_address(&scales_ready), 0);
    named_barrier_sync(1, 32 * kStreamWarps);
    share.finish(p, e, sums, scales);
  }
#endif
}

// ---- host ----

inline int64_t stream_workspace_bytes(int num_sms) {
  return int64_t{num_sms} * kStreamRows * kStreamTokens * 4;
}

/// A block must have work: kStreamMinNumel is more than 2,000 chunks of tiles.
inline bool stream_takes(const DecodeLinearParams& p) {
  return p.workspace != nullptr && p.num_rows <= kStreamTokens && p.n * p.k > kStreamMinNumel;
}

template <class T, int kTokens, class Epilogue>
cudaError_t launch_stream_tokens(KernelParams kernel, const typename Epilogue::Params& e,
                                 const DecodeLinearParams& p, int num_sms, cudaStream_t stream) {
  constexpr int kFixed = 1024 + kTokens * kStreamPitch * 4, kStage = (kStreamRows + kTokens) * kRowBytes;
  kernel.weight_stages = kernel.x_stages = std::min(kMaxStages, (kStreamSmem - kFixed) / kStage);
  const int bytes = kFixed + kernel.weight_stages * kStage;
  if (!encode(kernel.weight, p.dtype, p.weight, p.n, p.k, p.weight_stride_row,
              kStreamRows / Epilogue::kParts) ||
      !encode(kernel.x, p.dtype, p.x, p.num_rows, p.k, p.x_stride_row, kTokens))
    return cudaErrorNotSupported;
  const auto function = stream_kernel<T, kTokens, Epilogue>;
  const cudaError_t status =
      cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) return status;
  return launch_pdl(function, num_sms, threads_of(kStreamGroups), bytes, stream, kernel, e,
                    reinterpret_cast<uint32_t*>(p.workspace));
}

template <class Epilogue>
cudaError_t launch_stream(const DecodeLinearParams& p, const typename Epilogue::Params& e, int num_sms,
                          cudaStream_t stream) {
  const KernelParams kernel = kernel_params(p, Epilogue::kParts);
  return dispatch(p.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return p.num_rows <= 16 ? launch_stream_tokens<T, 16, Epilogue>(kernel, e, p, num_sms, stream)
                            : launch_stream_tokens<T, kStreamTokens, Epilogue>(kernel, e, p, num_sms, stream);
  });
}

}  // namespace nanovllm::kernels::decode_linear
