// The product of cpu/skinny.h into fp32, then norm, bias and activation: right, and no faster than needed, as
// the engine's decode steps on CPU are skinny_linear's.
#include "cpu/decode_linear.h"

#include <cmath>

#include "cpu/skinny.h"

namespace nanovllm::cpu {
namespace {

NV_MULTIVERSION void columns_f32(const SkinnyLinearParams& p, SkinnyRows rows, int64_t begin, int64_t end) {
  dense_columns<float, float>(p, rows, begin, end);
}
NV_MULTIVERSION void columns_bf16(const SkinnyLinearParams& p, SkinnyRows rows, int64_t begin, int64_t end) {
  dense_columns<float, BFloat16>(p, rows, begin, end);
}

template <class T>
float rounded(float x) {
  T y;
  store(&y, x);
  return to_float(y);
}

template <class T>
void finish(const DecodeLinearParams& p, const std::vector<float>& sums) {
  const int64_t width = p.silu_and_mul ? p.n / 2 : p.n;
  for (int64_t m = 0; m < p.num_rows; ++m)
    for (int64_t i = 0; i < width; ++i) {
      float y = sums[m * p.n + i];
      if (p.silu_and_mul) {
        y = rounded<T>(y);
        y = y / (1.0f + std::exp(-y)) * rounded<T>(sums[m * p.n + width + i]);
      }
      store(static_cast<T*>(p.out) + m * p.out_stride_row + i, y);
    }
}

}  // namespace

std::vector<float> decode_sums(const DecodeLinearParams& p) {
  std::vector<float> sums(p.num_rows * p.n);
  const SkinnyLinearParams product{sums.data(), p.x, p.weight, nullptr,        p.num_rows,
                                   p.n,         p.k, p.n,      p.x_stride_row, p.weight_stride_row,
                                   p.dtype};
  const bool is_float = p.dtype == DType::kFloat32;
  const auto body = is_float ? columns_f32 : columns_bf16;
  parallel_columns(product,
                   [&](SkinnyRows rows, int64_t begin, int64_t end) { body(product, rows, begin, end); });
  for (int64_t m = 0; m < p.num_rows; ++m) {
    float scale = 1;
    if (p.squares.data != nullptr) {
      float total = 0;
      for (int64_t j = 0; j < p.squares.parts; ++j) total += p.squares.data[j * p.num_rows + m];
      scale = 1.0f / std::sqrt(total / static_cast<float>(p.k) + p.squares.eps);
    }
    for (int64_t n = 0; n < p.n; ++n) {
      float bias = 0;
      if (p.bias != nullptr)
        bias = is_float ? static_cast<const float*>(p.bias)[n]
                        : to_float(static_cast<const BFloat16*>(p.bias)[n]);
      sums[m * p.n + n] = sums[m * p.n + n] * scale + bias;
    }
  }
  return sums;
}

void decode_linear(const DecodeLinearParams& p) {
  const std::vector<float> sums = decode_sums(p);
  p.dtype == DType::kFloat32 ? finish<float>(p, sums) : finish<BFloat16>(p, sums);
}

}  // namespace nanovllm::cpu
