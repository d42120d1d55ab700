#include "kernels/store_kv_cache.h"

#include "cpu/kv_cache.h"

namespace nanovllm::cpu {
namespace {

template <class T>
NV_INLINE void rows(const StoreKvCacheParams& p, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t)
    store_token(p.cache, t, static_cast<const T*>(p.k) + t * p.k_stride_row, p.k_stride_head,
                static_cast<const T*>(p.v) + t * p.v_stride_row, p.v_stride_head);
}
NV_MULTIVERSION void rows_f32(const StoreKvCacheParams& p, int64_t begin, int64_t end) {
  rows<float>(p, begin, end);
}
NV_MULTIVERSION void rows_bf16(const StoreKvCacheParams& p, int64_t begin, int64_t end) {
  rows<BFloat16>(p, begin, end);
}

}  // namespace

void store_kv_cache(const StoreKvCacheParams& p) {
  check_slots("store_kv_cache", p.cache, p.num_tokens);
  const auto body = p.dtype == DType::kFloat32 ? rows_f32 : rows_bf16;
  parallel_rows(p.num_tokens, 2 * p.cache.num_kv_heads * p.cache.head_dim,
                [&](int64_t begin, int64_t end) { body(p, begin, end); });
}

}  // namespace nanovllm::cpu
