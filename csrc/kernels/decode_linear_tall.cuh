// y = x @ weight^T + bias for 1 to 64 rows of x and a weight of very many rows: a language model's head.
//
// A block an SM walks tiles of 128 weight rows, every gridDim.x-th. x stays in its shared memory, and the
// weight streams through a ring of stages of 64 columns of k from the first tile to the last, also while the
// two warpgroups, 64 rows each, write a tile's results. With weight_complete the ring fills before the
// previous kernel has ended. Reads the weight once: bound by that. Sums are fp32, rounded once.
//
// Trusted and checked as in decode_linear.cuh; tall_takes() says which products it can do.
#pragma once
#include "kernels/decode_linear.cuh"

namespace nanovllm::kernels::decode_linear {

constexpr int kTallGroups = 2, kTallRows = 64 * kTallGroups;
constexpr int kTallThreads = 128 * kTallGroups + 64;  // a warp copies the weight, one x
constexpr int kTallStageBytes = kTallRows * kRowBytes;
constexpr int kTallPitch = 64 + 8;            // elements, of a token's results of a warpgroup
constexpr int kTallSmem = 227 * 1024 - 1024;  // but for the barriers
constexpr int kTallTokens = 64;

struct TallParams {
  CUtensorMap weight, x;
  const void* bias;
  void* out;
  int64_t out_stride_row;
  int num_rows, n, chunks, stages;
  bool weight_complete;
};

struct TallBarriers {
  uint64_t full[kMaxStages], empty[kMaxStages], x;
};

template <class T, int kTokens>
__global__ void __launch_bounds__(kTallThreads, 1) tall_kernel(const __grid_constant__ TallParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kWarps = 4 * kTallGroups;
  extern __shared__ uint8_t shared_bytes[];
  __shared__ TallBarriers barriers;
  uint8_t* x_bytes = shared_bytes + (1024 - shared_address(shared_bytes) % 1024) % 1024;
  const uint32_t xs = shared_address(x_bytes), ring = xs + p.chunks * kTokens * kRowBytes;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), tiles = (p.n + kTallRows - 1) / kTallRows;
  if (threadIdx.x < p.stages) {
    mbarrier_init(shared_address(&barriers.full[threadIdx.x]), 1);
    mbarrier_init(shared_address(&barriers.empty[threadIdx.x]), kWarps);
  }
  if (threadIdx.x == 0) mbarrier_init(shared_address(&barriers.x), 1);
  mbarrier_init_fence();
  __syncthreads();
  launch_next_grid();
  Ring at{p.stages};
  if (warp == kWarps) {
    if (threadIdx.x % 32 != 0) return;
    if (!p.weight_complete) wait_for_previous_grid();
    bool is_first_round = true;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x)
      for (int chunk = 0; chunk < p.chunks; ++chunk) {
        const uint32_t full = shared_address(&barriers.full[at.slot]);
        if (!is_first_round) mbarrier_wait(shared_address(&barriers.empty[at.slot]), at.parity ^ 1);
        mbarrier_arrive_expect(full, kTallStageBytes);
        tma_load_2d(ring + at.slot * kTallStageBytes, &p.weight, full, chunk * kChunk, tile * kTallRows);
        at.advance();
        if (at.slot == 0) is_first_round = false;
      }
    return;
  }
  if (warp == kWarps + 1) {
    if (threadIdx.x % 32 != 0) return;
    const uint32_t full = shared_address(&barriers.x);
    prefetch_tensor_map(&p.x);
    wait_for_previous_grid();
    mbarrier_arrive_expect(full, p.chunks * kTokens * kRowBytes);
    for (int chunk = 0; chunk < p.chunks; ++chunk)
      tma_load_2d(xs + chunk * kTokens * kRowBytes, &p.x, full, chunk * kChunk, 0);
    return;
  }

  const int group = warp / 4, thread = threadIdx.x % 128, lane = threadIdx.x % 32;
  const int row = warp % 4 * 16 + lane / 4;  // of the group's, and row + 8
  T* results = reinterpret_cast<T*>(x_bytes + p.chunks * kTokens * kRowBytes + p.stages * kTallStageBytes) +
               group * kTokens * kTallPitch;
  wait_for_previous_grid();
  mbarrier_wait(shared_address(&barriers.x), 0);
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    float acc[kTokens / 2];
    int done = 0;  // slot of the chunk before
    const auto release = [&] {
      if (lane == 0) mbarrier_arrive(shared_address(&barriers.empty[done]));
    };
    for (int chunk = 0; chunk < p.chunks; ++chunk) {
      mbarrier_wait(shared_address(&barriers.full[at.slot]), at.parity);
      const uint32_t a = ring + at.slot * kTallStageBytes + group * 64 * kRowBytes;
      const uint32_t b = xs + chunk * kTokens * kRowBytes;
      multiply_chunk<T>(acc, a, b, chunk > 0);
      if (chunk > 0) {
        wgmma_wait<1>();
        release();
      }
      done = at.slot;
      at.advance();
    }
    wgmma_wait<0>();
    release();
    pin_registers(acc);

    const int first = tile * kTallRows + group * 64;
    float bias[2] = {};
