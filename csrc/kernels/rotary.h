// The rotary table and each token's row of it, as every operator that rotates sees them.
#pragma once
#include <cstdint>

namespace nanovllm {

constexpr int64_t kMaxHeadDim = 512;  // of the CUDA kernels that rotate

struct Rotary {
  const float* cos_sin;      // [max_pos, dim] cos half, then sin half; contiguous
  const int64_t* positions;  // [num_tokens], in [0, max_pos)
  int64_t max_pos;
  int32_t dim;  // even, <= head_dim: features i and dim / 2 + i are a pair, those from dim on pass through
};

}  // namespace nanovllm
