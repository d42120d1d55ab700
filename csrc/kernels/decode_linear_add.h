// residual += x @ weight.T + bias, and the halves of the norm that follows: scaled = residual * norm_weight,
// and partial sums of the squares of residual
#pragma once
#include "kernels/decode_linear.h"

namespace nanovllm {

struct DecodeLinearAddParams {
  DecodeLinearParams linear;             // out is the residual
  void* __restrict__ scaled;             // [num_rows, n], row stride scaled_stride_row
  const void* __restrict__ norm_weight;  // [n]
  float* __restrict__ squares;           // [ceil(n / kSquaresWidth), num_rows] contiguous
  int64_t scaled_stride_row;             // elements
};

namespace cpu {
void decode_linear_add(const DecodeLinearAddParams& p);
}
#ifdef NV_CUDA
namespace kernels {
cudaError_t launch_decode_linear_add(const DecodeLinearAddParams& p, cudaStream_t stream);
}
#endif

}  // namespace nanovllm
