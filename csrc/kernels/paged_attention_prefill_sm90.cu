// out[i, h] = softmax(scale * q[i, h] . K^T) @ V, causal from the end of each context, on Hopper's wgmma.
//
// One block an SM, 12 warps: warps 0 and 1 copy K and V (and Q) by tensor maps into rings of two 128-key
// tiles (keys of an e4m3 cache: four more warps, through registers, to float16, as which the products run),
// warp 2 deals out the work, and two warpgroups own 64 query tokens each of a 128-token tile of one query
// head. They walk the keys from the diagonal down: while the tensor cores do Q . K^T of a tile and P . V of
// the one before, a warpgroup's softmax of the one before runs in the shadow of the other warpgroup's
// products (they take turns by two named barriers). P goes to wgmma from registers. Paged keys arrive as one
// box a page and 64 columns, packed ones as if they were one page. 4 * head_dim operations a (query, key)
// pair: bound by the tensor cores. After Shah and others, FlashAttention-3.
//
// Trusted: as in paged_attention_prefill_mma.cu.
#include <cuda.h>

#include <algorithm>
#include <string_view>

#include "common/pack.cuh"
#include "common/tensor_map.h"
#include "kernels/prefill_load.cuh"

// Passes for other architectures leave the kernel's body out, and its parts without a use.
#pragma nv_diag_suppress 177

namespace nanovllm::kernels {
using namespace prefill;
namespace {

/// Registers of a thread by role; together what the launch gives a block, more would be waited for for ever.
template <class Cache>
struct Roles {
  static constexpr bool kWidened = sizeof(Cache) == 1;  // loaded by a warpgroup of its own, through registers
  static constexpr int kThreads = 128 * (1 + kConsumers + kWidened);
  static constexpr int kLean = kWidened ? 24 : 40, kWide = kWidened ? 208 : 232, kLoading = 72;
  static constexpr int kLaunched = 65536 / kThreads / 8 * 8;
  static_assert(kLean + kConsumers * kWide + kWidened * kLoading <= kThreads / 128 * kLaunched);
  static constexpr int kLoaders = kWidened ? 2 : 1;  // warps of a key tile, and of a value tile
};

/// S = Q . K^T of this warpgroup's 64 rows, asynchronously.
template <class T, int kHeadDim>
__device__ void start_scores(float (&s)[kKeys / 2], uint32_t q_rows, uint32_t k_tile) {
  wgmma_fence();
#pragma unroll
  for (int d = 0; d < kHeadDim; d += 16) {
    const uint32_t column = d % 64 * 2;
    wgmma_ss<T>(s, wgmma_descriptor(q_rows + d / 64 * kRows * kRowBytes + column, 16),
                wgmma_descriptor(k_tile + d / 64 * kKeys * kRowBytes + column, 16), d > 0);
  }
  wgmma_commit();
}

/// O += P . V, asynchronously.
template <class T, int kHeadDim>
__device__ void start_output(float (&o)[kHeadDim / 2], uint32_t (&probs)[kKeys / 4], uint32_t v_tile) {
  wgmma_fence();
#pragma unroll
  for (int n = 0; n < kKeys; n += 16)
    wgmma_rs<T>(o, &probs[n / 4], wgmma_descriptor(v_tile + n * kRowBytes, kKeys * kRowBytes), 1);
  wgmma_commit();
}

/// Rows from `first` on of a tile become 0: their probability is 0, and what was there may be NaN.
template <int kHeadDim>
__device__ void clear_rows(uint8_t* tile, int first, int barrier) {
  const int packs = (kKeys - first) * (kRowBytes / 16);
  for (int half = 0; half < Shared<kHeadDim>::kHalves; ++half)
    for (int i = threadIdx.x % 128; i < packs; i += 128)
      reinterpret_cast<uint4*>(tile + (half * kKeys + first) * kRowBytes)[i] = {};
  fence_async_shared();
  named_barrier_sync(barrier, 128);
}

/// 4 words of each of 4 neighbouring lanes, transposed: word i of lane j becomes word j of lane i.
__device__ inline void transpose_quad(uint32_t (&x)[4]) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int step = 1; step <= 2; step *= 2)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const bool high = lane & step;
      const uint32_t got = __shfl_xor_sync(~0u, high ? x[i] : x[i + step], step);
      (high ? x[i] : x[i + step]) = got;
    }
}

