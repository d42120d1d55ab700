// The passes of `sample` over one row whose token is drawn.
#pragma once
#include "kernels/sample_noise.cuh"
#include "kernels/sample_slice.cuh"

namespace nanovllm::kernels {

struct Candidate {
  float x;
  uint32_t token;
};
constexpr int kCandidates = kSampleThreads;

struct CandidateShared {
  uint32_t count;  // may pass kCandidates
  Candidate list[kCandidates], sorted[kCandidates];
};

/// Of the first stream: the greatest logit, and the winner of the whole row and its mass where asked for.
struct Streamed {
  float greatest;
  uint32_t winner;  // valid unless `again`
  float mass;       // sum of exp(x), as valid
  bool again;       // the anchor of a block was not near enough to the greatest logit
};

template <class T>
struct Row {
  static constexpr float kNear = 64;      // between an anchor and the greatest x: sums and scores stay exact
  static constexpr int kFirstShift = 20;  // of a key: 11 bits, then 10 and 10

  const Slice<T>& slice;
  Team& team;
  int& reached;  // shared memory, see Draw
  CandidateShared& candidates;
  const Noise noise;
  const float inv_temperature;
  float greatest = kLowest;  // logit, of the row
  float own = kLowest;       // logit, of this thread

  __device__ float x_of(float logit) const { return (logit - greatest) * inv_temperature; }

  /// The one read of the row from memory, which sends the groups' greatest if asked to. Draws from all tokens
  /// and (only then) sums the mass as it goes, with the greatest logit of the block's first step as the
  /// anchor: that of the row is not known before the end.
  __device__ Streamed stream(bool draws, bool sums, bool groups) {
    Draw draw = draws ? from_first_step() : Draw{noise, kLowest, inv_temperature, &reached};
    const bool anchored = isfinite(draw.anchor);
    draws &= anchored;
    sums &= anchored;
    float entry = kLowest, mass = 0;
    slice.stream([&](int step, const float (&logit)[kStepTokens]) {
      const float top = greatest_of(logit);
      own = fmaxf(own, top);
      slice.note(step, entry, top);
      if (draws) draw.offer(logit, top, slice.token_of(step, 0), kLowest);
      if (sums) {
#pragma unroll
        for (int j = 0; j < kStepTokens; ++j) {
          const float x = (logit[j] - draw.anchor) * (inv_temperature * Draw::kLog2e);
          mass += x >= kLowest ? exp2_approx(x) : 0.0f;  // NaN: 0
        }
      }
    });
    if (groups) team.send_groups(own);
    Found found{.greatest = team.reduce_block(own, Max{}), .anchor = draw.anchor};
    found.best = draws ? team.reduce_block(ranked(draw.score, draw.token), Max{}) : 0;
    found.mass = sums ? team.reduce_block(mass, Sum{}) : 0.0f;
    return together(team.exchange(found));
  }

  /// Sum of exp(x) over x >= least.
  __device__ float mass(float least) const {
    float sum = 0;
    for_tokens(least, [&](float x, uint32_t) { sum += x >= least ? __expf(x) : 0.0f; });
    return team.reduce(sum, Sum{});
  }

  /// The token with the greatest x + noise of those with x >= cut; the lowest on ties.
  __device__ uint32_t pick(float cut) const {
    if (threadIdx.x == 0) reached = 0;  // the greatest token is there
    __syncthreads();
    Draw draw{noise, greatest, inv_temperature, &reached};
    const float least = fmaxf(cut, -Draw::kLift - kMaxGumbel);
    slice.revisit([&](float top) { return x_of(top) >= least; },
                  [&](int step, const float (&logit)[kStepTokens]) {
                    draw.offer(logit, greatest_of(logit), slice.token_of(step, 0), cut);
                  });
    return token_of(team.reduce(ranked(draw.score, draw.token), Max{}));
  }

  /// At most the k-th greatest x: that of the greatest of the team's groups of threads.
  __device__ float bound_of_few(int k) const { return x_of(team.kth_group(k)); }

  /// At most the k-th greatest x: that of the threads' greatest.
  __device__ float bound_of_kth(uint32_t k) const {
    if (k > kSampleThreads * team.size) return kLowest;
    const auto bin = team.find_bin(k, [&](auto const& add) { add(key(x_of(own)) >> kFirstShift); });
    return -__uint_as_float(((bin.index + 1) << kFirstShift) - 1);
  }

  /// The k-th greatest x, which is at least `least`: three digits of its key, a histogram for each.
  __device__ float kth_greatest(uint32_t k, float least) const {
    uint32_t prefix = 0;
#pragma unroll 1
    for (int shift = kFirstShift; shift >= 0; shift -= 10) {
      const int width = shift == kFirstShift ? 11 : 10;
      const auto bin = team.find_bin(k, [&](auto const& add) {
        for_tokens(least, [&](float x, uint32_t) {
          const uint32_t digits = key(x) >> shift;
          if (digits >> width == prefix && !(x < least)) add(digits & ((1u << width) - 1));
        });
      });
      prefix = prefix << width | bin.index;
      k -= bin.below;
    }
    return -__uint_as_float(prefix);
  }

