// Trusted: token ids are in the table (the caller); an id outside reads row 0.
#include "kernels/embed_rms_norm.h"
#include "kernels/row_norm.cuh"

namespace nanovllm::kernels {

cudaError_t launch_embed_rms_norm(const EmbedRmsNormParams& p, cudaStream_t stream) {
  const RowNormParams rows{{.out = p.out,
                            .residual = p.residual,
                            .x = p.table,
                            .weight = p.weight,
                            .num_tokens = p.num_tokens,
                            .hidden = p.hidden,
                            .out_stride_row = p.out_stride_row,
                            .residual_stride_row = p.residual_stride_row,
                            .x_stride_row = p.table_stride_row,
                            .eps = p.eps,
                            .dtype = p.dtype},
                           p.token_ids,
                           p.vocab};
  return launch_row_norm<Residual::kSet>(rows, stream);
}

}  // namespace nanovllm::kernels
