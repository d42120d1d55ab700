#include "kernels/rotary_embedding.h"

#include "cpu/rotary.h"

namespace nanovllm::cpu {
namespace {

template <class T>
NV_INLINE void rows(const RotaryEmbeddingParams& p, int64_t begin, int64_t end) {
  const T* no_weight = nullptr;
  for (int64_t t = begin; t < end; ++t) {
    const float* cos_sin = p.rotary.cos_sin + p.rotary.positions[t] * p.rotary.dim;
    T* q = static_cast<T*>(p.q) + t * p.q_stride_row;
    T* k = static_cast<T*>(p.k) + t * p.k_stride_row;
    for (int64_t h = 0; h < p.num_q_heads; ++h)
      norm_rotate_head(q + h * p.q_stride_head, no_weight, p.head_dim, 0.0f, cos_sin, p.rotary.dim);
    for (int64_t h = 0; h < p.num_k_heads; ++h)
      norm_rotate_head(k + h * p.k_stride_head, no_weight, p.head_dim, 0.0f, cos_sin, p.rotary.dim);
  }
}
NV_MULTIVERSION void rows_f32(const RotaryEmbeddingParams& p, int64_t begin, int64_t end) {
  rows<float>(p, begin, end);
}
NV_MULTIVERSION void rows_bf16(const RotaryEmbeddingParams& p, int64_t begin, int64_t end) {
  rows<BFloat16>(p, begin, end);
}

}  // namespace

void rotary_embedding(const RotaryEmbeddingParams& p) {
  check_positions("rotary_embedding", p.rotary, p.num_tokens);
  const auto body = p.dtype == DType::kFloat32 ? rows_f32 : rows_bf16;
  parallel_rows(p.num_tokens, (p.num_q_heads + p.num_k_heads) * p.head_dim,
                [&](int64_t begin, int64_t end) { body(p, begin, end); });
}

}  // namespace nanovllm::cpu
