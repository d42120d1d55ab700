// Every filter is one cut: tokens with x >= cut stay, x = (logit - greatest logit) / temperature. The
// vocabulary is seen in blocks of 64 tokens; their greatest logits, found first, let later passes skip the
// blocks that hold nothing above the cut, or nothing that even the greatest noise could lift over the best
// token so far.
#include "kernels/sample.h"

#include <cmath>
#include <functional>
#include <limits>
#include <mutex>
#include <vector>

#include "common/check.h"
#include "common/philox.h"
#include "cpu/log.h"
#include "cpu/simd.h"

namespace nanovllm::cpu {
namespace {

constexpr int kBlock = 64;                 // tokens: 8 Philox counters, two outputs each
constexpr int kVecs = kBlock / kVec;       // vectors of a block
constexpr int kBins = 1024;                // of the top-p histogram
constexpr int64_t kBlocksPerThread = 256;  // at least
constexpr float kLowest = -std::numeric_limits<float>::infinity();

constexpr int kAllBins = -2;

enum class Pass { kMaxima, kMass, kHistogram, kCandidates, kPick };

struct Row {
  const void* logits;  // [vocab]
  int64_t vocab, num_blocks;
  uint64_t seed, position;
  float inv_temperature;
  float greatest;                   // logit
  float cut = kLowest;              // x below it is out
  float floor_, to_bin;             // candidates: x >= floor_, in bin (-x) * to_bin
  int bin = -1;                     // candidates of this bin only; -1: of all
  std::vector<float> maxima, mass;  // [num_blocks] greatest logit; sum of exp(x) over the tokens that stay
  std::vector<double> bin_mass;     // [1 + kBins + 1]
  std::vector<float> candidates;    // x
  std::mutex mutex;
  float best_score = kLowest;
  int64_t best_token = 0;

