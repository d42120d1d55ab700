// Every filter is one cut: tokens with x >= cut stay, x = (logit - greatest logit) / temperature. The
// vocabulary is seen in blocks of 64 tokens; their greatest logits, found first, let later passes skip the
// blocks that hold nothing above the cut, or nothing heavy enough to win.
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

constexpr int kBlock = 64;            // tokens
constexpr int kVecs = kBlock / kVec;  // vectors of a block
constexpr int kGroups = kBlock / kGroupTokens;
constexpr int kBins = 1024;                // of the top-p histogram
constexpr int64_t kBlocksPerThread = 256;  // at least
constexpr float kLowest = -std::numeric_limits<float>::infinity();

constexpr int kAllBins = -2;

enum class Pass { kMaxima, kMass, kHistogram, kCandidates, kRace };

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
  uint32_t race = 0;                // the number of one
  float racing = kLowest;           // x below it takes no part in it
  std::mutex mutex;
  float best_time;  // of the race
  int64_t best_group;

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

/// -log(u), u = (word + 0.5) / 2^32.
NV_INLINE Vec wait_of(VecU32 word) {
  constexpr float kScale = 0x1p-32f;
  const Vec u = (__builtin_convertvector(word, Vec) + 0.5f) * kScale;
  const Vec rest = (__builtin_convertvector(~word, Vec) + 0.5f) * kScale;  // 1 - u, not rounded to 0
  const LogParts parts = log_parts(u);
  const auto near_one = rest < 0.25f;
  return -log_of_parts(near_one ? -rest : parts.f, near_one ? Vec{} : parts.e);
}

inline float wait_of(uint32_t word) {
  const float u = (static_cast<float>(word) + 0.5f) * 0x1p-32f;
  const float rest = (static_cast<float>(~word) + 0.5f) * 0x1p-32f;
  return rest < 0.25f ? -std::log1p(-rest) : -std::log(u);
}

/// Of u(4 counter, i) to u(4 counter + 3, i).
template <class Word, class MultiplyWord>
NV_INLINE PhiloxBlock<Word> words(const Row& row, Word counter, uint32_t i, MultiplyWord multiply) {
  const auto low = static_cast<uint32_t>(row.position), high = static_cast<uint32_t>(row.position >> 32);
  return philox(PhiloxBlock<Word>{{counter, Word{} + low, Word{} + high, Word{} + i}},
                static_cast<uint32_t>(row.seed), static_cast<uint32_t>(row.seed >> 32), multiply);
}

/// The weights of a block's groups, in the first lanes.
template <class T>
NV_INLINE Vec group_weights(const Row& row, int64_t block) {
  Vec w[kVecs];
  load_x<T>(w, row, block);
  for (Vec& v : w) v = v >= row.racing ? exp(v) : Vec{};
  const Vec pairs = fold<2>(fold<4>(w[0], w[1]), fold<4>(w[2], w[3]));
  return fold<1>(pairs, pairs);
}

