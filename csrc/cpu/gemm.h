// A small fp32 matrix product for operands that are packed and stay in L1 or L2, in vectors V.
#pragma once
#include "cpu/simd.h"

namespace nanovllm::cpu {

/// c[kRows][kCols vectors] = (kAdd ? c : 0) + a[kRows][inner] . b[inner][kCols vectors], the sums in
/// registers.
template <class V, bool kAdd, int kRows, int kCols>
NV_INLINE void gemm_block(float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t ldb,
                          int64_t inner) {
  constexpr int kWidth = kLanes<V>;
  V acc[kRows][kCols];
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < kCols; ++j) acc[r][j] = kAdd ? load_vec<V>(c + r * ldc + j * kWidth) : V{};
  for (int64_t k = 0; k < inner; ++k) {
    V bv[kCols];
    for (int j = 0; j < kCols; ++j) bv[j] = load_vec<V>(b + k * ldb + j * kWidth);
    for (int r = 0; r < kRows; ++r) {
      const V av = V{} + a[r * lda + k];
      for (int j = 0; j < kCols; ++j) acc[r][j] += av * bv[j];
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < kCols; ++j) store_vec(c + r * ldc + j * kWidth, acc[r][j]);
}

template <class V, bool kAdd, int kRows>
NV_INLINE void gemm_rows(float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t ldb,
                         int64_t cols, int64_t inner) {
  constexpr int kWidth = kLanes<V>, kCols = kIsWide<V> ? 4 : 2;  // registers: 6 * 4 of 32 or 6 * 2 of 16
  int64_t j = 0;
  for (; j + kCols * kWidth <= cols; j += kCols * kWidth)
    gemm_block<V, kAdd, kRows, kCols>(c + j, ldc, a, lda, b + j, ldb, inner);
  for (; j < cols; j += kWidth) gemm_block<V, kAdd, kRows, 1>(c + j, ldc, a, lda, b + j, ldb, inner);
}

/// c[rows][cols] = (kAdd ? c : 0) + a[rows][inner] . b[inner][cols]; cols is a multiple of kVec.
template <class V, bool kAdd>
NV_INLINE void gemm(float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t ldb,
                    int64_t rows, int64_t cols, int64_t inner) {
  int64_t r = 0;
  for (; r + 6 <= rows; r += 6)
    gemm_rows<V, kAdd, 6>(c + r * ldc, ldc, a + r * lda, lda, b, ldb, cols, inner);
  for (; r + 2 <= rows; r += 2)
    gemm_rows<V, kAdd, 2>(c + r * ldc, ldc, a + r * lda, lda, b, ldb, cols, inner);
  if (r < rows) gemm_rows<V, kAdd, 1>(c + r * ldc, ldc, a + r * lda, lda, b, ldb, cols, inner);
}

/// Lane j of row i becomes lane i of row j: halves swapped at three or four widths.
NV_INLINE void transpose(HalfVec (&v)[8]) {
  for (int i = 0; i < 4; ++i) {
    const HalfVec a = v[i], b = v[i + 4];
    v[i] = NV_SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11);
    v[i + 4] = NV_SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
  }
  for (int n = 0; n < 4; ++n) {
    const int i = n / 2 * 4 + n % 2;
    const HalfVec a = v[i], b = v[i + 2];
    v[i] = NV_SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13);
    v[i + 2] = NV_SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
  }
  for (int i = 0; i < 8; i += 2) {
    const HalfVec a = v[i], b = v[i + 1];
    v[i] = NV_SHUFFLE(a, b, 0, 8, 2, 10, 4, 12, 6, 14);
    v[i + 1] = NV_SHUFFLE(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
  }
}
NV_INLINE void transpose(Vec (&v)[kVec]) {
  for (int i = 0; i < 8; ++i) {
    const Vec a = v[i], b = v[i + 8];
    v[i] = NV_SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
    v[i + 8] = NV_SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  }
  for (int n = 0; n < 8; ++n) {
    const int i = n / 4 * 8 + n % 4;
    const Vec a = v[i], b = v[i + 4];
    v[i] = NV_SHUFFLE(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
    v[i + 4] = NV_SHUFFLE(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  }
  for (int n = 0; n < 8; ++n) {
    const int i = n / 2 * 4 + n % 2;
    const Vec a = v[i], b = v[i + 2];
    v[i] = NV_SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
    v[i + 2] = NV_SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  }
  for (int i = 0; i < kVec; i += 2) {
    const Vec a = v[i], b = v[i + 1];
    v[i] = NV_SHUFFLE(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
    v[i + 1] = NV_SHUFFLE(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
  }
}

}  // namespace nanovllm::cpu
