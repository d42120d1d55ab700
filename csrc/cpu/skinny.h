// The product of a few rows of x with tiles of 4 weight rows, which the skinny operators share. A tile meets
// some rows of x at a time in registers and stays in L1 for the next ones: 4 rows, 16 sums of 16 lanes, with
// AVX-512; 2 rows, 8 sums of 8 lanes, elsewhere, where a Vec is no register. Every sum runs over k in one
// order, then over its lanes in one tree, so a row's result does not depend on how many rows come with it.
#pragma once
#include <algorithm>
#include <vector>

#include "cpu/simd.h"
#include "kernels/skinny_linear.h"

namespace nanovllm::cpu {

constexpr int kTile = 4;  // weight rows, and at most as many rows of x

/// The rows of x in fp32.
struct SkinnyRows {
  const float* data;  // [num_rows, k]
  int64_t stride;
};

template <class T>
NV_INLINE void put(const SkinnyLinearParams& p, int64_t m, int64_t n, float x) {
  const float bias = p.bias ? to_float(static_cast<const T*>(p.bias)[n]) : 0.0f;
  store(static_cast<T*>(p.out) + m * p.out_stride_row + n, x + bias);
}

/// As `tile`, with narrow registers.
template <int kRows, class T, class W>
NV_INLINE void narrow_tile(const SkinnyLinearParams& p, SkinnyRows rows, const W* const (&w)[kTile],
                           int64_t m, int64_t n, int64_t weights) {
  constexpr int kHalf = kVec / 2;  // lanes of a HalfVec
  const float* x = rows.data + m * rows.stride;
  HalfVec acc[kRows][kTile] = {};
  int64_t k = 0;
  for (; k + kHalf <= p.k; k += kHalf) {
    HalfVec wv[kTile];
    for (int j = 0; j < kTile; ++j) wv[j] = load_vec<HalfVec>(w[j] + k);
    for (int i = 0; i < kRows; ++i) {
      const HalfVec xv = load_vec<HalfVec>(x + i * rows.stride + k);
      for (int j = 0; j < kTile; ++j) acc[i][j] += wv[j] * xv;
    }
  }
  for (int i = 0; i < kRows; ++i)
    for (int64_t j = 0; j < weights; ++j) {
      float total = sum(acc[i][j]);
      for (int64_t rest = k; rest < p.k; ++rest) total += to_float(w[j][rest]) * x[i * rows.stride + rest];
      put<T>(p, m + i, n + j, total);
    }
}

/// kRows rows of x from row m against the weight rows w; the first `weights` of them go to out, from column
/// n.
template <int kRows, class T, class W>
NV_INLINE void tile(const SkinnyLinearParams& p, SkinnyRows rows, const W* const (&w)[kTile], int64_t m,
                    int64_t n, int64_t weights) {
  const float* x = rows.data + m * rows.stride;
  Vec acc[kRows * kTile] = {};
  const auto step = [&](int64_t k, auto const& load) {
    Vec wv[kTile];
    for (int j = 0; j < kTile; ++j) wv[j] = load(w[j] + k);
    for (int i = 0; i < kRows; ++i) {
      const Vec xv = load(x + i * rows.stride + k);
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
    for (int64_t j = 0; j < weights; ++j) put<T>(p, m + i, n + j, total[i * kTile + j]);
}

/// All rows of x against a tile: weight row j of it starts at row_of(j). The last row is repeated up to a
/// full tile.
template <class T, class RowOf>
NV_INLINE void all_rows(const SkinnyLinearParams& p, SkinnyRows rows, int64_t n, int64_t weights,
                        RowOf const& row_of) {
  decltype(row_of(0)) w[kTile];
  for (int j = 0; j < kTile; ++j) w[j] = row_of(std::min<int64_t>(j, weights - 1));
  int64_t m = 0;
  if (!has_wide_registers()) {
    for (; m + 2 <= p.num_rows; m += 2) narrow_tile<2, T>(p, rows, w, m, n, weights);
    if (m < p.num_rows) narrow_tile<1, T>(p, rows, w, m, n, weights);
    return;
  }
  for (; m + kTile <= p.num_rows; m += kTile) tile<kTile, T>(p, rows, w, m, n, weights);
  if (p.num_rows - m == 3) tile<3, T>(p, rows, w, m, n, weights);
  if (p.num_rows - m == 2) tile<2, T>(p, rows, w, m, n, weights);
  if (p.num_rows - m == 1) tile<1, T>(p, rows, w, m, n, weights);
}

/// All rows of x against the rows begin .. end - 1 of a dense weight; out holds T, the weight W.
template <class T, class W>
NV_INLINE void dense_columns(const SkinnyLinearParams& p, SkinnyRows rows, int64_t begin, int64_t end) {
  const W* weight = static_cast<const W*>(p.weight);
  for (int64_t n = begin; n < end; n += kTile)
    all_rows<T>(p, rows, n, std::min<int64_t>(kTile, end - n),
                [&](int64_t j) { return weight + (n + j) * p.weight_stride_row; });
}

/// Runs body(rows, begin, end) over the weight rows, on several threads where there is work for them.
template <class Body>
void parallel_columns(const SkinnyLinearParams& p, Body const& body) {
  SkinnyRows rows{static_cast<const float*>(p.x), p.x_stride_row};
  std::vector<float> widened;  // a bfloat16 x is read n / 4 times: widen it once
  if (p.dtype == DType::kBFloat16) {
    widened.resize(p.num_rows * p.k);
    for (int64_t m = 0; m < p.num_rows; ++m)
      for (int64_t k = 0; k < p.k; ++k)
        widened[m * p.k + k] = to_float(static_cast<const BFloat16*>(p.x)[m * p.x_stride_row + k]);
    rows = {widened.data(), p.k};
  }
  const int64_t grain = std::max<int64_t>(kTile, 32768 / std::max<int64_t>(1, p.k));
  torch::stable::parallel_for(0, p.n, grain, [&](int64_t begin, int64_t end) { body(rows, begin, end); });
}

}  // namespace nanovllm::cpu
