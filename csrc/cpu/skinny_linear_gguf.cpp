// Reads a fifth or less of the bytes of an fp32 weight: a tile of weight rows is widened to fp32 once, in a
// buffer that stays in L1, and from there it is the product of cpu/skinny.h. q * d and q * d + m are what a
// dequantised weight holds, so the result has the bits of skinny_linear on that.
#include "kernels/skinny_linear_gguf.h"

#include <memory>

#include "cpu/skinny.h"

namespace nanovllm::cpu {
namespace {

// A word of 4 bytes goes to every lane and each lane shifts its number out of it: there the compiler finds
// better code than for a conversion of bytes. 4 and 8 lanes, because a splat to 16 is slow below AVX-512.
template <int kLanes>
struct Lanes {
  typedef float F32 __attribute__((vector_size(kLanes * 4), aligned(4)));
  typedef int32_t I32 __attribute__((vector_size(kLanes * 4), aligned(4)));
  typedef uint32_t U32 __attribute__((vector_size(kLanes * 4), aligned(4)));
};

/// The fp16 number at p: its exponent and mantissa in place, 2^112 apart in bias; infinity and NaN stay.
NV_INLINE float load_half(const uint8_t* p) {
  int16_t h;
  std::memcpy(&h, p, sizeof h);
  const uint32_t moved = static_cast<uint32_t>(static_cast<int32_t>(h) << 13) & 0x8fffe000u;
  const float finite = std::bit_cast<float>(moved) * 0x1p112f;
  return (h & 0x7c00) == 0x7c00 ? std::bit_cast<float>(moved | 0x7f800000u) : finite;
}

NV_INLINE uint32_t load_word(const uint8_t* p) {
  uint32_t word;
  std::memcpy(&word, p, sizeof word);
  return word;
}

/// 32 int8 times d.
NV_INLINE void widen_bytes(const uint8_t* bytes, float d, float* out) {
  using L = Lanes<4>;
  for (int i = 0; i < kGgufBlock; i += 4) {
    const L::U32 top = (L::U32{} + load_word(bytes + i)) << L::U32{24, 16, 8, 0};
    const L::F32 w = __builtin_convertvector(std::bit_cast<L::I32>(top) >> 24, L::F32) * d;
    std::memcpy(out + i, &w, sizeof w);
  }
}

/// 32 numbers of 4 bits, less `zero`, times d, plus m: the low halves of 16 bytes, then the high ones.
NV_INLINE void widen_nibbles(const uint8_t* bytes, float zero, float d, float m, float* out) {
  using L = Lanes<8>;
  for (int i = 0; i < kGgufBlock / 2; i += 4) {
    const L::U32 q = (L::U32{} + load_word(bytes + i)) >> L::U32{0, 8, 16, 24, 4, 12, 20, 28} & 15u;
    // q * d is exact: fused with the addition or not, it is rounded once.
    const L::F32 w = (__builtin_convertvector(std::bit_cast<L::I32>(q), L::F32) - zero) * d + m;
    float lanes[8];
    std::memcpy(lanes, &w, sizeof w);
    std::memcpy(out + i, lanes, 16);
    std::memcpy(out + i + 16, lanes + 4, 16);
  }
}

template <GgufQuant kQuant>
NV_INLINE void widen_block(const uint8_t* block, float* out) {
  const float d = load_half(block);
  if constexpr (kQuant == GgufQuant::kQ8_0) widen_bytes(block + 2, d, out);
  if constexpr (kQuant == GgufQuant::kQ4_0) widen_nibbles(block + 2, 8, d, 0, out);
  if constexpr (kQuant == GgufQuant::kQ4_1) widen_nibbles(block + 4, 0, d, load_half(block + 2), out);
}

template <GgufQuant kQuant>
NV_INLINE void widen_rows(const SkinnyLinearGgufParams& p, int64_t n, int64_t weights, float* out) {
  const auto& linear = p.linear;
  for (int64_t j = 0; j < weights; ++j) {
    const uint8_t* block = static_cast<const uint8_t*>(linear.weight) + (n + j) * linear.weight_stride_row;
    for (int64_t k = 0; k < linear.k; k += kGgufBlock, block += p.block_bytes)
      widen_block<kQuant>(block, out + j * linear.k + k);
  }
}

template <class T>
NV_INLINE void columns(const SkinnyLinearGgufParams& p, SkinnyRows rows, float* wide, int64_t begin,
                       int64_t end) {
  for (int64_t n = begin; n < end; n += kTile) {
    const int64_t weights = std::min<int64_t>(kTile, end - n);
    switch (p.quant) {
      case GgufQuant::kQ4_0:
        widen_rows<GgufQuant::kQ4_0>(p, n, weights, wide);
        break;
      case GgufQuant::kQ4_1:
        widen_rows<GgufQuant::kQ4_1>(p, n, weights, wide);
        break;
      case GgufQuant::kQ8_0:
        widen_rows<GgufQuant::kQ8_0>(p, n, weights, wide);
        break;
    }
    all_rows<T>(p.linear, rows, n, weights,
                [&](int64_t j) { return static_cast<const float*>(wide) + j * p.linear.k; });
  }
}
NV_MULTIVERSION void columns_f32(const SkinnyLinearGgufParams& p, SkinnyRows rows, float* wide, int64_t begin,
                                 int64_t end) {
  columns<float>(p, rows, wide, begin, end);
}
NV_MULTIVERSION void columns_bf16(const SkinnyLinearGgufParams& p, SkinnyRows rows, float* wide,
                                  int64_t begin, int64_t end) {
  columns<BFloat16>(p, rows, wide, begin, end);
}

}  // namespace

void skinny_linear_gguf(const SkinnyLinearGgufParams& p) {
  const auto body = p.linear.dtype == DType::kFloat32 ? columns_f32 : columns_bf16;
  parallel_columns(p.linear, [&](SkinnyRows rows, int64_t begin, int64_t end) {
    const auto wide = std::make_unique_for_overwrite<float[]>(kTile * p.linear.k);
    body(p, rows, wide.get(), begin, end);
  });
}

}  // namespace nanovllm::cpu
