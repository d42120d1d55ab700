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

template <int kPack, class Quotient>
__device__ Pack<uint8_t, kPack> to_codes(Quotient const& quotient) {
  Pack<uint8_t, kPack> codes;
  if constexpr (kPack == 1) {
    codes.data[0] = __nv_cvt_float_to_fp8(quotient(0), __NV_SATFINITE, __NV_E4M3);
  } else {
#pragma unroll
    for (int i = 0; i < kPack; i += 2)
      reinterpret_cast<uint16_t*>(codes.data)[i / 2] =
          __nv_cvt_float2_to_fp8x2({quotient(i), quotient(i + 1)}, __NV_SATFINITE, __NV_E4M3);
  }
  return codes;
}

/// A pack as the cache holds it: as it is, or over its scale in float8. Quotients by one divisor share its
/// reciprocal: the correction of x * reciprocal rounds right, but for a divisor whose mantissa is all ones
/// (Markstein); it would make 0 of -0, and NaN of an infinity.
template <class Cache, class T, int kPack>
__device__ Pack<Cache, kPack> to_cache(const Pack<T, kPack>& x, float scale) {
  if constexpr (std::is_same_v<Cache, T>) {
    return x;
  } else {
    if (~__float_as_uint(scale) << 9 == 0)
      return to_codes<kPack>([&](int i) { return to_float(x.data[i]) / scale; });
    const float reciprocal = 1.0f / scale;
    return to_codes<kPack>([&](int i) {
      const float v = to_float(x.data[i]), q = v * reciprocal;
      const float right = fmaf(fmaf(-q, scale, v), reciprocal, q);
      return fabsf(q) < 0x1p100f ? copysignf(right, q) : q;
    });
  }
}

}  // namespace nanovllm::kernels
