// logits = decoder(token_ids): embedding, all layers over the paged cache, last norm and head, for at most 8
// rows.
//
// A block a multiprocessor, all resident (a cooperative launch). Eight warps compute; two stream this
// block's share of all weights through shared memory, ahead of every wait (decoder_step_stream.cuh); one
// clears the exchange buffers. Five times a layer a vector goes from all blocks to all blocks, through L2,
// each word its own signal (common/exchange.cuh): q, k and v; the attention's output; the residual
// stream after it; the MLP's activations; the residual stream again. A block owns rows of every weight, so
// of every vector: no atomics, and results do not depend on timing.
//
// Values are rounded to bfloat16 where the layer-by-layer operators round them: after each product, each
// sum with the residual, and SiLU. A norm is rounded once too, but before its scale: the product is of x *
// weight, and its sums are scaled by 1 / rms(x), which no product has to wait for then.
//
// Bound by reading the weights and the context once: docs/kernels/decoder_step.md.
//
// Trusted: block tables name blocks of the cache within each context, and no two rows share a slot (the
// caller); shapes and alignment (ops/decoder_step.cpp).
#include <algorithm>

#include "kernels/decoder_step_warps.cuh"

namespace nanovllm::kernels {
namespace step {
namespace {

// The warps that compute are two warpgroups, among which registers are shared out; those that stream, the one
// that clears and one that only completes it are the third.
constexpr int kClearingWarp = kWarps + kStreamWarps;
constexpr int kAllThreads = kThreads + 128;
static_assert(kClearingWarp < kAllThreads / 32);
[[maybe_unused]] constexpr int kComputeRegisters = 216,
                               kOtherRegisters = 72;  // two warpgroups and one: 168 on average
constexpr int kSmemLimit = 232448;

template <int kDim, int kR>
__global__ void __launch_bounds__(kAllThreads, 1)
    decoder_step_kernel(const __grid_constant__ DecoderStepParams p, const __grid_constant__ Buffers at,
                        int num_slots) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(128) uint8_t memory[];
  auto& smem = *reinterpret_cast<Smem<kDim>*>(memory);
  const Layout layout = Layout::of<kDim, kR>(p);
  auto* layers = reinterpret_cast<DecoderStepLayer*>(memory + layout.layers);
#pragma unroll 1
  for (int i = threadIdx.x; i < p.num_layers * kDecoderStepPointers; i += kAllThreads)
    reinterpret_cast<uint64_t*>(layers)[i] = reinterpret_cast<const uint64_t*>(p.layers)[i];
  if (threadIdx.x / 32 == 1) smem.split.init(p);
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int i = 0; i < num_slots; ++i) {
      mbarrier_init(shared_address(&smem.full[i]), 32);
      mbarrier_init(shared_address(&smem.empty[i]), kWarps);
    }
    mbarrier_init_fence();
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < p.rows * p.rotary_dim; i += kAllThreads) {
    const int row = i / p.rotary_dim;
    const int64_t position =
        min(max(static_cast<int64_t>(p.context_lens[row]) - 1, int64_t{0}), p.max_pos - 1);
    smem.cos_sin[i] = p.cos_sin[position * p.rotary_dim + i % p.rotary_dim];
  }
  if (threadIdx.x < p.rows)
    smem.token[threadIdx.x] =
        min(max(p.token_ids[threadIdx.x], int64_t{0}), static_cast<int64_t>(p.vocab) - 1);
  __syncthreads();

  const Step<kDim, kR> step(p, at, smem, layers);
  const Ring ring{.slots = shared_address(memory + layout.ring),
                  .full = shared_address(smem.full),
                  .empty = shared_address(smem.empty),
                  .count = num_slots};
  const int warp = threadIdx.x / 32;
  if (warp < kWarps) {
    set_max_registers_up<kComputeRegisters>();
    step.compute({.ring = ring,
                  .activations = reinterpret_cast<uint4*>(memory + layout.activations),
                  .sums = smem.sums[0],
                  .squares = smem.squares,
                  .rows = p.rows,
                  .thread = static_cast<int>(threadIdx.x)});
  } else {
    set_max_registers_down<kOtherRegisters>();
    if (warp < kWarps + kStreamWarps)
      step.stream({ring, warp - kWarps});
    else if (warp == kClearingWarp)
      step.clear();
  }
#endif
}

/// Blocks of a launch: each has a tile of every matrix, on which `clear` relies.
int num_blocks(const DecoderStepParams& p, int num_sms) {
  const int qkv_tiles = (p.num_q_heads + 2 * p.num_kv_heads) * p.head_dim / 16;
  return std::min({num_sms, qkv_tiles, p.hidden / 8, p.intermediate / 8, (p.vocab + 15) / 16});
}

template <int kDim, int kR>
cudaError_t launch(const DecoderStepParams& p, int blocks, cudaStream_t stream) {
  const int ring = Layout::of<kDim, kR>(p).ring,
            slots = std::min((kSmemLimit - ring) / kSlotBytes, kMaxSlots);
  if (slots < kGroup) return cudaErrorInvalidConfiguration;
  const auto kernel = decoder_step_kernel<kDim, kR>;
  const int bytes = ring + slots * kSlotBytes;
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute cooperative{};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = kAllThreads;
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &cooperative;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, p, Buffers(p, blocks), slots);
}

template <int kDim>
cudaError_t launch(const DecoderStepParams& p, int blocks, cudaStream_t stream) {
  if (p.rows == 1) return launch<kDim, 1>(p, blocks, stream);
  if (p.rows == 2) return launch<kDim, 2>(p, blocks, stream);
  return p.rows <= 4 ? launch<kDim, 4>(p, blocks, stream) : launch<kDim, 8>(p, blocks, stream);
}

}  // namespace
}  // namespace step

bool decoder_step_runs_on(int device) {
  int major = 0;
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         major == 9;
}

int64_t decoder_step_max_hidden(int device, const DecoderStepParams& p) {
  int num_sms = 0;
  cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  return std::min<int64_t>(kDecoderStepMaxHidden,
                           int64_t{step::kMaxTiles} * 8 * step::num_blocks(p, num_sms));
}

int64_t decoder_step_workspace_numel(int device, const DecoderStepParams& p) {
  int num_sms = 0;
  cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  return step::Buffers(p, num_sms).total;
}

cudaError_t launch_decoder_step(const DecoderStepParams& p, cudaStream_t stream) {
  int device = 0, num_sms = 0;
  if (const cudaError_t status = cudaGetDevice(&device); status != cudaSuccess) return status;
  const cudaError_t status = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess) return status;
  const int blocks = step::num_blocks(p, num_sms);
  return p.head_dim == 64 ? step::launch<64>(p, blocks, stream) : step::launch<128>(p, blocks, stream);
}

}  // namespace nanovllm::kernels
