// Norms, rotation, cache store and attention of one token a sequence: paged_attention_decode.cuh with the
// newest token from a row of projections (decode_newest.cuh). A block computes the key and value of the heads
// whose last tile is its own, and the queries of all its heads: little work, done again where a head is
// shared, for one launch fewer a layer.
//
// Trusted: as paged_attention_decode; a context is at most max_pos tokens, no two sequences share a newest
// slot (the caller).
#include "kernels/paged_attention_decode.cuh"

namespace nanovllm::kernels {

bool rope_attention_decode_takes(int64_t head_dim, int64_t rotary_dim) {
  return decode::rotates_in_lanes(head_dim, rotary_dim);
}

cudaError_t launch_rope_attention_decode(const RopeAttentionDecodeParams& p, cudaStream_t stream) {
  if (!decode::rotates_in_lanes(p.attention.head_dim, p.rotary_dim)) return cudaErrorInvalidValue;
  return decode::launch_on_device(p, stream);
}

}  // namespace nanovllm::kernels
