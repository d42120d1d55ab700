// Attention of one query token a sequence, all keys and values in the cache: paged_attention_decode.cuh.
#include "kernels/paged_attention_decode.cuh"

namespace nanovllm::kernels {

int64_t decode_workspace_numel(int device, int64_t group, int64_t head_dim) {
  int blocks = 0;
  if (decode_grid(device, &blocks) != cudaSuccess) return 0;
  return decode::counters_numel(blocks) + blocks * 2 * group * (head_dim + 4);
}

cudaError_t launch_paged_attention_decode(const PagedAttentionDecodeParams& p, cudaStream_t stream) {
  return decode::launch_on_device(p, stream);
}

}  // namespace nanovllm::kernels