/// The least time of row.race, the lowest group on ties. As -log(u) >= 1 - u, a block can have it only if the
/// least 1 - u of its groups is at most that time the greatest weight they can have.
template <class T>
NV_INLINE void race(Row& row, int64_t begin, int64_t end) {
  constexpr int kCounters = kGroups / kBlockWords;  // of a block
  static_assert(kCounters == 2);
  constexpr int kBlocks = kVec / kCounters;  // whose words are computed together
  constexpr float kSlack = 1.001f;           // for the rounding
  float best_time = std::numeric_limits<float>::infinity();
  int64_t best_group = 0;
  for (int64_t first = begin; first < end; first += kBlocks) {
    VecU32 counter;
    for (int i = 0; i < kVec; ++i) counter[i] = static_cast<uint32_t>(first * kCounters + i);
    const auto [word] = words(row, counter, 2 * row.race, MultiplyVec{});
    VecU32 rest = ~word[0];  // (1 - u) * 2^32, the least of each counter
    for (int w = 1; w < kBlockWords; ++w) rest = ~word[w] < rest ? ~word[w] : rest;
    float weights[kBlockWords][kVec] = {};  // [word][counter]
    bool any = false;
    for (int64_t b = first; b < std::min(first + kBlocks, end); ++b) {
      const int at = (b - first) * kCounters;
      const float x_max = row.x_of(row.maxima[b]);
      if (x_max < row.racing || x_max == kLowest) continue;
      const float least = static_cast<float>(std::min(rest[at], rest[at + 1])) * 0x1p-32f;
      if (least > kSlack * kGroupTokens * std::exp(x_max) * best_time) continue;
      any = true;
      const Vec own = group_weights<T>(row, b);
      for (int g = 0; g < kGroups; ++g) weights[g % kBlockWords][at + g / kBlockWords] = own[g];
    }
    if (!any) continue;
    Vec time[kBlockWords], shortest = Vec{} + std::numeric_limits<float>::infinity();
    for (int w = 0; w < kBlockWords; ++w) {
      time[w] = wait_of(word[w]) / load_vec(weights[w]);
      shortest = time[w] < shortest ? time[w] : shortest;
    }
    const float own_time = -max(-shortest);
    if (!(own_time < best_time)) continue;
    best_time = own_time;
    best_group = first * kGroups;
    for (int at = 0; time[at % kBlockWords][at / kBlockWords] != own_time; ++at) ++best_group;
  }
  const std::lock_guard lock(row.mutex);
  if (best_time < row.best_time || (best_time == row.best_time && best_group < row.best_group)) {
    row.best_time = best_time;
    row.best_group = best_group;
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
    case Pass::kRace:
      return race<T>(row, begin, end);
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

struct Winner {
  int64_t token;
  float x;
};

/// Of row.race.
Winner find_winner(Runner run, Row& row, DType dtype) {
  row.best_time = std::numeric_limits<float>::infinity();
  row.best_group = 0;
  run_parallel(run, Pass::kRace, row);
  const int64_t first = row.best_group * kGroupTokens;
  float logit[kGroupTokens], top = kLowest;
  dispatch(dtype, [&](auto* type) {
    const auto* logits = static_cast<decltype(type)>(const_cast<void*>(row.logits));
    for (int j = 0; j < kGroupTokens; ++j) {
      logit[j] = first + j < row.vocab ? to_float(logits[first + j]) : kLowest;
      top = std::fmax(top, logit[j]);
    }
  });
  float best_time = std::numeric_limits<float>::infinity();
  Winner winner{};
  for (int j = 0; j < kGroupTokens; ++j) {
    const float x = row.x_of(logit[j]);
    if (!(x >= row.racing)) continue;
    const auto counter = static_cast<uint32_t>((first + j) / kBlockWords);
    const uint32_t word = words(row, counter, 2 * row.race + 1, Multiply{}).word[j % kBlockWords];
    const float time = wait_of(word) / std::exp((logit[j] - top) * row.inv_temperature);
    if (time < best_time) best_time = time, winner = {first + j, x};
  }
  return winner;
}

int64_t sample_row(const SampleParams& p, int64_t b, Row& row) {
  const Runner run = p.dtype == DType::kFloat32 ? run_f32 : run_bf16;
  run_parallel(run, Pass::kMaxima, row);
  row.greatest = *std::max_element(row.maxima.begin(), row.maxima.end());
  row.inv_temperature = 1.0f / p.temperature[b];
  const bool greedy = !(p.temperature[b] > 0) || std::isinf(row.inv_temperature);
  if (greedy || std::isinf(row.greatest)) return first_greatest(row, p.dtype);
  const bool limited = p.top_k[b] > 0 && p.top_k[b] < p.vocab;
  if (p.min_p[b] > 0) row.cut = std::min(0.0f, std::log(p.min_p[b]));
  if (limited) cut_top_k(run, row, p.top_k[b]);
  const float before_top_p = row.cut;
  if (p.top_p[b] < 1) cut_top_p(run, row, std::max(0.0f, p.top_p[b]));
  if (limited) row.racing = before_top_p;
  for (;; ++row.race) {
    const Winner winner = find_winner(run, row, p.dtype);
    if (winner.x >= row.cut) return winner.token;
    row.racing = std::max(before_top_p, std::nextafter(winner.x, 1.0f));
  }
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
