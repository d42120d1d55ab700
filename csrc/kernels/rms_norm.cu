#include "kernels/rms_norm.h"
#include "kernels/row_norm.cuh"

namespace nanovllm::kernels {

cudaError_t launch_rms_norm(const RmsNormParams& p, cudaStream_t stream) {
  const RowNormParams without_residual{{.out = p.out,
                                        .residual = nullptr,
                                        .x = p.x,
                                        .weight = p.weight,
                                        .num_tokens = p.num_tokens,
                                        .hidden = p.hidden,
                                        .out_stride_row = p.out_stride_row,
                                        .residual_stride_row = 0,
                                        .x_stride_row = p.x_stride_row,
                                        .eps = p.eps,
                                        .dtype = p.dtype}};
  return launch_row_norm<Residual::kNone>(without_residual, stream);
}

}  // namespace nanovllm::kernels
