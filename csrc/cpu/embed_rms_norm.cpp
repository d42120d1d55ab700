#include "kernels/embed_rms_norm.h"

#include <algorithm>

#include "common/check.h"
#include "cpu/row_norm.h"

namespace nanovllm::cpu {
namespace {

template <class T>
NV_INLINE void rows(const EmbedRmsNormParams& p, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    const T* row = static_cast<const T*>(p.table) + p.token_ids[t] * p.table_stride_row;
    std::copy_n(row, p.hidden, static_cast<T*>(p.residual) + t * p.residual_stride_row);
    norm_row(static_cast<T*>(p.out) + t * p.out_stride_row, row, static_cast<const T*>(p.weight), p.hidden,
             p.eps);
  }
}
NV_MULTIVERSION void rows_f32(const EmbedRmsNormParams& p, int64_t begin, int64_t end) {
  rows<float>(p, begin, end);
}
NV_MULTIVERSION void rows_bf16(const EmbedRmsNormParams& p, int64_t begin, int64_t end) {
  rows<BFloat16>(p, begin, end);
}

}  // namespace

void embed_rms_norm(const EmbedRmsNormParams& p) {
  for (int64_t t = 0; t < p.num_tokens; ++t)
    ops::check(p.token_ids[t] >= 0 && p.token_ids[t] < p.vocab, "embed_rms_norm", "token_ids",
               "expected ids from 0 to below ", p.vocab, " (rows of table), got ", p.token_ids[t], " at [", t,
               "]");
  const auto body = p.dtype == DType::kFloat32 ? rows_f32 : rows_bf16;
  parallel_rows(p.num_tokens, p.hidden, [&](int64_t begin, int64_t end) { body(p, begin, end); });
}

}  // namespace nanovllm::cpu
