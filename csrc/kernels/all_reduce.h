// sum[t] = x[t] of all ranks, added up; out[t] = sum[t] or, with a residual, residual[t] += sum[t] and
// out[t] = residual[t] / sqrt(mean(residual[t]^2) + eps) * weight
#pragma once
#include "common/dtype.h"
#ifdef NV_CUDA
#include <cuda_runtime_api.h>
#endif

namespace nanovllm {

struct AllReduceParams {
  void* out;           // [num_rows, hidden]
  void* residual;      // [num_rows, hidden] or null
  const void* x;       // [num_rows, hidden]; may be `out`
  const void* weight;  // [hidden]; null without residual
  // [num_ranks + 1] addresses: each rank's exchange buffer, then this rank's abort words
  const int64_t* peers;
  // [5]: epoch, blocks that are done, bytes of the last call by one shot and by two, whether all was aborted
  int32_t* state;
  int64_t num_rows, hidden;
  int64_t slot_bytes;    // of one source in one shot
  int64_t shared_bytes;  // of the largest message in two shots
  int num_ranks, rank;
  bool two_shot;
  float eps;
  DType dtype;
};

#ifdef NV_CUDA
namespace kernels {
cudaError_t launch_all_reduce(const AllReduceParams& p, cudaStream_t stream);
}
#endif

}  // namespace nanovllm
