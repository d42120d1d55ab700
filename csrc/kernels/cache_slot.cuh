// Where a token's keys and values go in the paged cache, and how a pack is stored there.
#pragma once
#include <cuda_fp8.h>

#include "common/convert.cuh"
#include "kernels/kv_cache.h"

namespace nanovllm::kernels {

/// Offsets in elements of a slot's first head.
struct CacheSlot {
  int64_t k, v;
  __device__ CacheSlot(const KvCache& c, int64_t slot) {
    const int64_t block = slot >> c.block_shift, row = slot - (block << c.block_shift);
    k = block * c.k_stride_block + row * c.k_stride_slot;
    v = block * c.v_stride_block + row * c.v_stride_slot;
  }
};

inline bool cache_fits_packs(const KvCache& c, int64_t element_bytes, int64_t pack) {
  const auto fits = [&](const void* p, int64_t block, int64_t slot, int64_t head) {
    return is_aligned(p, {block, slot, head}, element_bytes, pack * element_bytes);
  };
  return fits(c.k, c.k_stride_block, c.k_stride_slot, c.k_stride_head) &&
         fits(c.v, c.v_stride_block, c.v_stride_slot, c.v_stride_head);
}

/// One pack into the cache: as it is, or over its scale into float8.
template <class T, int kPack>
__device__ void store_pack(const Pack<T, kPack>& x, T* to, float) {
  x.store(to);
}
/// Many quotients by one divisor, each what `x / divisor` is once it is rounded to float8: the correction of
/// x * (1 / divisor) rounds right (Markstein). It would make 0 of -0, and NaN of an infinity.
struct Divider {
  float divisor, reciprocal;
  __device__ explicit Divider(float divisor) : divisor(divisor), reciprocal(1.0f / divisor) {}
  __device__ float operator()(float x) const {
    const float q = x * reciprocal;
    const float right = fmaf(fmaf(-q, divisor, x), reciprocal, q);
    return fabsf(q) < 0x1p100f ? copysignf(right, q) : q;
  }
};

template <class T, int kPack>
__device__ void store_pack(const Pack<T, kPack>& x, uint8_t* to, float scale) {
  const Divider over(scale);
  Pack<uint8_t, kPack> codes;
  if constexpr (kPack == 1) {
    codes.data[0] = __nv_cvt_float_to_fp8(over(to_float(x.data[0])), __NV_SATFINITE, __NV_E4M3);
  } else {
#pragma unroll
    for (int i = 0; i < kPack; i += 2)
      reinterpret_cast<uint16_t*>(codes.data)[i / 2] = __nv_cvt_float2_to_fp8x2(
          {over(to_float(x.data[i])), over(to_float(x.data[i + 1]))}, __NV_SATFINITE, __NV_E4M3);
  }
  codes.store(to);
}

}  // namespace nanovllm::kernels
