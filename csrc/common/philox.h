// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; 2011), and how
// `sample` draws a token with it: by a race of groups of 8 tokens. A token depends on its row's logits,
// parameters, seed and position only: not on the batch, the device or the order of work.
//
//   group g   tokens 8 g to 8 g + 7
//   u(n, i)   (word + 0.5) / 2^32, so 0 < u < 1; the word is n % 4 of Philox with
//               key     = (seed low 32 bits, seed high 32 bits)
//               counter = (n / 4, position low 32 bits, position high 32 bits, i)
//   weight    of a token that takes part exp(x), x = (logit - greatest logit) / temperature, of another 0;
//             of a group ((w0 + w4) + (w2 + w6)) + ((w1 + w5) + (w3 + w7))
//   race d    A group's time is -log(u(g, 2 d)) / weight, and the least wins; in that group a token's is
//             -log(u(token, 2 d + 1)) / weight, and the least wins. Of equals, the lowest.
//
// Such a time has the exponential distribution with the weight as its rate: a group, and then a token, wins
// with the probability of its weight.
//
//   race 0       of all tokens; with a top-k, of those that min-p and top-k leave
//   race d + 1   if the filters drop the winner of race d: of those that min-p and top-k leave, with an x
//                greater than the winner's
//
// The first winner that all filters leave is the token. Each race holds all tokens that they leave, with
// words of its own, so a token's probability is its share of what they leave.
//
// NOTE: u rounds to 1 in fp32 for words above 2^32 - 129, and a time of 0 would win against any weight. Take
// -log(u) as -log1p(-(1 - u)), with 1 - u = (~word + 0.5) / 2^32, where u is near 1.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define NV_HOST_DEVICE __host__ __device__
#else
#define NV_HOST_DEVICE
#endif

namespace nanovllm {

constexpr int kGroupTokens = 8;
constexpr int kBlockWords = 4;  // of Philox

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
