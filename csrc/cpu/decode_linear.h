// The sums of a decode step's product, which its operators share.
#pragma once
#include <vector>

#include "kernels/decode_linear.h"

namespace nanovllm::cpu {

/// x @ weight.T, over rms(x) where there are squares, + bias: [num_rows, n] fp32.
std::vector<float> decode_sums(const DecodeLinearParams& p);

}  // namespace nanovllm::cpu
