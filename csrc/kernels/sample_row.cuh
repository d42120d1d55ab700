// The passes of `sample` over one row whose token is drawn.
#pragma once
#include "kernels/sample_race.cuh"
#include "kernels/sample_slice.cuh"

namespace nanovllm::kernels {

struct Candidate {
  float x;
  uint32_t token;
};
constexpr int kCandidates = kSampleThreads;

struct RowShared {
  union {
    uint4 words[kSampleThreads];  // of the first race
    struct {                      // after it; a group's candidates are neighbours in `list`
      Candidate list[kCandidates], sorted[kCandidates];
    } candidates;
  };
  uint32_t count;  // of candidates; may pass kCandidates
  int reached;     // see Race
};

/// What the race of all tokens brings while the row streams by.
struct Streamed {
  uint32_t winner;  // group
  float mass;       // sum of exp(x)
  bool valid;
};

template <class T>
struct Row {
  static constexpr float kMaxWeight = 0x1p32f;  // a heavier group raises its warp's anchor
  // No group wins with all its x below: -log(u) is between 2^-33 and 22.874.
  static constexpr float kFaint = -28.1f;
  static constexpr int kFirstShift = 20;                // of a key: 11 bits, then 10 and 10
  static constexpr int kWarpBlocks = 32 / kBlockWords;  // of Philox, a step
  static constexpr int kWordSteps = kBlockWords;        // for which a warp finds words at a time

  const Slice<T>& slice;
  Team& team;
  RowShared& shared;
  const Random random;
  const float inv_temperature;
  float greatest = kLowest;  // logit, of the row
  float own = kLowest;       // logit, of this thread

  __device__ float x_of(float logit) const { return (logit - greatest) * inv_temperature; }

  /// Reads the row, to find its greatest logit and the index. Sends the groups' greatest if asked to.
  __device__ void stream(bool groups) {
    float entry = kLowest;
    slice.stream([&](int step, const float (&logit)[kStepTokens]) { note(step, logit, entry); });
    if (groups) team.send_groups(own);
    greatest = team.reduce(own, Max{});
  }

  /// Reads the row and runs the race of all tokens; if `notes`, finds what stream() does, and the mass. The
  /// greatest logit is not known before the end: weights are relative to an anchor, a warp's own, that rises
  /// where they become too great.
  __device__ Streamed stream_race(bool notes) {
    const int lane = threadIdx.x % 32;
    const uint32_t* words = reinterpret_cast<const uint32_t*>(&shared.words[threadIdx.x - lane]);
    Runner runner{{&shared.reached, -Race::kMaxAnchor}, inv_temperature * kLog2e, by_register(words + lane)};
    if (notes) {
      float entry = kLowest;
      slice.stream([&](int step, const float (&logit)[kStepTokens]) {
        note(step, logit, entry);
        run(runner, step, logit);
      });
    } else {
      slice.stream([&](int step, const float (&logit)[kStepTokens]) { run(runner, step, logit); });
    }
    const Race& race = runner.race;
    const float anchor = team.reduce_block(race.anchor, Max{});
    Found found{.greatest = notes ? team.reduce_block(own, Max{}) : kLowest, .anchor = anchor};
    found.best = team.reduce_block(ranked(-race.time * exp2f(anchor - race.anchor), race.group), Max{});
    found.mass = notes ? team.reduce_block(runner.mass * exp2f(race.anchor - anchor), Sum{}) : 0.0f;
    return together(team.exchange(found), runner.scale);
  }

  /// Sum of exp(x) over x >= least.
  __device__ float mass(float least) const {
    float sum = 0;
    for_tokens(least, [&](float x, uint32_t) { sum += x >= least ? __expf(x) : 0.0f; });
    return team.reduce(sum, Sum{});
  }

  /// The group that wins race d, of the tokens with x >= cut.
  __device__ uint32_t race(float cut, uint32_t d) const {
    Race race{&shared.reached, 0};
    if (threadIdx.x == 0)
      shared.reached = __float_as_int(Race::kLift - Race::kLongestLog);  // the greatest token's
    __syncthreads();
    for_groups(fmaxf(cut, kFaint), [&](const float (&x)[kGroupTokens], uint32_t first) {
      const uint32_t group = first / kGroupTokens, word = random.word(group, 2 * d);
      const float own = weight(x, cut);
      if (race.may_win(own, word)) race.run(own, word, group);
    });
    return token_of(team.reduce(ranked(-race.time, race.group), Max{}));
  }

