// In place in qkv [num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim]: each q and k head gets its RMS
// norm (where there is a weight) and its rotation; then k, as rounded there, and v go to their cache slots,
// over their scale and rounded to nearest even where the cache is float8_e4m3fn; slot -1 writes nothing.
//
// blockIdx.x is the token; a group of lanes owns a head (head.cuh): 8 lanes for 128 features in packs of 16
// bytes, where pointers, strides and dimensions allow, else one element a pack. A token's heads share its row
// of the table through L1. Moves 4 bytes an element of q, 6 of k and 4 of v, and 4 * rotary_dim bytes of the
// table: bound by memory.
//
// Trusted: positions are in [0, max_pos), slots are -1 or inside the cache, no two tokens share a slot (the
// caller; checking would wait for the device); head_dim is at most kMaxHeadDim (ops/rotary.h); block_size is
// a power of two (ops/kv_cache.h).
#include <algorithm>

#include "common/launch.cuh"
#include "kernels/cache_slot.cuh"
#include "kernels/head.cuh"
#include "kernels/qk_norm_rope_store.h"

namespace nanovllm::kernels {
namespace {

constexpr int kThreads = 256;

template <class T, class Cache, int kPack>
__global__ void __launch_bounds__(kThreads, kPack == 1 ? 1 : 4)
    qk_norm_rope_store_kernel(const QkNormRopeStoreParams p) {
  launch_next_grid();
  const KvCache& c = p.cache;
  const int64_t t = blockIdx.x;
  const int head = blockIdx.y * blockDim.y + threadIdx.y;
  const int first_k = p.num_q_heads, first_v = first_k + c.num_kv_heads;
  wait_for_previous_grid();
  if (head >= first_v + c.num_kv_heads) return;
  const bool is_k = head >= first_k && head < first_v, is_v = head >= first_v;
  const int64_t slot = is_k || is_v ? c.slots[t] : -1;
  const int64_t position = is_v ? 0 : p.rotary.positions[t];
  const float* scale = is_v ? c.v_scale : c.k_scale;
  const float divisor = scale == nullptr ? 1.0f : *scale;
  T* x = static_cast<T*>(p.qkv) + t * p.qkv_stride_row + head * c.head_dim;
  Head<T, kPack> part(p.rotary, c.head_dim, threadIdx.x, blockDim.x);
  part.load(x);
  if (!is_v) {
    part.norm_and_rotate(static_cast<const T*>(is_k ? p.k_weight : p.q_weight), p.eps,
                         p.rotary.cos_sin + position * p.rotary.dim);
    part.store(x);
  }
  if (slot < 0) return;
  const CacheSlot at(c, slot);
  Cache* to = is_v ? static_cast<Cache*>(c.v) + at.v + (head - first_v) * c.v_stride_head
                   : static_cast<Cache*>(c.k) + at.k + (head - first_k) * c.k_stride_head;
  part.for_packs(
      [&](const Pack<T, kPack>& pack, int element) { to_cache<Cache>(pack, divisor).store(to + element); });
}

template <class T, class Cache>
cudaError_t launch(const QkNormRopeStoreParams& p, cudaStream_t stream) {
  constexpr int kPack = 8;
  const KvCache& c = p.cache;
  const bool packed = head_fits_packs(p.rotary, c.head_dim, kPack) &&
                      cache_fits_packs(c, sizeof(Cache), kPack) &&
                      is_aligned(p.qkv, {p.qkv_stride_row}, sizeof(T), 16) &&
                      is_aligned(p.q_weight, {}, sizeof(T), 16) && is_aligned(p.k_weight, {}, sizeof(T), 16);
  const int heads = p.num_q_heads + 2 * c.num_kv_heads;
  const int lanes = head_lanes(c.head_dim, p.rotary.dim, packed ? kPack : 1);
  const dim3 threads(lanes, std::min(heads, kThreads / lanes));
  const dim3 blocks(p.num_tokens, (heads + threads.y - 1) / threads.y);
  const auto kernel =
      packed ? qk_norm_rope_store_kernel<T, Cache, kPack> : qk_norm_rope_store_kernel<T, Cache, 1>;
  return launch_pdl(kernel, blocks, threads, 0, stream, p);
}

}  // namespace

cudaError_t launch_qk_norm_rope_store(const QkNormRopeStoreParams& p, cudaStream_t stream) {
  return dispatch(p.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return p.cache.dtype == DType::kFloat8E4M3 ? launch<T, uint8_t>(p, stream) : launch<T, T>(p, stream);
  });
}

}  // namespace nanovllm::kernels