template <class Out, int kHeadDim>
__device__ void store_output(const KernelParams& p, const Work& w, const float (&o)[kHeadDim / 2],
                             const OnlineSoftmax& softmax, float scale, int first_row) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float inverse = softmax.inverse_sum(i) * scale;
    const int row = first_row + 8 * i + lane / 4;
    Out* out = static_cast<Out*>(p.op.out) + (w.first_row + int64_t{row}) * p.op.out_stride_row +
               w.head * p.op.out_stride_head;
#pragma unroll
    for (int d = 0; d < kHeadDim; d += 32) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* x = &o[d / 2 + 4 * j + 2 * i];
        words[j] = pack_pair<Out>(x[0] * inverse, x[1] * inverse);
      }
      if (p.out_aligned) {
        transpose_quad(words);
        if (row < w.rows)
          *reinterpret_cast<uint4*>(out + d + lane % 4 * 8) = {words[0], words[1], words[2], words[3]};
      } else if (row < w.rows) {
#pragma unroll
        for (int j = 0; j < 4; ++j) store_pair(out + d + 8 * j + lane % 4 * 2, words[j]);
      }
    }
  }
}

/// What a warpgroup computes: a stream of key tiles that runs on from one item of work to the next, so that
/// the last P . V of an item and the first Q . K^T of the next are one step like any other.
template <class Out, class Cache, int kHeadDim>
__device__ void attend(const KernelParams& p, Shared<kHeadDim>& shared, const int warpgroup) {
  using T = MmaType<Out, Cache>;
  constexpr bool kWidened = Roles<Cache>::kWidened;
  constexpr int kTileBytes = kKeys * kHeadDim * 2;
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  const uint32_t q_rows = shared_address(shared.q) + warpgroup * 64 * kRowBytes;
  const uint32_t k_tiles = shared_address(shared.k), v_tiles = shared_address(shared.v);
  const uint32_t k_full = shared_address(shared.k_full), k_empty = shared_address(shared.k_empty);
  const uint32_t v_full = shared_address(shared.v_full), v_empty = shared_address(shared.v_empty);
  const int own_barrier = 1 + kConsumers + warpgroup;  // of the warpgroup alone
  const float scale_log2 = p.scale_log2 * (!kWidened || p.op.k_scale == nullptr ? 1.0f : *p.op.k_scale);
  const float v_scale = !kWidened || p.op.v_scale == nullptr ? 1.0f : *p.op.v_scale;
  const int my_turn = 1 + warpgroup, next_turn = 1 + (warpgroup + 1) % kConsumers;
  RingPosition<kWorkSlots> at;
  RingPosition<kStages> k_stage, v_stage;
  RingPosition<kQueryStages> q_stage;
  float s[kKeys / 2] = {}, o[kHeadDim / 2] = {}, shrink[2];
  uint32_t probs[kKeys / 4];
  OnlineSoftmax softmax;
  Work w;
  int tile;  // whose scores are computed, and whose keys first_column is in
  int position;

  auto release = [&](uint32_t barrier) {
    if (lane == 0) mbarrier_arrive(barrier);
  };
  auto take_work = [&] {
    mbarrier_wait(shared_address(&shared.work_full[at.slot]), at.parity);
    const Work next = shared.work[at.slot];
    mbarrier_arrive(shared_address(&shared.work_empty[at.slot]));
    at.advance();
    return next;
  };
  auto begin = [&](const Work& next) {
    w = next;
    tile = w.num_tiles() - 1;
    position = w.position + 64 * warpgroup + 16 * warp + lane / 4;
    softmax = {};
    mbarrier_wait(shared_address(&shared.q_full[q_stage.slot]), q_stage.parity);
    if constexpr (!std::is_same_v<Out, T>)
      queries_to_float16<kHeadDim>(shared.q[q_stage.slot], warpgroup, own_barrier);
  };
  auto scores = [&] {
    start_scores<T, kHeadDim>(s, q_rows + q_stage.slot * kRows * kHeadDim * 2,
                              k_tiles + k_stage.slot * kTileBytes);
  };
  auto output = [&] {
    mbarrier_wait(v_full + v_stage.slot * 8, v_stage.parity);
    start_output<T, kHeadDim>(o, probs, v_tiles + v_stage.slot * kTileBytes);
  };
  /// Scores of `tile` become probabilities.
  auto weigh = [&](auto masked) {
    pin_registers(s);
    release(k_empty + k_stage.slot * 8);
    k_stage.advance();
    if constexpr (masked) mask_scores(s, tile * kKeys + lane % 4 * 2, position);
    softmax.add<masked>(s, shrink, scale_log2);
    pin_registers(s);  // all of the softmax before the wait, under P . V
  };
  auto finish_output = [&] {
    wgmma_wait<0>();
    pin_registers(o);
    pin_registers(probs);
    release(v_empty + v_stage.slot * 8);
    v_stage.advance();
  };
  /// Scores of `tile`, and P . V of the one before.
  auto start_step = [&] {
    mbarrier_wait(k_full + k_stage.slot * 8, k_stage.parity);
    named_barrier_sync(my_turn, 256);
    scores();
    output();
    named_barrier_arrive(next_turn, 256);
    wgmma_wait<1>();
  };
  auto step = [&](auto masked) {
    start_step();
    weigh(masked);
    finish_output();
    scale_rows(o, shrink);
    round_probs<T>(probs, s);
  };
  /// The first tile of an item is in probs; its values past the context may be NaN.
  auto clear_past_context = [&] {
    if (kWidened || w.context >= (tile + 1) * kKeys) return;
    mbarrier_wait(v_full + v_stage.slot * 8, v_stage.parity);
    clear_rows<kHeadDim>(shared.v[v_stage.slot], w.context - tile * kKeys, own_barrier);
  };

  const Work first = take_work();
  if (first.head < 0) return;
  if (warpgroup == kConsumers - 1) named_barrier_arrive(next_turn, 256);
  begin(first);
  mbarrier_wait(k_full + k_stage.slot * 8, k_stage.parity);
  scores();
  wgmma_wait<0>();
  weigh(std::true_type{});
  round_probs<T>(probs, s);
  for (;;) {
    clear_past_context();
    const int first_position = w.position + 64 * warpgroup;  // of the warpgroup
    for (--tile; tile >= 0 && tile * kKeys + kKeys - 1 > first_position; --tile) step(std::true_type{});
    for (; tile >= 0; --tile) step(std::false_type{});
    release(shared_address(&shared.q_empty[q_stage.slot]));
    q_stage.advance();
    const Work next = take_work();
    const Work done = w;
    const OnlineSoftmax total = softmax;
    if (next.head < 0) {
      output();
      finish_output();
      store_output<Out, kHeadDim>(p, done, o, total, v_scale, 64 * warpgroup + 16 * warp);
      break;
    }
    begin(next);
    start_step();
    weigh(std::true_type{});
    finish_output();
    round_probs<T>(probs, s);
    store_output<Out, kHeadDim>(p, done, o, total, v_scale, 64 * warpgroup + 16 * warp);
    for (float& x : o) x = 0;
  }
  // The turn that nobody will take: leave no arrival pending.
  if (warpgroup == 0) named_barrier_sync(my_turn, 256);
}

