// The checks that the skinny operators share.
#pragma once
#include "common/check.h"
#include "kernels/skinny_linear.h"

namespace nanovllm::ops {

/// Checks everything but the weight's dtype; row_size(in_features) is the elements of a weight row.
template <class RowSize>
SkinnyLinearParams check_skinny(const char* op, const Tensor& out, const Tensor& x, const Tensor& weight,
                                const std::optional<Tensor>& bias, RowSize const& row_size) {
  Dim rows{"num_rows"}, n{"out_features"}, k{"in_features"};
  check_shape(op, "x", x, {rows, k});
  check_shape(op, "weight", weight, {n, row_size(k)});
  check_shape(op, "out", out, {rows, n});
  check(rows.value <= kSkinnyMaxRows, op, "x", "expected at most ", kSkinnyMaxRows, " rows, got ",
        rows.value);
  const DType dtype = check_activation(op, "x", x);
  check_dtype(op, "out", out, x.scalar_type());
  check_last_contiguous(op, "x", x);
  check_last_contiguous(op, "weight", weight);
  check_last_contiguous(op, "out", out);
  if (bias.has_value()) {
    check_shape(op, "bias", *bias, {n});
    check_dtype(op, "bias", *bias, x.scalar_type());
    check_contiguous(op, "bias", *bias);
  }
  return {out.data_ptr(), x.data_ptr(),  weight.data_ptr(), data_or_null<void>(bias), rows.value, n.value,
          k.value,        out.stride(0), x.stride(0),       weight.stride(0),         dtype};
}

}  // namespace nanovllm::ops