  /// Sends the tokens with x >= least to the first block, as far as there is room. Returns their number.
  __device__ uint32_t gather(float least) const {
    CandidateShared& first = *in_block(&candidates, 0);
    uint32_t sent = 0;
    for_tokens(least, [&](float x, uint32_t token) {
      if (!(x >= least)) return;
      ++sent;
      const uint32_t place = atomicAdd(&first.count, 1);
      if (place < kCandidates) first.list[place] = {x, token};
    });
    return team.reduce(sent, Sum{});
  }

 private:
  /// x <= 0: the smaller the key, the greater x.
  static __device__ uint32_t key(float x) { return __float_as_uint(x) & 0x7fffffffu; }

  /// f(x, token) of all tokens with x >= least, and of some others.
  template <class F>
  __device__ void for_tokens(float least, F const& f) const {
    slice.revisit([&](float top) { return !(x_of(top) < least); },
                  [&](int step, const float (&logit)[kStepTokens]) {
#pragma unroll
                    for (int j = 0; j < kStepTokens; ++j) f(x_of(logit[j]), slice.token_of(step, j));
                  });
  }

  /// Anchored at the greatest logit of the block's first step, with the score of its token reached.
  __device__ Draw from_first_step() const {
    float logit[kStepTokens];
    float top = kLowest;
    if (slice.steps > 0) {
      slice.peek(logit);
      top = fmaxf(greatest_of(logit), kLowest);
    }
    if (threadIdx.x == 0) reached = 0;
    const float anchor = team.reduce_block(top, Max{});
    Draw draw{noise, anchor, inv_temperature, &reached};
    if (top == anchor && isfinite(anchor)) {
      Draw first = draw;
      first.offer(logit, top, slice.token_of(0, 0), kLowest);
    }
    __syncthreads();
    return draw;
  }

  __device__ Streamed together(const Found* blocks) {
    for (int i = 0; i < team.size; ++i) greatest = fmaxf(greatest, blocks[i].greatest);
    Streamed all{.greatest = greatest, .winner = 0, .mass = 0, .again = false};
    uint64_t best = 0;
    for (int i = 0; i < team.size; ++i) {
      const Found& block = blocks[i];
      if (block.greatest == kLowest) continue;
      const float shift = x_of(block.anchor);  // <= 0, or NaN
      if (!(shift >= -kNear)) all.again = true;
      const float score = from_ordered(static_cast<uint32_t>(block.best >> 32)) + shift;
      best = max(best, ranked(score, token_of(block.best)));
      all.mass += block.mass * __expf(shift);
    }
    all.winner = token_of(best);
    return all;
  }
};

/// The candidates (all tokens of a row with x >= some bound), one a thread of the block that has them.
/// Leaves the top_k greatest, of those the ones with x >= cut, of those the ones that hold top_p of the mass
/// (ties with the last stay each time), and returns the one with the greatest x + noise.
__device__ inline uint32_t pick_candidate(CandidateShared& shared, Team block, int count, int top_k,
                                          float cut, float top_p, const Noise& noise) {
  const int i = threadIdx.x, lane = i % 32, warp = i / 32;
  if (i < count) {
    const Candidate own = shared.list[i];
    int place = 0;
#pragma unroll 8
    for (int j = 0; j < count; ++j) {
      const Candidate other = shared.list[j];
      place += other.x > own.x || (other.x == own.x && other.token < own.token);
    }
    shared.sorted[place] = own;
  }
  __syncthreads();
  const Candidate own = i < count ? shared.sorted[i] : Candidate{kLowest, UINT32_MAX};
  cut = fmaxf(cut, shared.sorted[top_k - 1].x);
  if (top_p < 1) {
    float sum = own.x >= cut ? expf(own.x) : 0.0f;  // of all up to this one
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const float before = __shfl_up_sync(kAllLanes, sum, offset);
      if (lane >= offset) sum += before;
    }
    float* warps = reinterpret_cast<float*>(block.shared.warp_counts);
    if (lane == 31) warps[warp] = sum;
    __syncthreads();
    float before = 0, total = 0;
    for (int w = 0; w < kSampleWarps; ++w) {
      if (w == warp) before = total;
      total += warps[w];
    }
    sum += before;
    const float target = fmaxf(0.0f, top_p) * total;
    const int kept = __syncthreads_count(own.x >= cut);
    const int last = __syncthreads_count(own.x >= cut && sum < target);
    cut = shared.sorted[min(last, kept - 1)].x;
  }
  const float score = i < count && own.x >= cut ? own.x + noise.of(own.token) : kLowest;
  return token_of(block.reduce_block(ranked(score, own.token), Max{}));
}

}  // namespace nanovllm::kernels
