// A small fp32 matrix product for operands that are packed and stay in L1 or L2.
#pragma once
#include "cpu/simd.h"

namespace nanovllm::cpu {

/// c[kRows][kCols * kVec] = (kAdd ? c : 0) + a[kRows][inner] . b[inner][kCols * kVec], the sums in registers.
template <bool kAdd, int kRows, int kCols>
NV_INLINE void gemm_block(float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t ldb,
                          int64_t inner) {
  Vec acc[kRows][kCols];
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < kCols; ++j) acc[r][j] = kAdd ? load_vec(c + r * ldc + j * kVec) : Vec{};
  for (int64_t k = 0; k < inner; ++k) {
    Vec bv[kCols];
    for (int j = 0; j < kCols; ++j) bv[j] = load_vec(b + k * ldb + j * kVec);
    for (int r = 0; r < kRows; ++r) {
      const Vec av = Vec{} + a[r * lda + k];
      for (int j = 0; j < kCols; ++j) acc[r][j] += av * bv[j];
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < kCols; ++j) store_vec(c + r * ldc + j * kVec, acc[r][j]);
}

template <bool kAdd, int kRows>
NV_INLINE void gemm_rows(float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t ldb,
                         int64_t cols, int64_t inner) {
  constexpr int kCols = 4;
  int64_t j = 0;
  for (; j + kCols * kVec <= cols; j += kCols * kVec)
    gemm_block<kAdd, kRows, kCols>(c + j, ldc, a, lda, b + j, ldb, inner);
  for (; j < cols; j += kVec) gemm_block<kAdd, kRows, 1>(c + j, ldc, a, lda, b + j, ldb, inner);
}

/// c[rows][cols] = (kAdd ? c : 0) + a[rows][inner] . b[inner][cols]; cols is a multiple of kVec.
template <bool kAdd>
NV_INLINE void gemm(float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t ldb,
                    int64_t rows, int64_t cols, int64_t inner) {
  int64_t r = 0;
  for (; r + 6 <= rows; r += 6) gemm_rows<kAdd, 6>(c + r * ldc, ldc, a + r * lda, lda, b, ldb, cols, inner);
  for (; r + 2 <= rows; r += 2) gemm_rows<kAdd, 2>(c + r * ldc, ldc, a + r * lda, lda, b, ldb, cols, inner);
  if (r < rows) gemm_rows<kAdd, 1>(c + r * ldc, ldc, a + r * lda, lda, b, ldb, cols, inner);
}

/// Lane j of row i becomes lane i of row j: halves swapped at four widths.
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
