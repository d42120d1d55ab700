// q[t, h], k[t, h] rotated in place by the angles of positions[t], NeoX pairing (rotary_embedding.h).
//
// blockIdx.x is the token; a group of lanes owns a head (head.cuh): 8 lanes for 128 features in packs of 16
// bytes, else one element a pack. Moves 4 bytes an element and 4 * rotary_dim bytes of the table a token:
// bound by memory.
//
// Trusted: positions are in [0, max_pos) (the caller; checking would wait for the device); head_dim is at
// most kMaxHeadDim (ops/rotary.h).
#include <algorithm>

#include "common/launch.cuh"
#include "kernels/head.cuh"
#include "kernels/rotary_embedding.h"

namespace nanovllm::kernels {
namespace {

constexpr int kThreads = 256;

template <class T, int kPack>
__global__ void __launch_bounds__(kThreads) rotary_embedding_kernel(const RotaryEmbeddingParams p) {
  launch_next_grid();
  const int64_t t = blockIdx.x;
  const int64_t head = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y;
  wait_for_previous_grid();
  if (head >= p.num_q_heads + p.num_k_heads) return;
  T* x = head < p.num_q_heads
             ? static_cast<T*>(p.q) + t * p.q_stride_row + head * p.q_stride_head
             : static_cast<T*>(p.k) + t * p.k_stride_row + (head - p.num_q_heads) * p.k_stride_head;
  const float* cos_sin = p.rotary.cos_sin + p.rotary.positions[t] * p.rotary.dim;
  Head<T, kPack> part(p.rotary, p.rotary.dim, threadIdx.x, blockDim.x);  // what passes through stays as it is
  part.load(x);
  part.norm_and_rotate(nullptr, 0.0f, cos_sin);
  part.store(x);
}

}  // namespace

cudaError_t launch_rotary_embedding(const RotaryEmbeddingParams& p, cudaStream_t stream) {
  return dispatch(p.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    constexpr int kPack = 8;
    const bool packed = head_fits_packs(p.rotary, p.rotary.dim, kPack) &&
                        is_aligned(p.q, {p.q_stride_row, p.q_stride_head}, sizeof(T), 16) &&
                        is_aligned(p.k, {p.k_stride_row, p.k_stride_head}, sizeof(T), 16);
    const int heads = p.num_q_heads + p.num_k_heads;
    if (heads == 0) return cudaSuccess;
    const int lanes = head_lanes(p.rotary.dim, p.rotary.dim, packed ? kPack : 1);
    const dim3 threads(lanes, std::min(heads, kThreads / lanes));
    const dim3 blocks(p.num_tokens, (heads + threads.y - 1) / threads.y);
    const auto kernel = packed ? rotary_embedding_kernel<T, kPack> : rotary_embedding_kernel<T, 1>;
    return launch_pdl(kernel, blocks, threads, 0, stream, p);
  });
}

}  // namespace nanovllm::kernels
