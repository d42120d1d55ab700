// k_cache[slot / block_size, slot % block_size] = k[t], so for v; slot -1 writes nothing.
// k, v [num_tokens, num_kv_heads, head_dim] bfloat16 or float16; caches of the same type, copied bit for bit,
// or float8_e4m3fn, which get x / scale rounded to nearest even, saturating at 448.
//
// A thread owns pack i of a token's row in both k and v (two loads in flight): 8 elements, 16 bytes read,
// where pointers, strides and head_dim allow, else one element. threadIdx.x runs over the packs of a row,
// threadIdx.y over the tokens of a block, so neighbours touch neighbouring bytes. Moves 4 * num_kv_heads *
// head_dim * 2 bytes a token (3/4 of that into float8): bound by memory. After `reshape_and_cache_flash` of
// vLLM.
//
// Trusted: slots are -1 or inside the cache (the caller; checking would wait for the device), no two tokens
// share a slot, block_size is a power of two (ops/kv_cache.h), all offsets fit int64.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>

#include "common/pack.cuh"
#include "kernels/store_kv_cache.h"

namespace nanovllm::kernels {
namespace {

constexpr int kThreads = 256;

__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ float to_float(__half x) { return __half2float(x); }

/// One pack into the cache: as it is (uint16_t), or over its scale into float8 (uint8_t).
template <class Source, int kPack>
__device__ void store_pack(const Pack<Source, kPack>& x, uint16_t* to, float) {
  x.store(to);
}
template <class Source, int kPack>
__device__ void store_pack(const Pack<Source, kPack>& x, uint8_t* to, float scale) {
  Pack<uint8_t, kPack> codes;
#pragma unroll
  for (int i = 0; i < kPack; ++i)
    codes.data[i] = __nv_cvt_float_to_fp8(to_float(x.data[i]) / scale, __NV_SATFINITE, __NV_E4M3);
  codes.store(to);
}

template <class Source, class Cache, int kPack>
__global__ void __launch_bounds__(kThreads) store_kv_cache_kernel(const StoreKvCacheParams p) {
  const KvCache& c = p.cache;
  const int64_t t = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (t >= p.num_tokens) return;
  const int64_t slot = c.slots[t];
  if (slot < 0) return;
  const int64_t block = slot >> c.block_shift, row = slot - (block << c.block_shift);
  const int64_t k_row = block * c.k_stride_block + row * c.k_stride_slot;
  const int64_t v_row = block * c.v_stride_block + row * c.v_stride_slot;
  const float k_scale = c.k_scale == nullptr ? 1.0f : *c.k_scale;
  const float v_scale = c.v_scale == nullptr ? 1.0f : *c.v_scale;
  const int packs_per_head = static_cast<int>(c.head_dim) / kPack;
  for (int i = threadIdx.x; i < c.num_kv_heads * packs_per_head; i += blockDim.x) {
    const int64_t head = i / packs_per_head, d = (i - head * packs_per_head) * kPack;
    using Packed = Pack<Source, kPack>;
    const auto k =
        Packed::load(static_cast<const Source*>(p.k) + t * p.k_stride_row + head * p.k_stride_head + d);
    const auto v =
        Packed::load(static_cast<const Source*>(p.v) + t * p.v_stride_row + head * p.v_stride_head + d);
    store_pack(k, static_cast<Cache*>(c.k) + k_row + head * c.k_stride_head + d, k_scale);
    store_pack(v, static_cast<Cache*>(c.v) + v_row + head * c.v_stride_head + d, v_scale);
  }
}

template <class Source, class Cache>
cudaError_t launch(const StoreKvCacheParams& p, cudaStream_t stream) {
  constexpr int kPack = 8;  // 16 bytes of k or v
  constexpr int64_t kSource = sizeof(Source), kCache = sizeof(Cache);
  const KvCache& c = p.cache;
  const bool packed =
      c.head_dim % kPack == 0 &&
      is_aligned(p.k, {p.k_stride_row, p.k_stride_head}, kSource, kPack * kSource) &&
      is_aligned(p.v, {p.v_stride_row, p.v_stride_head}, kSource, kPack * kSource) &&
      is_aligned(c.k, {c.k_stride_block, c.k_stride_slot, c.k_stride_head}, kCache, kPack * kCache) &&
      is_aligned(c.v, {c.v_stride_block, c.v_stride_slot, c.v_stride_head}, kCache, kPack * kCache);
  const int64_t row_packs = c.num_kv_heads * c.head_dim / (packed ? kPack : 1);
  const unsigned width = static_cast<unsigned>(std::min<int64_t>(row_packs, kThreads));
  const dim3 threads(width, kThreads / width);
  const unsigned blocks = static_cast<unsigned>((p.num_tokens + threads.y - 1) / threads.y);
  if (packed)
    store_kv_cache_kernel<Source, Cache, kPack><<<blocks, threads, 0, stream>>>(p);
  else
    store_kv_cache_kernel<Source, Cache, 1><<<blocks, threads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_store_kv_cache(const StoreKvCacheParams& p, cudaStream_t stream) {
  if (p.cache.dtype != DType::kFloat8E4M3) return launch<uint16_t, uint16_t>(p, stream);
  return p.dtype == DType::kBFloat16 ? launch<__nv_bfloat16, uint8_t>(p, stream)
                                     : launch<__half, uint8_t>(p, stream);
}

}  // namespace nanovllm::kernels
