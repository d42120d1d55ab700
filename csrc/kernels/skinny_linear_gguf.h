// skinny_linear with the weight in blocks of 32 quantised numbers, as GGUF files store it
#pragma once
#include "kernels/skinny_linear.h"

namespace nanovllm {

constexpr int64_t kGgufBlock = 32;  // weights

/// A block is its fp16 scale d, for Q4_1 an fp16 minimum m, then the quants.
enum class GgufQuant : int64_t { kQ4_0 = 2, kQ4_1 = 3, kQ8_0 = 8 };  // the ids of ggml

struct SkinnyLinearGgufParams {
  SkinnyLinearParams linear;  // weight: blocks, weight_stride_row in bytes
  GgufQuant quant;
};

namespace cpu {
void skinny_linear_gguf(const SkinnyLinearGgufParams& p);
}

}  // namespace nanovllm
