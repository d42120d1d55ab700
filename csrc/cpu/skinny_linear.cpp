// Bound by reading the weight once: a tile of 4 weight rows meets up to 4 rows of x at a time in registers
// (16 sums of 16 lanes), and stays in L1 for the next 4 rows of x. Every sum runs over k in one order, then
// over its lanes in one tree, so a row's result does not depend on how many rows come with it.
#include "kernels/skinny_linear.h"

#include <algorithm>
#include <vector>

#include "cpu/simd.h"

namespace nanovllm::cpu {
namespace {

constexpr int kTile = 4;  // weight rows, and at most as many rows of x

/// `weights` weight rows (the last one repeated up to a full tile) from row n against kRows rows of x from
/// row m.
template <int kRows, class T>
NV_INLINE void tile(const SkinnyLinearParams& p, const float* x, int64_t x_stride, int64_t m, int64_t n,
                    int64_t weights) {
  const T* w[kTile];
  for (int j = 0; j < kTile; ++j)
    w[j] = static_cast<const T*>(p.weight) + (n + std::min<int64_t>(j, weights - 1)) * p.weight_stride_row;
  x += m * x_stride;
  Vec acc[kRows * kTile] = {};
  const auto step = [&](int64_t k, auto const& load) {
    Vec wv[kTile];
    for (int j = 0; j < kTile; ++j) wv[j] = load(w[j] + k);
    for (int i = 0; i < kRows; ++i) {
      const Vec xv = load(x + i * x_stride + k);
      for (int j = 0; j < kTile; ++j) acc[i * kTile + j] += wv[j] * xv;
    }
  };
  int64_t k = 0;
  for (; k + kVec <= p.k; k += kVec) step(k, [](auto* q) { return load_vec(q); });
  if (k < p.k) step(k, [&](auto* q) { return load_part(q, p.k - k); });
  Vec lanes[kRows == 3 ? 16 : kRows * kTile] = {};
  std::copy(std::begin(acc), std::end(acc), lanes);
  const Vec total = sums(lanes);
  for (int i = 0; i < kRows; ++i)
    for (int64_t j = 0; j < weights; ++j) {
      const float b = p.bias ? to_float(static_cast<const T*>(p.bias)[n + j]) : 0.0f;
      store(static_cast<T*>(p.out) + (m + i) * p.out_stride_row + n + j, total[i * kTile + j] + b);
    }
}

template <class T>
NV_INLINE void columns(const SkinnyLinearParams& p, const float* x, int64_t x_stride, int64_t begin,
                       int64_t end) {
  for (int64_t n = begin; n < end; n += kTile) {
    const int64_t weights = std::min<int64_t>(kTile, end - n);
    int64_t m = 0;
    for (; m + kTile <= p.num_rows; m += kTile) tile<kTile, T>(p, x, x_stride, m, n, weights);
    if (p.num_rows - m == 3) tile<3, T>(p, x, x_stride, m, n, weights);
    if (p.num_rows - m == 2) tile<2, T>(p, x, x_stride, m, n, weights);
    if (p.num_rows - m == 1) tile<1, T>(p, x, x_stride, m, n, weights);
  }
}
NV_MULTIVERSION void columns_f32(const SkinnyLinearParams& p, const float* x, int64_t x_stride, int64_t begin,
                                 int64_t end) {
  columns<float>(p, x, x_stride, begin, end);
}
NV_MULTIVERSION void columns_bf16(const SkinnyLinearParams& p, const float* x, int64_t x_stride,
                                  int64_t begin, int64_t end) {
  columns<BFloat16>(p, x, x_stride, begin, end);
}

}  // namespace

void skinny_linear(const SkinnyLinearParams& p) {
  const float* x = static_cast<const float*>(p.x);
  int64_t x_stride = p.x_stride_row;
  std::vector<float> widened;  // a bfloat16 x is read n / 4 times: widen it once
  if (p.dtype == DType::kBFloat16) {
    widened.resize(p.num_rows * p.k);
    for (int64_t m = 0; m < p.num_rows; ++m)
      for (int64_t k = 0; k < p.k; ++k)
        widened[m * p.k + k] = to_float(static_cast<const BFloat16*>(p.x)[m * p.x_stride_row + k]);
    x = widened.data();
    x_stride = p.k;
  }
  const auto body = p.dtype == DType::kFloat32 ? columns_f32 : columns_bf16;
  const int64_t grain = std::max<int64_t>(kTile, 32768 / std::max<int64_t>(1, p.k));
  torch::stable::parallel_for(0, p.n, grain,
                              [&](int64_t begin, int64_t end) { body(p, x, x_stride, begin, end); });
}

}  // namespace nanovllm::cpu
