// Writing one token's heads into the paged cache.
#pragma once
#include "common/check.h"
#include "cpu/e4m3.h"
#include "kernels/kv_cache.h"

namespace nanovllm::cpu {

/// Every slot is -1 or inside the cache. Called before the first write, so a bad slot changes nothing.
inline void check_slots(const char* op, const KvCache& cache, int64_t num_tokens) {
  const int64_t num_slots = cache.num_blocks << cache.block_shift;
  for (int64_t t = 0; t < num_tokens; ++t)
    ops::check(cache.slots[t] >= -1 && cache.slots[t] < num_slots, op, "slots",
               "expected -1 or a slot below ", num_slots, " (", cache.num_blocks, " blocks of ",
               int64_t{1} << cache.block_shift, "), got ", cache.slots[t], " for token ", t);
}

/// Heads x + h * x_stride_head of one token into cache + h * cache_stride_head; in e4m3, over their scale.
template <class T>
NV_INLINE void store_heads(const KvCache& cache, void* base, int64_t offset, int64_t cache_stride_head,
                           const T* x, int64_t x_stride_head, const float* scale) {
  for (int64_t h = 0; h < cache.num_kv_heads; ++h) {
    const T* from = x + h * x_stride_head;
    if (cache.dtype != DType::kFloat8E4M3) {
      std::memcpy(static_cast<T*>(base) + offset + h * cache_stride_head, from, cache.head_dim * sizeof(T));
      continue;
    }
    uint8_t* to = static_cast<uint8_t*>(base) + offset + h * cache_stride_head;
    const float divisor = scale == nullptr ? 1.0f : *scale;
    int64_t i = 0;
    for (; i + kVec <= cache.head_dim; i += kVec) store_e4m3(to + i, load_vec(from + i) / divisor, kVec);
    if (const int64_t n = cache.head_dim - i; n > 0) store_e4m3(to + i, load_part(from + i, n) / divisor, n);
  }
}

/// The k and v heads of token t into its slot; slot -1 writes nothing.
template <class T>
NV_INLINE void store_token(const KvCache& cache, int64_t t, const T* k, int64_t k_stride_head, const T* v,
                           int64_t v_stride_head) {
  const int64_t slot = cache.slots[t];
  if (slot < 0) return;
  const int64_t block = slot >> cache.block_shift, row = slot - (block << cache.block_shift);
  store_heads(cache, cache.k, block * cache.k_stride_block + row * cache.k_stride_slot, cache.k_stride_head,
              k, k_stride_head, cache.k_scale);
  store_heads(cache, cache.v, block * cache.v_stride_block + row * cache.v_stride_slot, cache.v_stride_head,
              v, v_stride_head, cache.v_scale);
}

}  // namespace nanovllm::cpu
