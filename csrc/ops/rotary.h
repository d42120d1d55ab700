// The checks of heads that are normed and rotated.
#pragma once
#include "common/check.h"
#include "kernels/rotary.h"

namespace nanovllm::ops {

inline void check_norm_weights(const char* op, const std::optional<Tensor>& q_weight,
                               const std::optional<Tensor>& k_weight, ScalarType dtype, Dim& head_dim) {
  for (auto [arg, weight] : {std::pair{"q_weight", &q_weight}, std::pair{"k_weight", &k_weight}}) {
    if (!weight->has_value()) continue;
    check_shape(op, arg, **weight, {head_dim});
    check_dtype(op, arg, **weight, dtype);
    check_contiguous(op, arg, **weight);
  }
}

/// The result has no positions.
inline Rotary check_cos_sin(const char* op, const Tensor& cos_sin, const Dim& head_dim) {
  Dim max_pos{"max_pos"}, dim{"rotary_dim"};
  check_shape(op, "cos_sin", cos_sin, {max_pos, dim});
  check_dtype(op, "cos_sin", cos_sin, ScalarType::Float);
  check_contiguous(op, "cos_sin", cos_sin);
  check(dim.value % 2 == 0 && dim.value <= head_dim.value, op, "cos_sin",
        "expected an even rotary_dim of at most head_dim = ", head_dim.value, ", got ", dim.value);
  return {.cos_sin = static_cast<const float*>(cos_sin.data_ptr()),
          .positions = nullptr,
          .max_pos = max_pos.value,
          .dim = static_cast<int32_t>(dim.value)};
}

inline Rotary check_rotary(const char* op, const Tensor& cos_sin, const Tensor& positions, Dim& tokens,
                           const Dim& head_dim) {
#ifdef NV_CUDA
  check(head_dim.value <= kMaxHeadDim, op, head_dim.bound_by, "expected a head_dim of at most ", kMaxHeadDim,
        " on CUDA, got ", head_dim.value);
#endif
  Rotary rotary = check_cos_sin(op, cos_sin, head_dim);
  check_shape(op, "positions", positions, {tokens});
  check_dtype(op, "positions", positions, ScalarType::Long);
  check_contiguous(op, "positions", positions);
  rotary.positions = static_cast<const int64_t*>(positions.data_ptr());
  return rotary;
}

}  // namespace nanovllm::ops
