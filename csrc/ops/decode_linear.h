// The checks that the products of a decode step share.
#pragma once
#include "common/check.h"
#include "kernels/decode_linear.h"

namespace nanovllm::ops {

constexpr int64_t kDecodeLinearPack = 8;  // elements: what the kernel copies at once

/// A matrix whose rows the kernel copies: contiguous, and on CUDA aligned to packs.
inline void check_packed_rows(const char* op, const char* arg, const Tensor& t) {
  check_last_contiguous(op, arg, t);
#ifdef NV_CUDA
  check(t.size(0) <= 1 || t.stride(0) % kDecodeLinearPack == 0, op, arg, "expected a row stride that ",
        kDecodeLinearPack, " divides, got ", t.stride(0));
  check(reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0, op, arg, "expected an address that 16 divides");
#endif
}

/// Checks all but what is written; num_rows, n and k are bound here.
inline DecodeLinearParams check_decode_linear(const char* op, Dim& rows, Dim& n, Dim& k, const Tensor& x,
                                              const Tensor& weight, const std::optional<Tensor>& bias,
                                              bool weight_complete, const std::optional<Tensor>& workspace) {
  check_shape(op, "x", x, {rows, k});
  check_shape(op, "weight", weight, {n, k});
  check(rows.value <= kDecodeLinearMaxRows, op, "x", "expected at most ", kDecodeLinearMaxRows, " rows, got ",
        rows.value);
  check(k.value > 0 && k.value % kDecodeLinearPack == 0, op, "x", "expected in_features that ",
        kDecodeLinearPack, " divides, got ", k.value);
  const DType dtype = check_activation(op, "x", x);
  check_dtype(op, "weight", weight, x.scalar_type());
  check_packed_rows(op, "x", x);
  check_packed_rows(op, "weight", weight);
  if (bias.has_value()) {
    check_shape(op, "bias", *bias, {n});
    check_dtype(op, "bias", *bias, x.scalar_type());
    check_contiguous(op, "bias", *bias);
  }
  if (workspace.has_value()) {
    Dim numel{"workspace_numel"};
    check_shape(op, "workspace", *workspace, {numel});
    check_dtype(op, "workspace", *workspace, ScalarType::Int);
    check_contiguous(op, "workspace", *workspace);
#ifdef NV_CUDA
    const int device = x.get_device_index(), other = workspace->get_device_index();
    check(device == other, op, "workspace", "expected the device of x, cuda:", device, ", got cuda:", other);
    const int64_t needed = kernels::decode_linear_workspace_numel(device);
    check(numel.value >= needed, op, "workspace", "expected at least ", needed, " elements, got ",
          numel.value);
    check(reinterpret_cast<uintptr_t>(workspace->data_ptr()) % 16 == 0, op, "workspace",
          "expected an address that 16 divides");
#endif
  }
  return {.x = x.data_ptr(),
          .weight = weight.data_ptr(),
          .bias = data_or_null<void>(bias),
          .workspace = workspace.has_value() ? static_cast<int32_t*>(workspace->data_ptr()) : nullptr,
          .num_rows = rows.value,
          .n = n.value,
          .k = k.value,
          .x_stride_row = x.stride(0),
          .weight_stride_row = weight.stride(0),
          .weight_complete = weight_complete,
          .dtype = dtype};
}

/// squares [ceil(width / kSquaresWidth), num_rows] float32
inline void check_squares(const char* op, const Tensor& squares, Dim& rows, int64_t width) {
  check_shape(op, "squares", squares, {(width + kSquaresWidth - 1) / kSquaresWidth, rows});
  check_dtype(op, "squares", squares, ScalarType::Float);
  check_contiguous(op, "squares", squares);
}

}  // namespace nanovllm::ops
