// The checks of a rotary table and positions.
#pragma once
#include "common/check.h"
#include "kernels/rotary.h"

namespace nanovllm::ops {

inline Rotary check_rotary(const char* op, const Tensor& cos_sin, const Tensor& positions, Dim& tokens,
                           const Dim& head_dim) {
#ifdef NV_CUDA
  check(head_dim.value <= kMaxHeadDim, op, head_dim.bound_by, "expected a head_dim of at most ", kMaxHeadDim,
        " on CUDA, got ", head_dim.value);
#endif
  Dim max_pos{"max_pos"}, dim{"rotary_dim"};
  check_shape(op, "cos_sin", cos_sin, {max_pos, dim});
  check_dtype(op, "cos_sin", cos_sin, ScalarType::Float);
  check_contiguous(op, "cos_sin", cos_sin);
  check(dim.value % 2 == 0 && dim.value <= head_dim.value, op, "cos_sin",
        "expected an even rotary_dim of at most head_dim = ", head_dim.value, ", got ", dim.value);
  check_shape(op, "positions", positions, {tokens});
  check_dtype(op, "positions", positions, ScalarType::Long);
  check_contiguous(op, "positions", positions);
  return {.cos_sin = static_cast<const float*>(cos_sin.data_ptr()),
          .positions = static_cast<const int64_t*>(positions.data_ptr()),
          .max_pos = max_pos.value,
          .dim = static_cast<int32_t>(dim.value)};
}

}  // namespace nanovllm::ops
