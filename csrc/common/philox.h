// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; 2011), and how
// `sample` turns it into Gumbel noise. A word depends on (seed, position, token) only: not on the batch, the
// device or the order of work.
//
//   key      = (seed low 32 bits, seed high 32 bits)
//   counter  = (token / 8, position low 32 bits, position high 32 bits, i), i = 0 and 1
//   half(i)  = 16-bit half token % 8 of output(i), lower halves of its words first
//   word     = half(0) * 2^16 + half(1)
//   u        = (word + 0.5) / 2^32, so 0 < u < 1
//   gumbel   = -log(-log(u))
//
// So the first output alone says of 8 tokens whether their noise may be great; few need the second.
//
// NOTE: u rounds to 1 in fp32 for words above 2^32 - 129, and log(1) = 0 would make the noise infinite. Take
// -log(u) as -log1p(-(1 - u)), with 1 - u = (~word + 0.5) / 2^32, where u is near 1.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define NV_HOST_DEVICE __host__ __device__
#else
#define NV_HOST_DEVICE
#endif

namespace nanovllm {

constexpr float kMaxGumbel = 22.8740f;  // above -log(-log(1 - 2^-33)) = 22.87357: no noise is larger

constexpr int kBlockTokens = 8;  // of an output

/// One block of four words; Word is uint32_t, or a vector of them for several counters at a time.
template <class Word>
struct PhiloxBlock {
  Word word[4];
};

template <class Word>
struct Product {
  Word high, low;
};

struct Multiply {
  NV_HOST_DEVICE Product<uint32_t> operator()(uint32_t a, uint32_t b) const {
#ifdef __CUDA_ARCH__
    Product<uint32_t> p;  // by one instruction: nvcc takes two for the same in C++
    asm("{.reg .u64 w; mul.wide.u32 w, %2, %3; mov.b64 {%1, %0}, w;}"
        : "=r"(p.high), "=r"(p.low)
        : "r"(a), "r"(b));
    return p;
#else
    return {static_cast<uint32_t>((static_cast<uint64_t>(a) * b) >> 32), a * b};
#endif
  }
};

/// Philox4x32-10 of `counter`; `multiply(a, b)` gives the halves of the 64-bit product of each word.
template <class Word, class MultiplyWord = Multiply>
NV_HOST_DEVICE inline PhiloxBlock<Word> philox(PhiloxBlock<Word> counter, uint32_t key0, uint32_t key1,
                                               MultiplyWord multiply = {}) {
  for (int round = 0; round < 10; ++round) {
    const Word(&c)[4] = counter.word;
    const auto p = multiply(c[2], 0xCD9E8D57u), q = multiply(c[0], 0xD2511F53u);
    counter = {{p.high ^ c[1] ^ key0, p.low, q.high ^ c[3] ^ key1, q.low}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

}  // namespace nanovllm
