#include "kernels/add_rms_norm.h"

#include "cpu/row_norm.h"

namespace nanovllm::cpu {
namespace {

template <class T>
NV_INLINE void rows(const AddRmsNormParams& p, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    T* residual = static_cast<T*>(p.residual) + t * p.residual_stride_row;
    const T* x = static_cast<const T*>(p.x) + t * p.x_stride_row;
    int64_t i = 0;
    for (; i + kVec <= p.hidden; i += kVec) store_vec(residual + i, load_vec(residual + i) + load_vec(x + i));
    if (const int64_t n = p.hidden - i; n > 0)
      store_part(residual + i, load_part(residual + i, n) + load_part(x + i, n), n);
    // The norm reads the rounded sum: the result is that of an addition followed by rms_norm, bit for bit.
    norm_row(static_cast<T*>(p.out) + t * p.out_stride_row, residual, static_cast<const T*>(p.weight),
             p.hidden, p.eps);
  }
}
NV_MULTIVERSION void rows_f32(const AddRmsNormParams& p, int64_t begin, int64_t end) {
  rows<float>(p, begin, end);
}
NV_MULTIVERSION void rows_bf16(const AddRmsNormParams& p, int64_t begin, int64_t end) {
  rows<BFloat16>(p, begin, end);
}

}  // namespace

void add_rms_norm(const AddRmsNormParams& p) {
  const auto body = p.dtype == DType::kFloat32 ? rows_f32 : rows_bf16;
  parallel_rows(p.num_tokens, p.hidden, [&](int64_t begin, int64_t end) { body(p, begin, end); });
}

}  // namespace nanovllm::cpu