template <class Out, class Cache, int kHeadDim>
__global__ void __launch_bounds__(Roles<Cache>::kThreads, 1)
    paged_attention_prefill_sm90_kernel(const __grid_constant__ KernelParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using R = Roles<Cache>;
  extern __shared__ uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<Shared<kHeadDim>*>(shared_bytes +
                                                      (1024 - shared_address(shared_bytes) % 1024) % 1024);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&p.q);
    if (!R::kWidened) {
      prefetch_tensor_map(&p.k);
      prefetch_tensor_map(&p.v);
    }
    constexpr int kReaders = 4 * kConsumers;  // warps
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(shared_address(&shared.k_full[i]), R::kLoaders);
      mbarrier_init(shared_address(&shared.v_full[i]), R::kLoaders);
      mbarrier_init(shared_address(&shared.k_empty[i]), kReaders);
      mbarrier_init(shared_address(&shared.v_empty[i]), kReaders);
    }
    for (int i = 0; i < kQueryStages; ++i) {
      mbarrier_init(shared_address(&shared.q_full[i]), 1);
      mbarrier_init(shared_address(&shared.q_empty[i]), kReaders);
    }
    for (int i = 0; i < kWorkSlots; ++i) {
      mbarrier_init(shared_address(&shared.work_full[i]), 1);
      mbarrier_init(shared_address(&shared.work_empty[i]), 32 * (kReaders + 2 * R::kLoaders));
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0) % 4;
  if (warpgroup == 0) {
    set_max_registers_down<R::kLean>();
    if (warp == 2)
      deal_work<kHeadDim>(p.op, shared);
    else if (warp < 2 && !R::kWidened)
      copy_tiles<kHeadDim>(p, shared, warp == 0);
  } else if (warpgroup <= kConsumers) {
    set_max_registers_up<R::kWide>();
    attend<Out, Cache, kHeadDim>(p, shared, warpgroup - 1);
  } else {
    set_max_registers_down<R::kLoading>();
    widen_tiles<kHeadDim>(p, shared, warp < 2, warp % 2 * kKeys / 2);
  }
