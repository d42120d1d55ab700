#include "kernels/row_norm.cuh"

namespace nanovllm::kernels {

cudaError_t launch_add_rms_norm(const AddRmsNormParams& p, cudaStream_t stream) {
  return launch_row_norm<Residual::kAdd>({p}, stream);
}

}  // namespace nanovllm::kernels