  float x_of(float logit) const { return (logit - greatest) * inv_temperature; }
};

/// A block's logits; NaN, and what is past the vocabulary, as -inf.
template <class T>
NV_INLINE void load_block(Vec (&v)[kVecs], const Row& row, int64_t block) {
  const T* logits = static_cast<const T*>(row.logits) + block * kBlock;
  const int64_t left = row.vocab - block * kBlock;
  for (int i = 0; i < kVecs; ++i) {
    if (left >= (i + 1) * kVec) {
      v[i] = max(load_vec(logits + i * kVec), Vec{} + kLowest);
      continue;
    }
    float part[kVec];
    for (int j = 0; j < kVec; ++j) part[j] = i * kVec + j < left ? to_float(logits[i * kVec + j]) : kLowest;
    v[i] = max(load_vec(part), Vec{} + kLowest);
  }
}

template <class T>
NV_INLINE void load_x(Vec (&x)[kVecs], const Row& row, int64_t block) {
  load_block<T>(x, row, block);
  for (Vec& v : x) v = (v - row.greatest) * row.inv_temperature;
}

template <class T>
NV_INLINE void find_maxima(Row& row, int64_t begin, int64_t end) {
  for (int64_t b = begin; b < end; ++b) {
    Vec v[kVecs];
    load_block<T>(v, row, b);
    row.maxima[b] = max(max(max(v[0], v[1]), max(v[2], v[3])));
  }
}

template <class T>
NV_INLINE void sum_mass(Row& row, int64_t begin, int64_t end) {
  for (int64_t b = begin; b < end; ++b) {
    row.mass[b] = 0;
    if (row.x_of(row.maxima[b]) < row.cut) continue;
    Vec x[kVecs], total{};
    load_x<T>(x, row, b);
    for (const Vec& v : x) total += v >= row.cut ? exp(v) : Vec{};
    row.mass[b] = sum(total);
  }
}

/// Calls f(x, exp(x), bin) of every block with a token at x >= floor_; where x is below it, exp(x) is 0 and
/// bin -1. No branch a token: there is nothing to predict.
template <class T, class F>
NV_INLINE void for_candidates(const Row& row, int64_t begin, int64_t end, F const& f) {
  for (int64_t b = begin; b < end; ++b) {
    if (row.x_of(row.maxima[b]) < row.floor_) continue;
    Vec x[kVecs];
    float xs[kBlock], es[kBlock];
    int32_t bins[kBlock];
    load_x<T>(x, row, b);
    for (int i = 0; i < kVecs; ++i) {
      const auto in = x[i] >= row.floor_;
      const Vec bin = -max(x[i], Vec{} + row.floor_) * row.to_bin;
      store_vec(xs + i * kVec, x[i]);
      store_vec(es + i * kVec, in ? exp(x[i]) : Vec{});
      const VecI32 whole = in ? __builtin_convertvector(bin, VecI32) : VecI32{} - 1;
      std::memcpy(bins + i * kVec, &whole, sizeof whole);
    }
    f(xs, es, bins);
  }
}

/// Appends the x of the tokens of bin row.bin, or of all bins.
template <class T>
NV_INLINE void collect(Row& row, int64_t begin, int64_t end) {
  int64_t count = 0;
  for_candidates<T>(row, begin, end, [&](const float* xs, const float*, const int32_t* bins) {
    if (count + kBlock > std::ssize(row.candidates)) row.candidates.resize(2 * count + kBlock);
    for (int i = 0; i < kBlock; ++i) {
      row.candidates[count] = xs[i];
      count += row.bin == kAllBins ? bins[i] >= 0 : bins[i] == row.bin;
    }
  });
  row.candidates.resize(count);
}

/// bin_mass[bin + 1] is the sum of exp(x) over the bin; bin_mass[0] takes the zeros from below the floor.
template <class T>
NV_INLINE void fill_bins(Row& row, int64_t begin, int64_t end) {
  for_candidates<T>(row, begin, end, [&](const float*, const float* es, const int32_t* bins) {
    for (int i = 0; i < kBlock; ++i) row.bin_mass[bins[i] + 1] += es[i];
  });
}

struct MultiplyVec {
  NV_INLINE auto operator()(VecU32 a, uint32_t b) const {
    typedef uint64_t VecU64 __attribute__((vector_size(kVec * 8), aligned(8)));
    const VecU64 wide = __builtin_convertvector(a, VecU64) * b;
    return Product{__builtin_convertvector(wide >> 32, VecU32), a * b};
  }
};

/// -log(-log(u)), u = (word + 0.5) / 2^32.
NV_INLINE Vec gumbel(VecU32 word) {
  constexpr float kScale = 0x1p-32f;
  const Vec u = (__builtin_convertvector(word, Vec) + 0.5f) * kScale;
  const Vec rest = (__builtin_convertvector(~word, Vec) + 0.5f) * kScale;  // 1 - u, not rounded to 0
  const LogParts parts = log_parts(u);
  const auto near_one = rest < 0.25f;
  const Vec e = -log_of_parts(near_one ? -rest : parts.f, near_one ? Vec{} : parts.e);
  return -log(e);
}

/// The noise of a block's 64 tokens, in their order.
NV_INLINE void noise(Vec (&g)[kVecs], const Row& row, int64_t block) {
  constexpr int kOutputs =
      kBlock / kBlockTokens;  // output 0 of each in the lower lanes, output 1 in the upper
  static_assert(2 * kOutputs == kVec);
  VecU32 counter, which;
  for (int i = 0; i < kVec; ++i) {
    counter[i] = static_cast<uint32_t>(block * kOutputs + i % kOutputs);
    which[i] = i / kOutputs;
  }
  const auto low = static_cast<uint32_t>(row.position), high = static_cast<uint32_t>(row.position >> 32);
  const auto words =
      philox(PhiloxBlock{{counter, VecU32{} + low, VecU32{} + high, which}}, static_cast<uint32_t>(row.seed),
             static_cast<uint32_t>(row.seed >> 32), MultiplyVec{});
  Vec even[2], odd[2];  // lane i of pair k: token 8 i + 4 k (+ 1), lane i + 8: token 8 i + 4 k + 2 (+ 1)
  for (int k = 0; k < 2; ++k) {
    const VecU32 x = words.word[2 * k], y = words.word[2 * k + 1];
    const VecU32 upper = NV_SHUFFLE(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
    const VecU32 lower = NV_SHUFFLE(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    even[k] = gumbel(upper << 16 | (lower & 0xffff));
    odd[k] = gumbel((upper & 0xffff0000) | lower >> 16);
  }
  Vec quads[2][2];  // [k][i / 4]: tokens 8 i + 4 k and the 3 after it
  for (int k = 0; k < 2; ++k) {
    const Vec a = NV_SHUFFLE(even[k], odd[k], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const Vec b = NV_SHUFFLE(even[k], odd[k], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    quads[k][0] = NV_SHUFFLE(a, b, 0, 1, 16, 17, 2, 3, 18, 19, 4, 5, 20, 21, 6, 7, 22, 23);
    quads[k][1] = NV_SHUFFLE(a, b, 8, 9, 24, 25, 10, 11, 26, 27, 12, 13, 28, 29, 14, 15, 30, 31);
  }
  for (int i = 0; i < 2; ++i) {
    const Vec a = quads[0][i], b = quads[1][i];
    g[2 * i] = NV_SHUFFLE(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    g[2 * i + 1] = NV_SHUFFLE(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  }
}

/// The greatest x + noise; the lowest token on ties.
template <class T>
NV_INLINE void pick(Row& row, int64_t begin, int64_t end) {
  float best_score = kLowest;
  int64_t best_token = 0;
  for (int64_t b = begin; b < end; ++b) {
    const float x_max = row.x_of(row.maxima[b]);
    if (x_max < row.cut || x_max + kMaxGumbel < best_score || x_max == kLowest) continue;
    Vec score[kVecs], g[kVecs];
    load_x<T>(score, row, b);
    noise(g, row, b);
    for (int i = 0; i < kVecs; ++i) score[i] = score[i] >= row.cut ? score[i] + g[i] : Vec{} + kLowest;
    const float top = max(max(max(score[0], score[1]), max(score[2], score[3])));
    if (top <= best_score) continue;
    best_score = top;
    float scores[kBlock];
    for (int i = 0; i < kVecs; ++i) store_vec(scores + i * kVec, score[i]);
    best_token = b * kBlock + (std::find(scores, scores + kBlock, top) - scores);
  }
  const std::lock_guard lock(row.mutex);
  if (best_score > row.best_score || (best_score == row.best_score && best_token < row.best_token)) {
    row.best_score = best_score;
    row.best_token = best_token;
  }
}

template <class T>
NV_INLINE void run(Pass pass, Row& row, int64_t begin, int64_t end) {
  switch (pass) {
    case Pass::kMaxima:
      return find_maxima<T>(row, begin, end);
    case Pass::kMass:
      return sum_mass<T>(row, begin, end);
    case Pass::kHistogram:
      return fill_bins<T>(row, begin, end);
    case Pass::kCandidates:
      return collect<T>(row, begin, end);
    case Pass::kPick:
      return pick<T>(row, begin, end);
  }
}
NV_MULTIVERSION void run_f32(Pass pass, Row& row, int64_t begin, int64_t end) {
  run<float>(pass, row, begin, end);
}
NV_MULTIVERSION void run_bf16(Pass pass, Row& row, int64_t begin, int64_t end) {
  run<BFloat16>(pass, row, begin, end);
}
using Runner = decltype(&run_f32);

/// Over all blocks: by several threads where the rows leave some idle.
void run_parallel(Runner run, Pass pass, Row& row) {
  torch::stable::parallel_for(0, row.num_blocks, kBlocksPerThread,
                              [&](int64_t begin, int64_t end) { run(pass, row, begin, end); });
}

/// Raises the cut to the k-th greatest x, if it leaves as many tokens.
void cut_top_k(Runner run, Row& row, int64_t k) {
  row.floor_ = std::max(row.cut, std::numeric_limits<float>::lowest());
  row.bin = kAllBins;
  row.to_bin = 0;
  if (k <= row.num_blocks) {  // k blocks have their greatest logit here or above: so have k tokens
    std::vector<float> maxima = row.maxima;
    std::nth_element(maxima.begin(), maxima.begin() + (k - 1), maxima.end(), std::greater<>());
    row.floor_ = std::max(row.floor_, row.x_of(maxima[k - 1]));
  }
  row.candidates.clear();
  run(Pass::kCandidates, row, 0, row.num_blocks);
  if (std::ssize(row.candidates) < k) return;
  std::nth_element(row.candidates.begin(), row.candidates.begin() + (k - 1), row.candidates.end(),
                   std::greater<>());
  row.cut = row.candidates[k - 1];
}

/// Raises the cut to the greatest value at which the tokens above hold top_p of the mass above the old cut.
void cut_top_p(Runner run, Row& row, float top_p) {
  run_parallel(run, Pass::kMass, row);
  double total = 0;
  for (const float mass : row.mass) total += mass;
  const double target = top_p * total;
  // All tokens below the floor together hold less than 1 - top_p: the cut is above it.
  const double floor = std::log((1.0 - top_p) * total / static_cast<double>(row.vocab));
  row.floor_ = std::max({row.cut, static_cast<float>(floor), -80.0f});
  row.to_bin = row.floor_ < -1e-30f ? kBins / -row.floor_ : 0.0f;  // finite
  row.bin_mass.assign(kBins + 2, 0.0);
  run(Pass::kHistogram, row, 0, row.num_blocks);
  double above = 0;
  row.bin = 0;
  while (row.bin < kBins && above + row.bin_mass[row.bin + 1] < target) above += row.bin_mass[++row.bin];
  row.candidates.clear();
  run(Pass::kCandidates, row, 0, row.num_blocks);
  std::sort(row.candidates.begin(), row.candidates.end(), std::greater<>());
  row.cut = row.floor_;
  for (const float x : row.candidates) {
    above += std::exp(x);
    if (above < target) continue;
    row.cut = x;
    return;
  }
}

int64_t first_greatest(const Row& row, DType dtype) {
  if (row.greatest == kLowest) return 0;
  const int64_t block = std::find(row.maxima.begin(), row.maxima.end(), row.greatest) - row.maxima.begin();
  int64_t token = block * kBlock;
  dispatch(dtype, [&](auto* type) {
    const auto* logits = static_cast<decltype(type)>(const_cast<void*>(row.logits));
    while (to_float(logits[token]) != row.greatest) ++token;
  });
  return token;
}

int64_t sample_row(const SampleParams& p, int64_t b, Row& row) {
  const Runner run = p.dtype == DType::kFloat32 ? run_f32 : run_bf16;
  run_parallel(run, Pass::kMaxima, row);
  row.greatest = *std::max_element(row.maxima.begin(), row.maxima.end());
  row.inv_temperature = 1.0f / p.temperature[b];
  const bool greedy = !(p.temperature[b] > 0) || std::isinf(row.inv_temperature);
  if (greedy || std::isinf(row.greatest)) return first_greatest(row, p.dtype);
  if (p.min_p[b] > 0) row.cut = std::min(0.0f, std::log(p.min_p[b]));
  if (p.top_k[b] > 0 && p.top_k[b] < p.vocab) cut_top_k(run, row, p.top_k[b]);
  if (p.top_p[b] < 1) cut_top_p(run, row, std::max(0.0f, p.top_p[b]));
  run_parallel(run, Pass::kPick, row);
  return row.best_token;
}

}  // namespace

void sample(const SampleParams& p) {
  ops::check(p.copies == nullptr || (*p.copy >= 0 && *p.copy < p.num_copies), "sample", "copy",
             "expected 0 to ", p.num_copies - 1, ", got ", p.copies == nullptr ? 0 : *p.copy);
  const int64_t num_blocks = (p.vocab + kBlock - 1) / kBlock;
  torch::stable::parallel_for(0, p.batch, 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      if (p.positions[b] < 0) continue;
      const int64_t offset = b * p.logits_stride_row * size_of(p.dtype);
      Row row{.logits = static_cast<const char*>(p.logits) + offset,
              .vocab = p.vocab,
              .num_blocks = num_blocks,
              .seed = static_cast<uint64_t>(p.seeds[b]),
              .position = static_cast<uint64_t>(p.positions[b])};
      row.maxima.resize(num_blocks);
      row.mass.resize(num_blocks);
      p.token_ids[b] = sample_row(p, b, row);
      if (p.copies != nullptr) p.copies[*p.copy * p.copies_stride_row + b] = p.token_ids[b];
    }
  });
}

}  // namespace nanovllm::cpu