#endif
}

// ---- host ----

/// [d, row, head, block] with 64 columns and `rows` rows a box. False: the driver takes no such map.
bool encode(CUtensorMap& map, const Params& p, const void* data, int64_t rows, int64_t heads, int64_t blocks,
            int64_t stride_row, int64_t stride_head, int64_t stride_block, int box_rows) {
  const auto encode_tiled = tensor_map_encoder();
  if (encode_tiled == nullptr) return false;
  // A dimension of one element is never stepped over, and may come with any stride.
  auto bytes = [&](int64_t size, int64_t stride) {
    return static_cast<cuuint64_t>(size == 1 ? p.head_dim : stride) * 2;
  };
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(p.head_dim), static_cast<cuuint64_t>(rows),
                               static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(blocks)};
  const cuuint64_t strides[3] = {bytes(rows, stride_row), bytes(heads, stride_head),
                                 bytes(blocks, stride_block)};
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(box_rows), 1, 1}, steps[4] = {1, 1, 1, 1};
  const auto type =
      p.dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return encode_tiled(&map, type, 4, const_cast<void*>(data), sizes, strides, box, steps,
                      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <class Out, class Cache, int kHeadDim>
cudaError_t launch(const KernelParams& p, int num_sms, cudaStream_t stream) {
  constexpr int kBytes = sizeof(Shared<kHeadDim>) + 1024;  // room to align
  const auto kernel = paged_attention_prefill_sm90_kernel<Out, Cache, kHeadDim>;
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (status != cudaSuccess) return status;
  const int64_t tiles = std::min(p.op.num_tokens, p.op.num_tokens / kRows + p.op.batch) * p.op.num_q_heads;
  kernel<<<std::min<int64_t>(num_sms, tiles), Roles<Cache>::kThreads, kBytes, stream>>>(p);
  return cudaGetLastError();
}

template <class Out, class Cache>
cudaError_t launch(const KernelParams& p, int num_sms, cudaStream_t stream) {
  return p.op.head_dim == 64 ? launch<Out, Cache, 64>(p, num_sms, stream)
                             : launch<Out, Cache, 128>(p, num_sms, stream);
}

template <class Out>
cudaError_t launch(const KernelParams& p, int num_sms, cudaStream_t stream) {
  return p.op.kv_dtype == DType::kFloat8E4M3 ? launch<Out, uint8_t>(p, num_sms, stream)
                                             : launch<Out, Out>(p, num_sms, stream);
}

}  // namespace

cudaError_t launch_paged_attention_prefill_sm90(const Params& p, cudaStream_t stream) {
  constexpr bool kBuilt = std::string_view(NV_CUDA_ARCHS).find("9.0a") != std::string_view::npos;
  int device = 0, major = 0, num_sms = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  if (!kBuilt || major != 9 || (p.head_dim != 64 && p.head_dim != 128)) return cudaErrorNotSupported;
  const bool paged = p.block_tables != nullptr;
  KernelParams kernel{.op = p,
                      .block_shift = 30,
                      .page_rows = kKeys,
                      .scale_log2 = p.scale * kLog2E,
                      .out_aligned = is_aligned(p.out, {p.out_stride_row, p.out_stride_head}, 2, 16)};
  if (paged) {
    kernel.page_rows = static_cast<int>(std::min<int64_t>(p.block_size, kKeys));
    for (kernel.block_shift = 0; (int64_t{1} << kernel.block_shift) < p.block_size;) ++kernel.block_shift;
  }
  const int64_t rows = paged ? p.block_size : p.num_tokens, blocks = paged ? p.num_blocks : 1;
  bool encoded =
      encode(kernel.q, p, p.q, p.num_tokens, p.num_q_heads, 1, p.q_stride_row, p.q_stride_head, 0, kRows);
  if (p.kv_dtype == p.dtype)
    encoded = encoded &&
              encode(kernel.k, p, p.k, rows, p.num_kv_heads, blocks, p.k_stride_slot, p.k_stride_head,
                     p.k_stride_block, kernel.page_rows) &&
              encode(kernel.v, p, p.v, rows, p.num_kv_heads, blocks, p.v_stride_slot, p.v_stride_head,
                     p.v_stride_block, kernel.page_rows);
  if (!encoded) return cudaErrorNotSupported;
  return p.dtype == DType::kBFloat16 ? launch<__nv_bfloat16>(kernel, num_sms, stream)
                                     : launch<__half>(kernel, num_sms, stream);
}

}  // namespace nanovllm::kernels
