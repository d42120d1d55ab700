// Picks the prefill kernel: Hopper's where it fits device, shape and strides, else the one for every GPU from
// sm_80.
#include "kernels/paged_attention_prefill.cuh"

namespace nanovllm::kernels {

cudaError_t launch_paged_attention_prefill(const PagedAttentionPrefillParams& p, cudaStream_t stream) {
  const cudaError_t status = launch_paged_attention_prefill_sm90(p, stream);
  return status == cudaErrorNotSupported ? launch_paged_attention_prefill_mma(p, stream) : status;
}

}  // namespace nanovllm::kernels
