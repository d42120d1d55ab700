// Checks that decode and prefill attention share.
#pragma once
#include "common/check.h"

namespace nanovllm::ops {

inline void check_heads(const char* op, const char* q_arg, int64_t num_q_heads, int64_t num_kv_heads,
                        int64_t head_dim) {
  check(num_kv_heads > 0 && num_q_heads % num_kv_heads == 0, op, q_arg,
        "expected num_q_heads to be a multiple of num_kv_heads = ", num_kv_heads, ", got ", num_q_heads);
#ifdef NV_CUDA
  check(head_dim == 64 || head_dim == 80 || head_dim == 96 || head_dim == 128 || head_dim == 256, op, q_arg,
        "expected head_dim 64, 80, 96, 128 or 256 on CUDA, got ", head_dim);
#else
  check(head_dim % 8 == 0, op, q_arg, "expected head_dim to be a multiple of 8 on CPU, got ", head_dim);
#endif
}

/// The element type of keys and values, both like q or both float8_e4m3fn.
inline DType check_cache(const char* op, const Tensor& q, const char* k_arg, const Tensor& k,
                         const char* v_arg, const Tensor& v, const std::optional<Tensor>& k_scale,
                         const std::optional<Tensor>& v_scale) {
  if (k.scalar_type() == ScalarType::Float8_e4m3fn) {
    check_dtype(op, v_arg, v, ScalarType::Float8_e4m3fn);
    check_last_contiguous(op, k_arg, k);
    check_last_contiguous(op, v_arg, v);
    for (auto [arg, scale] : {std::pair{"k_scale", &k_scale}, std::pair{"v_scale", &v_scale}}) {
      if (!scale->has_value()) continue;
      check_shape(op, arg, **scale, {1});
      check_dtype(op, arg, **scale, ScalarType::Float);
    }
    return DType::kFloat8E4M3;
  }
  for (auto [arg, scale] : {std::pair{"k_scale", &k_scale}, std::pair{"v_scale", &v_scale}})
    check(!scale->has_value(), op, arg, "expected None for a ", name(k.scalar_type()),
          " cache, got a tensor");
  check_dtype(op, k_arg, k, q.scalar_type());
  check_dtype(op, v_arg, v, q.scalar_type());
  check_last_contiguous(op, k_arg, k);
  check_last_contiguous(op, v_arg, v);
  return check_activation(op, k_arg, k);
}

#ifdef NV_CUDA
/// What 16-byte copies need of [..., head_dim] with these dimensions in front; one of size 1 has any stride.
inline void check_aligned(const char* op, const char* arg, const Tensor& t) {
  const int64_t elements = 16 / static_cast<int64_t>(t.element_size());
  check(reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0, op, arg,
        "expected a pointer aligned to 16 bytes");
  for (int64_t i = 0; i + 1 < t.dim(); ++i)
    check(t.size(i) <= 1 || t.stride(i) % elements == 0, op, arg, "expected a stride that is a multiple of ",
          elements, " in dimension ", i, ", got ", t.stride(i));
}

/// Not `check_block_size`: ops/kv_cache.h has that.
inline void check_cuda_block_size(const char* op, const char* arg, int64_t block_size) {
  check(block_size >= 16 && (block_size & (block_size - 1)) == 0, op, arg,
        "expected block_size to be a power of two from 16 on CUDA, got ", block_size);
}
#endif

}  // namespace nanovllm::ops
