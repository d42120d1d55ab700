// The products of a decode step: y = x @ weight.T + bias for up to kDecodeLinearMaxRows rows, and what they
// share. decode_linear: out = y, or of a weight of gate rows above as many up rows silu(gate) * up.
//
// A norm may be split over two products: the first leaves x = residual * norm_weight and partial sums of the
// squares of residual, the second multiplies its sums by 1 / rms = 1 / sqrt(sum of squares / k + eps).
#pragma once
#include "common/dtype.h"
#ifdef NV_CUDA
#include <cuda_runtime_api.h>
#endif

namespace nanovllm {

constexpr int64_t kDecodeLinearMaxRows = 256;
constexpr int64_t kSquaresWidth = 64;  // elements of a row that a partial sum is of

/// Partial sums of squares of rows.
struct Squares {
  float* data;  // [parts, num_rows] contiguous; null: no norm
  int64_t parts;
  float eps;
};

struct DecodeLinearParams {
  void* __restrict__ out;           // [num_rows, n], or [num_rows, n / 2] with silu_and_mul
  const void* __restrict__ x;       // [num_rows, k]
  const void* __restrict__ weight;  // [n, k]
  const void* __restrict__ bias;    // [n], or null
  Squares squares;                  // of the rows before their norm
  int32_t* workspace;               // CUDA: [decode_linear_workspace_numel], all ones, or null
  int64_t num_rows, n, k;
  int64_t out_stride_row, x_stride_row, weight_stride_row;  // elements
  bool silu_and_mul;
  bool weight_complete;  // CUDA: weight and bias are older than the previous kernel of the stream
  DType dtype;
};

namespace cpu {
void decode_linear(const DecodeLinearParams& p);
}
#ifdef NV_CUDA
namespace kernels {
cudaError_t launch_decode_linear(const DecodeLinearParams& p, cudaStream_t stream);
/// int32 elements of a workspace for a device.
int64_t decode_linear_workspace_numel(int device);
}  // namespace kernels
#endif

}  // namespace nanovllm
