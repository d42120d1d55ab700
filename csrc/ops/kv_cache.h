// The checks of a paged cache that an operator writes.
#pragma once
#include <bit>

#include "common/check.h"
#include "kernels/kv_cache.h"

namespace nanovllm::ops {

/// A block size is a power of two: a slot splits with a shift.
inline int32_t check_block_size(const char* op, const char* arg, int64_t block_size) {
  check(block_size > 0 && std::has_single_bit(static_cast<uint64_t>(block_size)), op, arg,
        "expected a block size that is a power of two, got ", block_size);
  return std::countr_zero(static_cast<uint64_t>(block_size));
}

/// `source` is the dtype of the new keys and values, named `source_arg`; the three dimensions may be bound.
inline KvCache check_kv_cache(const char* op, const Tensor& k_cache, const Tensor& v_cache,
                              const Tensor& slots, const std::optional<Tensor>& k_scale,
                              const std::optional<Tensor>& v_scale, DType source, ScalarType source_type,
                              Dim& tokens, Dim& kv_heads, Dim& head_dim) {
  Dim blocks{"num_blocks"}, block_size{"block_size"};
  check_shape(op, "k_cache", k_cache, {blocks, block_size, kv_heads, head_dim});
  check_shape(op, "v_cache", v_cache, {blocks, block_size, kv_heads, head_dim});
  check_shape(op, "slots", slots, {tokens});
  check_dtype(op, "slots", slots, ScalarType::Long);
  check_contiguous(op, "slots", slots);
  check_last_contiguous(op, "k_cache", k_cache);
  check_last_contiguous(op, "v_cache", v_cache);
  const bool float8 = k_cache.scalar_type() == ScalarType::Float8_e4m3fn;
  check(float8 || k_cache.scalar_type() == source_type, op, "k_cache", "expected dtype ", name(source_type),
        " (of the new keys) or float8_e4m3fn, got ", name(k_cache.scalar_type()));
  check_dtype(op, "v_cache", v_cache, k_cache.scalar_type());
  for (auto [arg, scale] : {std::pair{"k_scale", &k_scale}, std::pair{"v_scale", &v_scale}}) {
    if (!scale->has_value()) continue;
    check(float8, op, arg, "expected None for a ", name(source_type), " cache, got a tensor");
    check_shape(op, arg, **scale, {1});
    check_dtype(op, arg, **scale, ScalarType::Float);
  }
  return {.k = k_cache.data_ptr(),
          .v = v_cache.data_ptr(),
          .slots = static_cast<const int64_t*>(slots.data_ptr()),
          .k_scale = data_or_null<float>(k_scale),
          .v_scale = data_or_null<float>(v_scale),
          .num_blocks = blocks.value,
          .head_dim = head_dim.value,
          .k_stride_block = k_cache.stride(0),
          .k_stride_slot = k_cache.stride(1),
          .k_stride_head = k_cache.stride(2),
          .v_stride_block = v_cache.stride(0),
          .v_stride_slot = v_cache.stride(1),
          .v_stride_head = v_cache.stride(2),
          .num_kv_heads = static_cast<int32_t>(kv_heads.value),
          .block_shift = check_block_size(op, "k_cache", block_size.value),
          .dtype = float8 ? DType::kFloat8E4M3 : source};
}

}  // namespace nanovllm::ops
