// Token t of sequence b: positions[t] = start_pos[b] + t - cu_seqlens_q[b],
// slots[t] = block_tables[b, position / block_size] * block_size + position % block_size.
#pragma once
#include <cstdint>
#ifdef NV_CUDA
#include <cuda_runtime_api.h>
#endif

namespace nanovllm {

struct SlotMappingParams {
  int64_t* __restrict__ positions;           // [num_tokens]; 0 past the last sequence
  int64_t* __restrict__ slots;               // [num_tokens]; -1 past the last sequence and where no block is
  const int32_t* __restrict__ block_tables;  // [num_seqs, table_width], negative: no block
  const int32_t* __restrict__ cu_seqlens_q;  // [num_seqs + 1], from 0, non-decreasing
  const int32_t* __restrict__ start_pos;     // [num_seqs]
  int64_t num_tokens, num_seqs, table_width;
  int64_t table_stride_row;  // elements
  int32_t block_shift;       // block_size = 1 << block_shift
};

namespace cpu {
void slot_mapping(const SlotMappingParams& p);
}
#ifdef NV_CUDA
namespace kernels {
cudaError_t launch_slot_mapping(const SlotMappingParams& p, cudaStream_t stream);
}
#endif

}  // namespace nanovllm
