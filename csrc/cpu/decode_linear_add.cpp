#include "kernels/decode_linear_add.h"

#include <algorithm>

#include "cpu/decode_linear.h"
#include "cpu/simd.h"

namespace nanovllm::cpu {
namespace {

template <class T>
void add(const DecodeLinearAddParams& p, const std::vector<float>& sums) {
  const int64_t rows = p.linear.num_rows, width = p.linear.n;
  const T* weight = static_cast<const T*>(p.norm_weight);
  std::fill_n(p.squares, (width + kSquaresWidth - 1) / kSquaresWidth * rows, 0.0f);
  for (int64_t m = 0; m < rows; ++m)
    for (int64_t n = 0; n < width; ++n) {
      T* residual = static_cast<T*>(p.linear.out) + m * p.linear.out_stride_row + n;
      T y;
      store(&y, sums[m * width + n]);
      store(residual, to_float(*residual) + to_float(y));
      const float r = to_float(*residual);
      store(static_cast<T*>(p.scaled) + m * p.scaled_stride_row + n, r * to_float(weight[n]));
      p.squares[n / kSquaresWidth * rows + m] += r * r;
    }
}

}  // namespace

void decode_linear_add(const DecodeLinearAddParams& p) {
  const std::vector<float> sums = decode_sums(p.linear);
  p.linear.dtype == DType::kFloat32 ? add<float>(p, sums) : add<BFloat16>(p, sums);
}

}  // namespace nanovllm::cpu
