// k_cache[slot / block_size, slot % block_size] = k[t], so for v; slot -1 writes nothing.
// k, v [num_tokens, num_kv_heads, head_dim] bfloat16 or float16; caches of the same type, copied bit for bit,
// or float8_e4m3fn, which get x / scale rounded to nearest even, saturating at 448.
//
// A thread owns pack i of a token's row in both k and v: 8 elements, 16 bytes read, where pointers, strides
// and head_dim allow, else one element. It reads them before it knows the slot: one trip to memory, not two.
// threadIdx.x runs over the packs of a row, threadIdx.y over the tokens of a block, so neighbours touch
// neighbouring bytes. Moves 4 * num_kv_heads * head_dim * 2 bytes a token (3/4 of that into float8): bound by
// memory. After `reshape_and_cache_flash` of vLLM.
//
// Trusted: slots are -1 or inside the cache (the caller; checking would wait for the device), no two tokens
// share a slot, block_size is a power of two (ops/kv_cache.h), all offsets fit int64.
#include <algorithm>

#include "common/launch.cuh"
#include "kernels/cache_slot.cuh"
#include "kernels/store_kv_cache.h"

namespace nanovllm::kernels {
namespace {

constexpr int kThreads = 256;

template <class Source, class Cache, int kPack>
__global__ void __launch_bounds__(kThreads) store_kv_cache_kernel(const StoreKvCacheParams p) {
  using Packed = Pack<Source, kPack>;
  launch_next_grid();
  const KvCache& c = p.cache;
  const int64_t t = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int packs_per_head = static_cast<int>(c.head_dim) / kPack;
  wait_for_previous_grid();
  if (t >= p.num_tokens) return;
  const int64_t slot = c.slots[t];
  const float k_scale = c.k_scale == nullptr ? 1.0f : *c.k_scale;
  const float v_scale = c.v_scale == nullptr ? 1.0f : *c.v_scale;
  for (int i = threadIdx.x; i < c.num_kv_heads * packs_per_head; i += blockDim.x) {
    const int64_t head = i / packs_per_head, d = (i - head * packs_per_head) * kPack;
    const Source* from_k = static_cast<const Source*>(p.k) + t * p.k_stride_row + head * p.k_stride_head + d;
    const Source* from_v = static_cast<const Source*>(p.v) + t * p.v_stride_row + head * p.v_stride_head + d;
    const auto k = Packed::load(from_k), v = Packed::load(from_v);
    if (slot < 0) return;
    const CacheSlot at(c, slot);
    to_cache<Cache>(k, k_scale).store(static_cast<Cache*>(c.k) + at.k + head * c.k_stride_head + d);
    to_cache<Cache>(v, v_scale).store(static_cast<Cache*>(c.v) + at.v + head * c.v_stride_head + d);
  }
}

template <class Source, class Cache>
cudaError_t launch(const StoreKvCacheParams& p, cudaStream_t stream) {
  constexpr int kPack = 8;  // 16 bytes of k or v
  const KvCache& c = p.cache;
  const bool packed = c.head_dim % kPack == 0 && cache_fits_packs(c, sizeof(Cache), kPack) &&
                      is_aligned(p.k, {p.k_stride_row, p.k_stride_head}, sizeof(Source), 16) &&
                      is_aligned(p.v, {p.v_stride_row, p.v_stride_head}, sizeof(Source), 16);
  const int64_t row_packs = c.num_kv_heads * c.head_dim / (packed ? kPack : 1);
  const unsigned width = static_cast<unsigned>(std::min<int64_t>(row_packs, kThreads));
  const dim3 threads(width, kThreads / width);
  const dim3 blocks((p.num_tokens + threads.y - 1) / threads.y);
  const auto kernel =
      packed ? store_kv_cache_kernel<Source, Cache, kPack> : store_kv_cache_kernel<Source, Cache, 1>;
  return launch_pdl(kernel, blocks, threads, 0, stream, p);
}

}  // namespace

cudaError_t launch_store_kv_cache(const StoreKvCacheParams& p, cudaStream_t stream) {
  if (p.cache.dtype != DType::kFloat8E4M3) return launch<uint16_t, uint16_t>(p, stream);
  return dispatch(
      p.dtype, [&](auto* type) { return launch<std::remove_pointer_t<decltype(type)>, uint8_t>(p, stream); });
}

}  // namespace nanovllm::kernels
