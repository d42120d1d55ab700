// A whole decode step of a dense decoder for a few rows, from token ids to logits, in one persistent kernel.
#pragma once
#include <cstdint>

#include "common/dtype.h"
#ifdef NV_CUDA
#include <cuda_runtime_api.h>
#endif

namespace nanovllm {

constexpr int kDecoderStepMaxRows = 8;
constexpr int kDecoderStepMaxHidden = 4096;
constexpr int kDecoderStepMaxGroup = 8;  // query heads of a KV head
constexpr int kDecoderStepMaxLayers = 128;

/// The weights of a layer, bfloat16, contiguous, aligned to 16 bytes: a row of `layers` as 64-bit addresses.
struct DecoderStepLayer {
  const void* input_norm;    // [hidden]
  const void* qkv;           // [(num_q_heads + 2 * num_kv_heads) * head_dim, hidden]
  const void* qkv_bias;      // [(num_q_heads + 2 * num_kv_heads) * head_dim], or null
  const void* q_norm;        // [head_dim], or null
  const void* k_norm;        // [head_dim], or null
  const void* o;             // [hidden, num_q_heads * head_dim]
  const void* o_bias;        // [hidden], or null
  const void* post_norm;     // [hidden]
  const void* gate_up;       // [2 * intermediate, hidden], gate above up
  const void* gate_up_bias;  // [2 * intermediate], or null
  const void* down;          // [hidden, intermediate]
  const void* down_bias;     // [hidden], or null
};
constexpr int64_t kDecoderStepPointers = sizeof(DecoderStepLayer) / sizeof(void*);

struct DecoderStepParams {
  void* __restrict__ logits;              // [rows, vocab], contiguous
  uint32_t* __restrict__ workspace;       // [workspace_numel], all ones before the first launch
  void* kv_cache;                         // [2, num_layers, num_blocks, block_size, num_kv_heads, head_dim]
  const int64_t* __restrict__ token_ids;  // [rows]
  const int32_t* __restrict__ block_tables;     // [rows, max_blocks]
  const int32_t* __restrict__ context_lens;     // [rows], this step's token included; 0: padding
  const DecoderStepLayer* __restrict__ layers;  // [num_layers]
  const void* __restrict__ embedding;           // [vocab, hidden]
  const void* __restrict__ norm;                // [hidden]
  const void* __restrict__ lm_head;             // [vocab, hidden]
  const float* __restrict__ cos_sin;            // [max_pos, rotary_dim], cos half, then sin half
  int64_t kv_stride, stride_layer, stride_block, stride_slot, stride_head;  // of kv_cache, elements
  int64_t table_stride_row, max_blocks, max_pos;
  int32_t rows, num_layers, hidden, intermediate, vocab;
  int32_t num_q_heads, num_kv_heads, head_dim, rotary_dim, block_shift;  // block_size = 1 << block_shift
  float eps;
};

#ifdef NV_CUDA
namespace kernels {
/// Hopper only.
bool decoder_step_runs_on(int device);
/// The largest hidden of these heads, MLP and vocabulary: the blocks have so much of the residual stream.
int64_t decoder_step_max_hidden(int device, const DecoderStepParams& p);
/// 32-bit words that a launch on `device` needs.
int64_t decoder_step_workspace_numel(int device, const DecoderStepParams& p);
cudaError_t launch_decoder_step(const DecoderStepParams& p, cudaStream_t stream);
}  // namespace kernels
#endif

}  // namespace nanovllm
