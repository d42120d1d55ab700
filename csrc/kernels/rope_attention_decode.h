// Norms, rotation, cache store and attention of one token per sequence, from its row of projections.
#pragma once
#include "kernels/paged_attention_decode.h"

namespace nanovllm {

struct RopeAttentionDecodeParams {
  /// q: the rows of projections, whose first heads are the queries, then the keys, then the values. The
  /// caches are written where each context's newest token is.
  PagedAttentionDecodeParams attention;
  const void* __restrict__ q_weight;  // [head_dim] of attention.dtype; null: no norm
  const void* __restrict__ k_weight;  // [head_dim]; null: no norm
  const float* __restrict__ cos_sin;  // [max_pos, rotary_dim] cos half, then sin half; contiguous
  int64_t max_pos, rotary_dim;
  float eps;
};

namespace cpu {
void rope_attention_decode(const RopeAttentionDecodeParams& p);
}
#ifdef NV_CUDA
namespace kernels {
/// Whether launch_rope_attention_decode takes heads of this shape.
bool rope_attention_decode_takes(int64_t head_dim, int64_t rotary_dim);
cudaError_t launch_rope_attention_decode(const RopeAttentionDecodeParams& p, cudaStream_t stream);
}  // namespace kernels
#endif

}  // namespace nanovllm
