// How one decode step is split over the contexts; read by paged_attention_decode in every layer.
#pragma once
#include "common/dtype.h"
#ifdef NV_CUDA
#include <cuda_runtime_api.h>
#endif

namespace nanovllm {

struct DecodePlanParams {
  int32_t* __restrict__ plan;                // [plan_numel], at least batch + 1 (CUDA: decode_plan_numel)
  const int32_t* __restrict__ context_lens;  // [batch]
  int64_t batch, plan_numel;
  int64_t num_kv_heads, block_size;
};

namespace cpu {
void decode_plan(const DecodePlanParams& p);
}
#ifdef NV_CUDA
namespace kernels {
/// Elements of a plan for a launch on `device`, whatever the batch.
int64_t decode_plan_numel(int device);
cudaError_t launch_decode_plan(const DecodePlanParams& p, cudaStream_t stream);
}  // namespace kernels
#endif

}  // namespace nanovllm
