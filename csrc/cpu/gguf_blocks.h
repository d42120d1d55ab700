// Rows of GGUF blocks to fp32, 32 weights a block. Written with intrinsics for AVX-512 and AVX2: the compiler
// makes poor code of a conversion of bytes. q * d is exact in fp32 (8 bits times 11), so q * d + m is rounded
// once, fused or not, and every version gives the same bits.
#pragma once
#include <bit>
#include <cstdint>
#include <cstring>

#include "kernels/skinny_linear_gguf.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace nanovllm::cpu {

using WidenRow = void (*)(const uint8_t* blocks, int64_t num_blocks, float* out);

inline uint16_t load_u16(const uint8_t* p) {
  uint16_t bits;
  std::memcpy(&bits, p, sizeof bits);
  return bits;
}

/// The bits of an fp16 number moved into place are 2^112 too small, but for infinity and NaN.
inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16,
                 rest = static_cast<uint32_t>(half & 0x7fffu) << 13;
  if ((half & 0x7c00u) == 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | rest);
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(std::bit_cast<float>(rest) * 0x1p112f));
}

template <GgufQuant kQuant>
void widen_row(const uint8_t* block, int64_t num_blocks, float* out) {
  constexpr int kHead = kQuant == GgufQuant::kQ4_1 ? 4 : 2, kHalf = kGgufBlock / 2;
  constexpr int kBytes = kHead + (kQuant == GgufQuant::kQ8_0 ? kGgufBlock : kHalf);
  for (int64_t b = 0; b < num_blocks; ++b, block += kBytes, out += kGgufBlock) {
    const float d = half_to_float(load_u16(block));
    const float m = kQuant == GgufQuant::kQ4_1 ? half_to_float(load_u16(block + 2)) : 0.0f;
    for (int i = 0; i < kHalf; ++i) {
      const uint8_t low = block[kHead + i];
      if constexpr (kQuant == GgufQuant::kQ8_0) {
        out[i] = static_cast<float>(static_cast<int8_t>(low)) * d;
        out[i + kHalf] = static_cast<float>(static_cast<int8_t>(block[kHead + kHalf + i])) * d;
      } else if constexpr (kQuant == GgufQuant::kQ4_1) {
        out[i] = static_cast<float>(low & 15) * d + m;
        out[i + kHalf] = static_cast<float>(low >> 4) * d + m;
      } else {
        out[i] = static_cast<float>((low & 15) - 8) * d;
        out[i + kHalf] = static_cast<float>((low >> 4) - 8) * d;
      }
    }
  }
}

#if defined(__x86_64__)
template <GgufQuant kQuant>
__attribute__((target("avx512f,avx512bw,avx512vl,f16c"))) void widen_row_avx512(const uint8_t* block,
                                                                                int64_t num_blocks,
                                                                                float* out) {
  for (int64_t b = 0; b < num_blocks; ++b, out += kGgufBlock) {
    const __m512 d = _mm512_set1_ps(_cvtsh_ss(load_u16(block)));
    __m512 first, second;
    if constexpr (kQuant == GgufQuant::kQ8_0) {
      const auto* q = reinterpret_cast<const __m128i*>(block + 2);
      first = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(q))), d);
      second = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(q + 1))), d);
      block += 34;
    } else {
      constexpr int kHead = kQuant == GgufQuant::kQ4_1 ? 4 : 2;
      const __m512i q =
          _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(block + kHead)));
      __m512i low = _mm512_and_si512(q, _mm512_set1_epi32(15)), high = _mm512_srli_epi32(q, 4);
      if constexpr (kQuant == GgufQuant::kQ4_1) {
        const __m512 m = _mm512_set1_ps(_cvtsh_ss(load_u16(block + 2)));
        first = _mm512_fmadd_ps(_mm512_cvtepi32_ps(low), d, m);
        second = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), d, m);
      } else {
        const __m512i middle = _mm512_set1_epi32(8);
        first = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(low, middle)), d);
        second = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(high, middle)), d);
      }
      block += kHead + 16;
    }
    _mm512_storeu_ps(out, first);
    _mm512_storeu_ps(out + 16, second);
  }
}

template <GgufQuant kQuant>
__attribute__((target("avx2,fma,f16c"))) void widen_row_avx2(const uint8_t* block, int64_t num_blocks,
                                                             float* out) {
  for (int64_t b = 0; b < num_blocks; ++b, out += kGgufBlock) {
    const __m256 d = _mm256_set1_ps(_cvtsh_ss(load_u16(block)));
    if constexpr (kQuant == GgufQuant::kQ8_0) {
      for (int i = 0; i < kGgufBlock; i += 8) {
        const __m256i q =
            _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(block + 2 + i)));
        _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_cvtepi32_ps(q), d));
      }
      block += 34;
    } else {
      constexpr int kHead = kQuant == GgufQuant::kQ4_1 ? 4 : 2;
      const __m256 m = _mm256_set1_ps(kQuant == GgufQuant::kQ4_1 ? _cvtsh_ss(load_u16(block + 2)) : 0.0f);
      const __m256i middle = _mm256_set1_epi32(kQuant == GgufQuant::kQ4_0 ? 8 : 0);
      for (int i = 0; i < kGgufBlock / 2; i += 8) {
        const __m256i q =
            _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(block + kHead + i)));
        const __m256i low = _mm256_sub_epi32(_mm256_and_si256(q, _mm256_set1_epi32(15)), middle);
        const __m256i high = _mm256_sub_epi32(_mm256_srli_epi32(q, 4), middle);
        _mm256_storeu_ps(out + i, _mm256_fmadd_ps(_mm256_cvtepi32_ps(low), d, m));
        _mm256_storeu_ps(out + 16 + i, _mm256_fmadd_ps(_mm256_cvtepi32_ps(high), d, m));
      }
      block += kHead + 16;
    }
  }
}
#endif

/// The fastest version that this machine runs.
template <GgufQuant kQuant>
WidenRow pick_widen_row() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
    return widen_row_avx512<kQuant>;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return widen_row_avx2<kQuant>;
#endif
  return widen_row<kQuant>;
}

inline WidenRow widen_row_of(GgufQuant quant) {
  static const WidenRow q4_0 = pick_widen_row<GgufQuant::kQ4_0>(), q4_1 = pick_widen_row<GgufQuant::kQ4_1>(),
                        q8_0 = pick_widen_row<GgufQuant::kQ8_0>();
  return quant == GgufQuant::kQ4_0 ? q4_0 : quant == GgufQuant::kQ4_1 ? q4_1 : q8_0;
}

}  // namespace nanovllm::cpu