#pragma unroll
    for (int j = 0; j < 2; ++j)
      if (p.bias != nullptr && first + row + 8 * j < p.n)
        bias[j] = to_float(static_cast<const T*>(p.bias)[first + row + 8 * j]);
    named_barrier_sync(1 + group, 128);  // the results of the tile before are out
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i)
      assign(results[(i / 4 * 8 + lane % 4 * 2 + i % 2) * kTallPitch + row + i % 4 / 2 * 8],
             acc[i] + bias[i % 4 / 2]);
    named_barrier_sync(1 + group, 128);
#pragma unroll
    for (int i = thread; i < kTokens * 8; i += 128) {
      const int token = i / 8, n = first + i % 8 * 8;
      if (token < p.num_rows && n < p.n)
        Pack<T, 8>::load(results + token * kTallPitch + i % 8 * 8)
            .store(static_cast<T*>(p.out) + token * p.out_stride_row + n);
    }
  }
#endif
}

// ---- host ----

inline int tall_tokens(int64_t num_rows) { return num_rows <= 16 ? 16 : num_rows <= 32 ? 32 : 64; }

/// Shared memory beside the ring: x, results, and what aligns them.
inline int64_t tall_fixed_bytes(int64_t chunks, int tokens) {
  return 1024 + chunks * tokens * kRowBytes + kTallGroups * tokens * kTallPitch * 2;
}

/// Stages of the ring that shared memory has room for; less than 4 are not worth it.
inline int tall_stages(const DecodeLinearParams& p) {
  const int64_t room = kTallSmem - tall_fixed_bytes((p.k + kChunk - 1) / kChunk, tall_tokens(p.num_rows));
  return static_cast<int>(std::min<int64_t>(kMaxStages, room / kTallStageBytes));
}

inline bool tall_takes(const DecodeLinearParams& p, int num_sms) {
  return !p.silu_and_mul && p.squares.data == nullptr && p.num_rows <= kTallTokens &&
         p.n >= 2 * num_sms * kTallRows && p.n % 8 == 0 && is_aligned(p.out, {p.out_stride_row}, 2, 16) &&
         tall_stages(p) >= 4;
}

template <class T, int kTokens>
cudaError_t launch_tall_tokens(const TallParams& p, int blocks, cudaStream_t stream) {
  const auto kernel = tall_kernel<T, kTokens>;
  const int bytes = static_cast<int>(tall_fixed_bytes(p.chunks, kTokens)) + p.stages * kTallStageBytes;
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) return status;
  return launch_pdl(kernel, blocks, kTallThreads, bytes, stream, p);
}

inline cudaError_t launch_tall(const DecodeLinearParams& p, int num_sms, cudaStream_t stream) {
  const int tokens = tall_tokens(p.num_rows);
  TallParams kernel{.bias = p.bias,
                    .out = p.out,
                    .out_stride_row = p.out_stride_row,
                    .num_rows = static_cast<int>(p.num_rows),
                    .n = static_cast<int>(p.n),
                    .chunks = static_cast<int>((p.k + kChunk - 1) / kChunk),
                    .stages = tall_stages(p),
                    .weight_complete = p.weight_complete};
  if (!encode(kernel.weight, p.dtype, p.weight, p.n, p.k, p.weight_stride_row, kTallRows) ||
      !encode(kernel.x, p.dtype, p.x, p.num_rows, p.k, p.x_stride_row, tokens))
    return cudaErrorNotSupported;
  return dispatch(p.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    if (tokens == 16) return launch_tall_tokens<T, 16>(kernel, num_sms, stream);
    return tokens == 32 ? launch_tall_tokens<T, 32>(kernel, num_sms, stream)
                        : launch_tall_tokens<T, 64>(kernel, num_sms, stream);
  });
}

}  // namespace nanovllm::kernels::decode_linear
