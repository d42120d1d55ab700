#include "kernels/silu_and_mul.h"

#include "cpu/simd.h"

namespace nanovllm::cpu {
namespace {

template <class V>
NV_INLINE V silu(V x) {
  return x / (1.0f + exp<V>(-x));
}

template <class V, class T>
NV_INLINE void rows(const SiluAndMulParams& p, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    T* out = static_cast<T*>(p.out) + t * p.out_stride_row;
    const T* gate = static_cast<const T*>(p.gate_up) + t * p.gate_up_stride_row;
    const T* up = gate + p.width;
    int64_t i = 0;
    for (; i + kLanes<V> <= p.width; i += kLanes<V>)
      store_vec(out + i, silu(load_vec<V>(gate + i)) * load_vec<V>(up + i));
    if (const int64_t n = p.width - i; n > 0)
      store_part(out + i, silu(load_part(gate + i, n)) * load_part(up + i, n), n);
  }
}
template <class T>
NV_INLINE void rows(const SiluAndMulParams& p, int64_t begin, int64_t end) {
  has_wide_registers() ? rows<Vec, T>(p, begin, end) : rows<HalfVec, T>(p, begin, end);
}
NV_MULTIVERSION void rows_f32(const SiluAndMulParams& p, int64_t begin, int64_t end) {
  rows<float>(p, begin, end);
}
NV_MULTIVERSION void rows_bf16(const SiluAndMulParams& p, int64_t begin, int64_t end) {
  rows<BFloat16>(p, begin, end);
}

}  // namespace

void silu_and_mul(const SiluAndMulParams& p) {
  const auto body = p.dtype == DType::kFloat32 ? rows_f32 : rows_bf16;
  parallel_rows(p.num_tokens, 2 * p.width, [&](int64_t begin, int64_t end) { body(p, begin, end); });
}

}  // namespace nanovllm::cpu
