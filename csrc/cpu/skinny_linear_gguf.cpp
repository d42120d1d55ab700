// Reads 5 to 9 bits a weight instead of 32: a tile of weight rows is widened to fp32 once, in a
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

NV_INLINE uint32_t load_word(const uint8_t* p) {
  uint32_t word;
  std::memcpy(&word, p, sizeof word);
  return word;
}

/// The fp16 number in the upper half of each lane: its bits moved into place are 2^112 too small, but for
/// infinity and NaN, whose exponent is filled up.
template <class L>
NV_INLINE typename L::F32 upper_half(typename L::U32 word) {
  using U32 = typename L::U32;
  using F32 = typename L::F32;
  const U32 moved = std::bit_cast<U32>(std::bit_cast<typename L::I32>(word) >> 3) & 0x8fffe000u;
  const auto special = (word & 0x7c000000u) == 0x7c000000u;
  return special ? std::bit_cast<F32>(moved | 0x7f800000u) : std::bit_cast<F32>(moved) * 0x1p112f;
}

NV_INLINE void widen_q8_0(const uint8_t* block, float* out) {
  using L = Lanes<4>;
  const L::F32 d = upper_half<L>((L::U32{} + load_word(block)) << 16);
  for (int i = 0; i < kGgufBlock; i += 4) {
    const L::U32 top = (L::U32{} + load_word(block + 2 + i)) << L::U32{24, 16, 8, 0};
    const L::F32 w = __builtin_convertvector(std::bit_cast<L::I32>(top) >> 24, L::F32) * d;
    std::memcpy(out + i, &w, sizeof w);
  }
}

/// The lower halves of 16 bytes are the first 16 numbers, the upper halves the others.
template <GgufQuant kQuant>
NV_INLINE void widen_q4(const uint8_t* block, float* out) {
  using L = Lanes<8>;
  const L::U32 word = L::U32{} + load_word(block);
  const L::F32 d = upper_half<L>(word << 16), m = upper_half<L>(word);
  const uint8_t* bytes = block + (kQuant == GgufQuant::kQ4_1 ? 4 : 2);
  for (int i = 0; i < kGgufBlock / 2; i += 4) {
    const L::U32 bits = (L::U32{} + load_word(bytes + i)) >> L::U32{0, 8, 16, 24, 4, 12, 20, 28} & 15u;
    const L::F32 q = __builtin_convertvector(std::bit_cast<L::I32>(bits), L::F32);
    // q * d is exact: fused with the addition or not, it is rounded once.
    const L::F32 w = kQuant == GgufQuant::kQ4_1 ? q * d + m : (q - 8.0f) * d;
    float lanes[8];
    std::memcpy(lanes, &w, sizeof w);
    std::memcpy(out + i, lanes, 16);
    std::memcpy(out + i + 16, lanes + 4, 16);
  }
}

template <GgufQuant kQuant>
NV_INLINE void widen_block(const uint8_t* block, float* out) {
  kQuant == GgufQuant::kQ8_0 ? widen_q8_0(block, out) : widen_q4<kQuant>(block, out);
}

template <GgufQuant kQuant>
NV_INLINE void widen_rows(const SkinnyLinearGgufParams& p, int64_t n, int64_t weights, float* out) {
  const auto& linear = p.linear;
  const int64_t num_blocks = linear.k / kGgufBlock, block_bytes = p.block_bytes;
  for (int64_t j = 0; j < weights; ++j) {
    const uint8_t* row = static_cast<const uint8_t*>(linear.weight) + (n + j) * linear.weight_stride_row;
    float* out_row = out + j * linear.k;
    for (int64_t b = 0; b < num_blocks; ++b)
      widen_block<kQuant>(row + b * block_bytes, out_row + b * kGgufBlock);
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

/// A cache line: the buffer is aligned to it, no vector load is split.
struct alignas(kVec * sizeof(float)) Line {
  float values[kVec];
};

}  // namespace

void skinny_linear_gguf(const SkinnyLinearGgufParams& p) {
  const auto body = p.linear.dtype == DType::kFloat32 ? columns_f32 : columns_bf16;
  parallel_columns(p.linear, [&](SkinnyRows rows, int64_t begin, int64_t end) {
    const auto wide = std::make_unique_for_overwrite<Line[]>(kTile * p.linear.k / kVec);
    body(p, rows, wide[0].values, begin, end);
  });
}

}  // namespace nanovllm::cpu
