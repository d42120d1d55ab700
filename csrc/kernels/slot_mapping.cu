// Token t of sequence b: positions[t] = start_pos[b] + t - cu_seqlens_q[b], slots[t] from block_tables[b].
// positions, slots [num_tokens] int64; padding rows, past cu_seqlens_q[num_seqs] or
// of a sequence whose start_pos is negative, get position 0 and slot -1.
//
// A thread owns a token and finds its sequence by bisection of cu_seqlens_q, which stays in L1: about ten
// dependent loads for 512 sequences. Moves some 20 bytes a token: bound by the launch. After the host-side
// slot mapping of nano-vLLM, on the device so that the host sends block tables alone.
//
// Trusted: cu_seqlens_q rises from 0 (the caller). Any values are safe for memory: tokens are bounded by
// num_tokens here, sequences by num_seqs, and a position outside its table gets slot -1. block_size is a
// power of two (ops/kv_cache.h).
#include "common/launch.cuh"
#include "kernels/slot_mapping.h"

namespace nanovllm::kernels {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) slot_mapping_kernel(const SlotMappingParams p) {
  launch_next_grid();
  wait_for_previous_grid();
  const int64_t t = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (t >= p.num_tokens) return;
  int64_t position = 0, slot = -1;
  if (t < p.cu_seqlens_q[p.num_seqs]) {
    int64_t b = 0, end = p.num_seqs;  // cu_seqlens_q[b] <= t < cu_seqlens_q[end]
    while (end - b > 1) {
      const int64_t middle = (b + end) / 2;
      (p.cu_seqlens_q[middle] <= t ? b : end) = middle;
    }
    if (p.start_pos[b] >= 0) position = p.start_pos[b] + (t - p.cu_seqlens_q[b]);
    const int64_t block = position >> p.block_shift;
    if (p.start_pos[b] >= 0 && block < p.table_width) {
      const int64_t id = p.block_tables[b * p.table_stride_row + block];
      if (id >= 0) slot = (id << p.block_shift) + position - (block << p.block_shift);
    }
  }
  p.positions[t] = position;
  p.slots[t] = slot;
}

}  // namespace

cudaError_t launch_slot_mapping(const SlotMappingParams& p, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>((p.num_tokens + kThreads - 1) / kThreads);
  return launch_pdl(slot_mapping_kernel, blocks, kThreads, 0, stream, p);
}

}  // namespace nanovllm::kernels
