#include "kernels/qk_norm_rope_store.h"

#include "cpu/kv_cache.h"
#include "cpu/rotary.h"

namespace nanovllm::cpu {
namespace {

template <class T>
NV_INLINE void rows(const QkNormRopeStoreParams& p, int64_t begin, int64_t end) {
  const int64_t d = p.cache.head_dim;
  for (int64_t t = begin; t < end; ++t) {
    const float* cos_sin = p.rotary.cos_sin + p.rotary.positions[t] * p.rotary.dim;
    T* q = static_cast<T*>(p.qkv) + t * p.qkv_stride_row;
    T* k = q + p.num_q_heads * d;
    T* v = k + p.cache.num_kv_heads * d;
    for (T* head = q; head < k; head += d)
      norm_rotate_head(head, static_cast<const T*>(p.q_weight), d, p.eps, cos_sin, p.rotary.dim);
    for (T* head = k; head < v; head += d)
      norm_rotate_head(head, static_cast<const T*>(p.k_weight), d, p.eps, cos_sin, p.rotary.dim);
    store_token(p.cache, t, k, d, v, d);
  }
}
NV_MULTIVERSION void rows_f32(const QkNormRopeStoreParams& p, int64_t begin, int64_t end) {
  rows<float>(p, begin, end);
}
NV_MULTIVERSION void rows_bf16(const QkNormRopeStoreParams& p, int64_t begin, int64_t end) {
  rows<BFloat16>(p, begin, end);
}

}  // namespace

void qk_norm_rope_store(const QkNormRopeStoreParams& p) {
  check_positions("qk_norm_rope_store", p.rotary, p.num_tokens);
  check_slots("qk_norm_rope_store", p.cache, p.num_tokens);
  const auto body = p.dtype == DType::kFloat32 ? rows_f32 : rows_bf16;
  parallel_rows(p.num_tokens, (p.num_q_heads + 2 * p.cache.num_kv_heads) * p.cache.head_dim,
                [&](int64_t begin, int64_t end) { body(p, begin, end); });
}

}  // namespace nanovllm::cpu