  /// The token that wins race d in the group that does; whole warps call it. Its x is infinite if
  /// stream_race() made no notes.
  __device__ Candidate winner(uint32_t group, float cut, uint32_t d) const {
    const uint32_t token = group * kGroupTokens + threadIdx.x % kGroupTokens;
    const float logit = token < slice.vocab ? to_float(slice.row[token]) : kLowest, x = x_of(logit);
    float top = logit;  // of the group
#pragma unroll
    for (int lanes = 1; lanes < kGroupTokens; lanes *= 2)
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, lanes));
    const float weight = x >= cut ? expf((logit - top) * inv_temperature) : 0.0f;
    uint64_t best = ranked(-wait_of(random.word(token, 2 * d + 1)) / weight, token);
#pragma unroll
    for (int lanes = 1; lanes < kGroupTokens; lanes *= 2)
      best = max(best, __shfl_xor_sync(kAllLanes, best, lanes));
    return {__shfl_sync(kAllLanes, x, token_of(best) % kGroupTokens, kGroupTokens), token_of(best)};
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
    RowShared& to = *in_block(&shared, 0);
    uint32_t sent = 0;
    for_groups(least, [&](const float (&x)[kGroupTokens], uint32_t first) {
      uint32_t count = 0;
#pragma unroll
      for (int j = 0; j < kGroupTokens; ++j) count += x[j] >= least;
      if (count == 0) return;
      sent += count;
      uint32_t place = atomicAdd(&to.count, count);
#pragma unroll
      for (int j = 0; j < kGroupTokens; ++j)
        if (x[j] >= least && place < kCandidates) to.candidates.list[place++] = {x[j], first + j};
    });
    return team.reduce(sent, Sum{});
  }

  /// The token of the row, where its candidates are all tokens with x >= some bound. For the first block, a
  /// candidate a thread. The filters leave the top_k greatest with x >= cut, of those the ones that hold
  /// top_p of the mass; ties with the last stay each time.
  __device__ uint32_t pick_candidate(int count, int top_k, float cut, float top_p) const {
    const auto& [list, sorted] = shared.candidates;
    sort_candidates(count);
    cut = fmaxf(cut, sorted[top_k - 1].x);
    const float kept = top_p < 1 ? top_p_of_candidates(count, cut, top_p) : cut;
    // The first candidate of a group runs for it.
    const int i = threadIdx.x;
    const uint32_t group = i < count ? list[i].token / kGroupTokens : UINT32_MAX;
    float x[kGroupTokens];
#pragma unroll
    for (int j = 0; j < kGroupTokens; ++j) x[j] = kLowest;
    if (i == 0 || list[i - 1].token / kGroupTokens != group)
      for (int n = i; n < count && list[n].token / kGroupTokens == group; ++n) {
#pragma unroll
        for (int j = 0; j < kGroupTokens; ++j)
          if (list[n].token % kGroupTokens == j) x[j] = list[n].x;
      }
    for (uint32_t d = 0;; ++d) {
      const float time = __fdividef(wait_of(random.word(group, 2 * d)), weight(x, cut));
      const uint32_t best = token_of(team.reduce_block(ranked(-time, group), Max{}));
      const Candidate token = winner(best, cut, d);
      if (token.x >= kept) return token.token;
      cut = nextafterf(token.x, 1.0f);
    }
  }

 private:
  struct Runner {
    Race race;
    float scale;            // logit * scale is a power of 2
    const uint32_t* words;  // shared memory: this thread's, a warp apart
    float mass = 0;         // of the thread, relative to 2^anchor
  };

  /// x <= 0: the smaller the key, the greater x.
  static __device__ uint32_t key(float x) { return __float_as_uint(x) & 0x7fffffffu; }

  /// Of a group, by its x: those with x >= cut take part.
  static __device__ float weight(const float (&x)[kGroupTokens], float cut) {
    return weight_of_group([&](int j) { return x[j] >= cut ? exp2_approx(x[j] * kLog2e) : 0.0f; });
  }

  __device__ void note(int step, const float (&logit)[kStepTokens], float& entry) {
    const float top = greatest_of(logit);
    own = fmaxf(own, top);
    slice.note(step, entry, top);
  }

  /// A step of the race of all tokens. Of all lanes.
  __device__ void run(Runner& runner, int step, const float (&logit)[kStepTokens]) const {
    Race& race = runner.race;
    const auto power = [&](int j) { return fmaf(logit[j], runner.scale, -race.anchor); };
    if (step % kWordSteps == 0) find_words(step);
    const uint32_t word = runner.words[step % kWordSteps * 32];
    float weight = weight_of_group([&](int j) { return exp2_approx(power(j)); });
    const bool heavy = !(weight < kMaxWeight);
    if (__any_sync(kAllLanes, heavy || race.may_win(weight, word))) {
      if (__any_sync(kAllLanes, heavy)) {  // not only if it may win, which depends on timing
        raise_anchor(runner, reduce_lanes(greatest_of(logit), Max{}) * runner.scale);
        weight = weight_of_group([&](int j) { return exp2_approx(fmaxf(power(j), kLowest)); });  // NaN: 0
      }
      if (race.may_win(weight, word)) race.run(weight, word, slice.group_of(step));
    }
    runner.mass += weight;
  }
  static __device__ void raise_anchor(Runner& runner, float anchor) {
    if (!(anchor > runner.race.anchor)) return;
    runner.race.time *= exp2f(anchor - runner.race.anchor);
    runner.mass *= exp2f(runner.race.anchor - anchor);
    runner.race.anchor = anchor;
  }

  /// f(x, first token) of all groups with a token at x >= least, and of some others.
  template <class F>
  __device__ void for_groups(float least, F const& f) const {
    slice.revisit([&](float top) { return !(x_of(top) < least); },
                  [&](int step, const float (&logit)[kStepTokens]) {
                    float x[kGroupTokens];
#pragma unroll
                    for (int j = 0; j < kGroupTokens; ++j) x[j] = x_of(logit[j]);
                    f(x, slice.token_of(step, 0));
                  });
  }
  /// f(x, token) of all tokens with x >= least, and of some others.
  template <class F>
  __device__ void for_tokens(float least, F const& f) const {
    for_groups(least, [&](const float (&x)[kGroupTokens], uint32_t first) {
#pragma unroll
      for (int j = 0; j < kGroupTokens; ++j) f(x[j], first + j);
    });
  }

  /// The words of race 0 for the warp's next steps, a Philox block a lane.
  __device__ void find_words(int step) const {
    const int lane = threadIdx.x % 32;
    const uint32_t block = slice.first / (kGroupTokens * kBlockWords) +
                           (step + lane / kWarpBlocks) * (kSampleThreads / kBlockWords) +
                           threadIdx.x / 32 * kWarpBlocks + lane % kWarpBlocks;
    const auto [word] = random.block(block, 0);
    shared.words[threadIdx.x] = make_uint4(word[0], word[1], word[2], word[3]);
    __syncwarp();
  }

  /// Not valid: there is no token, one is +inf, or the anchors are out of range (temperatures near 0).
  __device__ Streamed together(const Found* blocks, float scale) {
    float anchor = -Race::kMaxAnchor;
    for (int i = 0; i < team.size; ++i) {
      greatest = fmaxf(greatest, blocks[i].greatest);
      anchor = fmaxf(anchor, blocks[i].anchor);
    }
    Streamed all{};
    uint64_t best = 0;
    for (int i = 0; i < team.size; ++i) {
      const float time = -from_ordered(static_cast<uint32_t>(blocks[i].best >> 32));
      best = max(best, ranked(-time * exp2f(anchor - blocks[i].anchor), token_of(blocks[i].best)));
      if (blocks[i].mass != 0)  // 0 without notes, where the greatest logit is not known
        all.mass += blocks[i].mass * exp2f(-fmaf(greatest, scale, -blocks[i].anchor));
    }
    all.winner = token_of(best);
    all.valid = scale > 0 && fabsf(anchor) < Race::kMaxAnchor && all.mass < INFINITY;
    return all;
  }

  /// To shared.candidates.sorted, by falling x.
  __device__ void sort_candidates(int count) const {
    auto& [list, sorted] = shared.candidates;
    const int i = threadIdx.x;
    if (i < count) {
      const Candidate own = list[i];
      int place = 0;
#pragma unroll 8
      for (int j = 0; j < count; ++j)
        place += list[j].x > own.x || (list[j].x == own.x && list[j].token < own.token);
      sorted[place] = own;
    }
    __syncthreads();
  }

  /// The least x of the candidates that hold top_p of the mass of those with x >= cut.
  __device__ float top_p_of_candidates(int count, float cut, float top_p) const {
    const auto& sorted = shared.candidates.sorted;
    const int i = threadIdx.x, lane = i % 32, warp = i / 32;
    const float x = i < count ? sorted[i].x : kLowest;
    float sum = x >= cut ? expf(x) : 0.0f;  // of all up to this one
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const float before = __shfl_up_sync(kAllLanes, sum, offset);
      if (lane >= offset) sum += before;
    }
    float* warps = reinterpret_cast<float*>(team.shared.warp_counts);
    if (lane == 31) warps[warp] = sum;
    __syncthreads();
    float before = 0, total = 0;
    for (int w = 0; w < kSampleWarps; ++w) {
      if (w == warp) before = total;
      total += warps[w];
    }
    sum += before;
    const float target = fmaxf(0.0f, top_p) * total;
    const int left = __syncthreads_count(x >= cut);
    const int last = __syncthreads_count(x >= cut && sum < target);
    return sorted[min(last, left - 1)].x;
  }
};

}  // namespace nanovllm::kernels
