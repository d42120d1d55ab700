// One token per row: temperature, min-p, top-k, top-p, and the race of common/philox.h. Rows with a negative
// position are left out.
#pragma once
#include "common/dtype.h"
#ifdef NV_CUDA
#include <cuda_runtime_api.h>
#endif

namespace nanovllm {

struct SampleParams {
  int64_t* __restrict__ token_ids;        // [batch]
  int64_t* __restrict__ copies;           // [num_copies, batch], row stride below; or null
  const int32_t* __restrict__ copy;       // [1] which of them gets the token ids too; null without copies
  const void* __restrict__ logits;        // [batch, vocab], row stride below
  const float* __restrict__ temperature;  // [batch]
  const int32_t* __restrict__ top_k;      // [batch]
  const float* __restrict__ top_p;        // [batch]
  const float* __restrict__ min_p;        // [batch]
  const int64_t* __restrict__ seeds;      // [batch]
  const int64_t* __restrict__ positions;  // [batch]
  int64_t batch, vocab, num_copies;
  int64_t logits_stride_row, copies_stride_row;  // elements
  DType dtype;
};

namespace cpu {
void sample(const SampleParams& p);
}
#ifdef NV_CUDA
namespace kernels {
cudaError_t launch_sample(const SampleParams& p, cudaStream_t stream);
}
#endif

}  // namespace nanovllm
