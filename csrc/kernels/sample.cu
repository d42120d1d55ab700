// token_ids[b] = the token with the greatest x + Gumbel noise among those that min-p, top-k and top-p leave;
// x = (logit - greatest logit) / temperature (nanovllm/ops/sample.py, csrc/common/philox.h).
//
// A cluster of 8 blocks owns a row (below sm_90: one block). The row is read once, into the shared memory of
// the cluster where it fits, and later passes run over it there; else they read memory (L2) again. A thread's
// unit is 4 tokens: the words of one Philox block.
//
//   greatest  of all; a greedy row ends here, with the lowest token that has it
//   top-k     the k-th of the threads' greatest, if there are as many threads, bounds the k-th greatest x
//   from
//             below: few tokens reach it. Where at most 512 do, they go to the first block, one a thread, and
//             all filters and the pick work on them. Else the k-th greatest is found by three digits of the
//             float's bits, a histogram of counts for each
//   pick      the greatest x + noise of x >= cut. Tokens without a chance are dropped before the logarithms:
//             -log(u) >= 1 - u, so a token beats `bound` only if 1 - u <= exp(x - bound)
//   top-p     the winner is kept if the tokens above it hold less than top_p of the mass. Else the cut is
//             above it, and the pick repeats over x > its x: the winner of a set is that of every subset that
//             holds it, so the token is that of an exact cut. Half the mass goes each time, on average
//
// All sums run in one order and all else is exact, so a row gives the same token at every call, in any batch.
// Moves vocab * 4 (or 2) bytes a row: bound by memory, and by Philox where nothing is filtered. While a block
// works on its part of a row, that of the block that follows it on its multiprocessor is prefetched into L2.
#include <algorithm>
#include <array>
#include <atomic>

#include "common/cluster.cuh"
#include "common/convert.cuh"
#include "common/launch.cuh"
#include "common/philox.h"
#include "common/prefetch.cuh"
#include "common/reduce.cuh"
#include "kernels/sample.h"

namespace nanovllm::kernels {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kMaxCluster = 8;
constexpr int kUnit = 4;     // tokens
constexpr int kLoads = 5;    // units of a thread, in flight
constexpr int kBins = 2048;  // of a histogram
constexpr int kBlocksPerSm = 2;
constexpr float kLowest = -INFINITY;
constexpr uint32_t kAllLanes = 0xffffffff;

struct Candidate {
  float x;
  uint32_t token;
};

struct Shared {
  uint64_t warps[kWarps];
  uint64_t blocks[2][kMaxCluster];  // two of each that other blocks touch: the next round needs no barrier
  alignas(16) uint32_t histogram[2][kBins];
  uint32_t warp_counts[kWarps];
  uint32_t bin, below;
  uint32_t bound;       // ordered(score)
  uint32_t candidates;  // of the first block, as below
  Candidate candidate[kThreads], sorted[kThreads];
};

/// Floats in their order as integers.
__device__ uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ float from_ordered(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

/// The blocks of a row, and what they do together. All threads call; all get the result.
struct Team {
  Shared& shared;
  const int rank, size;
  int round = 0, histograms = 0;

  __device__ void sync() const {
    if (size == 1) return __syncthreads();
    cluster_arrive();
    cluster_wait();
  }

  template <class T, class Op>
  __device__ T reduce(T x, Op const& op) {
    T* warps = reinterpret_cast<T*>(shared.warps);
    T* blocks = reinterpret_cast<T*>(shared.blocks[round ^= 1]);
    const int lane = threadIdx.x % 32;
    x = reduce_lanes(x, op);
    if (lane == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    if (threadIdx.x < 32) {
      x = reduce_lanes(warps[lane % kWarps], op, kWarps);
      if (lane < size) in_block(blocks, lane)[rank] = x;
    }
    sync();
    x = blocks[0];
    for (int i = 1; i < size; ++i) x = op(x, blocks[i]);
    return x;
  }

  /// The token with the greatest score; the lowest on ties.
  __device__ uint32_t winner(float score, uint32_t token) {
    return ~static_cast<uint32_t>(reduce(static_cast<uint64_t>(ordered(score)) << 32 | ~token, Max{}));
  }

  struct Bin {
    uint32_t index, below;  // `below`: counted in lower bins
  };

  /// The bin with entry number `rank_of` (from 1), bins in rising order; for_bins(add) calls add(bin).
  template <class F>
  __device__ Bin find_bin(uint32_t rank_of, F const& for_bins) {
    static_assert(kBins == 4 * kThreads);
    uint32_t* histogram = shared.histogram[histograms ^= 1];
    reinterpret_cast<uint4*>(histogram)[threadIdx.x] = uint4{};
    __syncthreads();
    for_bins([&](uint32_t bin) { atomicAdd(histogram + bin, 1); });
    sync();
    uint4 count{};
    for (int i = 0; i < size; ++i) {
      const uint4 c = reinterpret_cast<const uint4*>(in_block(histogram, i))[threadIdx.x];
      count.x += c.x, count.y += c.y, count.z += c.z, count.w += c.w;
    }
    const uint32_t own = count.x + count.y + count.z + count.w;
    uint32_t end = own;  // counted up to this thread's bins and in them
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const uint32_t before = __shfl_up_sync(kAllLanes, end, offset);
      if (lane >= offset) end += before;
    }
    if (lane == 31) shared.warp_counts[warp] = end;
    __syncthreads();
    for (int i = 0; i < warp; ++i) end += shared.warp_counts[i];
    uint32_t below = end - own;
    if (below < rank_of && rank_of <= end) {
      uint32_t bin = 4 * threadIdx.x;
      for (const uint32_t c : {count.x, count.y, count.z}) {
        if (rank_of <= below + c) break;
        below += c;
        ++bin;
      }
      shared.bin = bin;
      shared.below = below;
    }
    __syncthreads();
    return {shared.bin, shared.below};
  }
};

/// This block's tokens of a row.
template <class T, bool kResident>
struct Slice {
  using Unit = Pack<T, kUnit>;
  const T* logits;  // [tokens]
  Unit* kept;       // [units], kResident
  uint32_t first;   // token
  int tokens, units;
  int whole;  // units that one access loads

  __device__ Unit read(int i) const {
    if (i < whole) return Unit::load(logits + kUnit * i);
    Unit unit;
#pragma unroll
    for (int j = 0; j < kUnit; ++j) {
      if (kUnit * i + j < tokens)
        unit.data[j] = logits[kUnit * i + j];
      else
        set(unit.data[j], kLowest);
    }
    return unit;
  }
  __device__ Unit operator[](int i) const {
    if constexpr (kResident)
      return kept[i];
    else
      return read(i);
  }

  /// The one read of the row. Returns ordered(the greatest logit of this thread), then ~its first token: the
  /// more, the better. NaN counts as -inf, -0 as 0.
  __device__ uint64_t take() const {
    float greatest = kLowest;
    int at = 0;
    const auto use = [&](int i, const Unit& unit) {
      if constexpr (kResident) kept[i] = unit;
      const float top = fmaxf(fmaxf(to_float(unit.data[0]), to_float(unit.data[1])),
                              fmaxf(to_float(unit.data[2]), to_float(unit.data[3])));
      if (top > greatest) greatest = top, at = i;
    };
    for (int base = threadIdx.x; base < whole; base += kLoads * kThreads) {
      Unit unit[kLoads];
#pragma unroll
      for (int u = 0; u < kLoads; ++u)
        if (base + u * kThreads < whole) unit[u] = Unit::load(logits + kUnit * (base + u * kThreads));
#pragma unroll
      for (int u = 0; u < kLoads; ++u)
        if (base + u * kThreads < whole) use(base + u * kThreads, unit[u]);
    }
    // The rest keeps the thread of its unit, which so reads only what it wrote.
    for (int i = whole + (threadIdx.x + kThreads - whole % kThreads) % kThreads; i < units; i += kThreads)
      use(i, read(i));
    uint32_t token = UINT32_MAX;
    if (greatest > kLowest) {
      const Unit unit = (*this)[at];
      int j = 0;
      while (to_float(unit.data[j]) != greatest) ++j;
      token = first + kUnit * at + j;
    }
    return static_cast<uint64_t>(ordered(greatest + 0.0f)) << 32 | ~token;
  }

  static __device__ void set(float& to, float x) { to = x; }
  static __device__ void set(__nv_bfloat16& to, float x) { assign(to, x); }
};

/// -log(-log(u)), u = (word + 0.5) / 2^32.
__device__ float gumbel(uint32_t word) {
  const float u = (static_cast<float>(word) + 0.5f) * 0x1p-32f;
  const float rest = (static_cast<float>(~word) + 0.5f) * 0x1p-32f;  // 1 - u, not rounded to 0
  return -logf(rest < 0.25f ? -log1pf(-rest) : -logf(u));
}

/// The words of a row's tokens.
struct Noise {
  uint32_t key0, key1, low, high;
  __device__ Noise(uint64_t seed, uint64_t position)
      : key0(static_cast<uint32_t>(seed)),
        key1(static_cast<uint32_t>(seed >> 32)),
        low(static_cast<uint32_t>(position)),
        high(static_cast<uint32_t>(position >> 32)) {}
  /// Those of the unit of `token`.
  __device__ PhiloxBlock<uint32_t> words(uint32_t token) const {
    return philox(PhiloxBlock<uint32_t>{{token / kUnit, low, high, 0}}, key0, key1);
  }
  __device__ float of(uint32_t token) const {
    const auto unit = words(token);
    const uint32_t even = token % 4 < 2 ? unit.word[0] : unit.word[2];
    const uint32_t odd = token % 4 < 2 ? unit.word[1] : unit.word[3];
    return gumbel(token % 2 == 0 ? even : odd);
  }
};

/// False only if x + gumbel(word) < bound: 1 + (1 - u), rounded down to 23 bits, against 1 + exp(x - bound),
/// with some slack.
__device__ bool may_reach(float bound, float x, uint32_t word) {
  const float rest = __uint_as_float(0x3f800000u | (~word >> 9));
  return rest <= fmaf(__expf(x - bound), 1.001f, 1.0f);
}

/// One row whose token is drawn: what all passes after the first share.
template <class T, bool kResident>
struct Row {
  const Slice<T, kResident>& slice;
  Team& team;
  float greatest, inv_temperature;
  uint32_t greatest_token;
  float own_x;  // this thread's greatest

  __device__ float x_of(float logit) const { return (logit - greatest) * inv_temperature; }

  __device__ void load_x(float (&x)[kUnit], int i) const {
    const auto unit = slice[i];
#pragma unroll
    for (int j = 0; j < kUnit; ++j) x[j] = x_of(to_float(unit.data[j]));
  }

  /// f(x, token) for the tokens of the warp's threads that have one at x >= least. Where few do, all lanes
  /// share the units of each of them.
  template <class F>
  __device__ void for_tokens(float least, F const& f) const {
    constexpr int kFew = 4;
    const auto use = [&](int i) {
      float x[kUnit];
      load_x(x, i);
#pragma unroll
      for (int j = 0; j < kUnit; ++j) f(x[j], slice.first + kUnit * i + j);
    };
    const int lane = threadIdx.x % 32;
    uint32_t owners = __ballot_sync(kAllLanes, !(own_x < least));
    if (__popc(owners) > kFew) {
      if (owners >> lane & 1)
        for (int i = threadIdx.x; i < slice.units; i += kThreads) use(i);
      return;
    }
    for (; owners != 0; owners &= owners - 1) {
      const int owner = threadIdx.x - lane + __ffs(owners) - 1;
      for (int i = owner + lane * kThreads; i < slice.units; i += 32 * kThreads) use(i);
    }
  }

  /// Sum of exp(x) over x >= least.
  __device__ float mass(float least) const {
    float sum = 0;
    for_tokens(least, [&](float x, uint32_t) { sum += x >= least ? __expf(x) : 0.0f; });
    return team.reduce(sum, Sum{});
  }

  /// x <= 0: the smaller the key, the greater x.
  static __device__ uint32_t key(float x) { return __float_as_uint(x) & 0x7fffffffu; }

  static constexpr int kFirstShift = 20;  // of a key: 11 bits, then 10 and 10

  /// At most the k-th greatest x.
  __device__ float bound_of_kth(uint32_t k) const {
    if (k > kThreads * team.size) return kLowest;
    const auto bin = team.find_bin(k, [&](auto const& add) { add(key(own_x) >> kFirstShift); });
    return -__uint_as_float(((bin.index + 1) << kFirstShift) - 1);
  }

  /// The k-th greatest x, which is at least `least`.
  __device__ float kth_greatest(uint32_t k, float least) const {
    uint32_t prefix = 0;
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
    Shared& first = *in_block(&team.shared, 0);
    uint32_t sent = 0;
    for_tokens(least, [&](float x, uint32_t token) {
      if (!(x >= least)) return;
      ++sent;
      const uint32_t place = atomicAdd(&first.candidates, 1);
      if (place < kThreads) first.candidate[place] = {x, token};
    });
    return team.reduce(sent, Sum{});
  }

  /// The token with the greatest x + noise of those with x >= cut; the lowest on ties.
  __device__ uint32_t pick(float cut, const Noise& noise) const {
    float best = kLowest;
    uint32_t best_token = UINT32_MAX;
    // A score that is reached: first that of the greatest token.
    if (threadIdx.x == 0) team.shared.bound = ordered(noise.of(greatest_token));
    __syncthreads();
    float bound = from_ordered(team.shared.bound);
    __syncthreads();
    const int lane = threadIdx.x % 32;
    const bool some = __any_sync(kAllLanes, own_x >= cut);
    for (int base = threadIdx.x - lane; some && base < slice.units; base += kThreads) {
      float x[kUnit] = {kLowest, kLowest, kLowest, kLowest};
      if (base + lane < slice.units) load_x(x, base + lane);
      const float top = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
      if (!__any_sync(kAllLanes, top >= fmaxf(cut, bound - kMaxGumbel))) continue;
      const uint32_t token = slice.first + kUnit * (base + lane);
      const auto words = noise.words(token);
      const auto& word = words.word;
      // The unit's least 1 - u against its greatest x: most units end here.
      const bool hit = may_reach(bound, top, max(max(word[0], word[1]), max(word[2], word[3])));
      if (!__any_sync(kAllLanes, hit && top >= cut)) continue;
      float reached = kLowest;
#pragma unroll
      for (int j = 0; j < kUnit; ++j) {
        if (!(x[j] >= cut && may_reach(bound, x[j], word[j]))) continue;
        const float score = x[j] + gumbel(word[j]);
        if (score > best) best = reached = score, best_token = token + j;
      }
      // The bound of the block goes up, and the warp learns it.
      const uint32_t most = __reduce_max_sync(kAllLanes, ordered(reached));
      const uint32_t before = lane == 0 ? atomicMax(&team.shared.bound, most) : 0;
      bound = from_ordered(max(most, __shfl_sync(kAllLanes, before, 0)));
    }
    return team.winner(best, best_token);
  }
};

/// The candidates (all tokens of a row with x >= some bound), one a thread of the block that has them.
/// Leaves the top_k greatest, of those the ones with x >= cut, of those the ones that hold top_p of the mass
/// (ties with the last stay each time), and returns the one with the greatest x + noise.
__device__ uint32_t pick_candidate(Shared& shared, int count, int top_k, float cut, float top_p,
                                   const Noise& noise) {
  Team block{shared, 0, 1};
  const int i = threadIdx.x, lane = i % 32, warp = i / 32;
  if (i < count) {
    const Candidate own = shared.candidate[i];
    int place = 0;
    for (int j = 0; j < count; ++j) {
      const Candidate other = shared.candidate[j];
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
    float* warps = reinterpret_cast<float*>(shared.warp_counts);
    if (lane == 31) warps[warp] = sum;
    __syncthreads();
    float before = 0, total = 0;
    for (int w = 0; w < kWarps; ++w) {
      if (w == warp) before = total;
      total += warps[w];
    }
    sum += before;
    const float target = fmaxf(0.0f, top_p) * total;
    const int kept = __syncthreads_count(own.x >= cut);
    const int last = __syncthreads_count(own.x >= cut && sum < target);
    cut = shared.sorted[min(last, kept - 1)].x;
  }
  float best = kLowest;
  if (i < count && own.x >= cut) {
    best = own.x + noise.of(own.token);
  }
  return block.winner(best, own.token);
}

template <class T, bool kResident>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    sample_kernel(const SampleParams p, int units_per_block, int rows_ahead, bool aligned) {
  __shared__ Shared shared;
  extern __shared__ uint4 kept[];
  launch_next_grid();
  cluster_arrive();
  Team team{shared, cluster_rank(), cluster_size()};
  if (threadIdx.x == 0) shared.candidates = 0;
  const int64_t b = blockIdx.x / team.size;
  const int vocab = static_cast<int>(p.vocab);
  const int64_t first = static_cast<int64_t>(team.rank) * units_per_block * kUnit;
  const T* logits = static_cast<const T*>(p.logits) + b * p.logits_stride_row;
  const int tokens = static_cast<int>(
      max(int64_t{0}, min(int64_t{units_per_block} * kUnit, static_cast<int64_t>(vocab) - first)));
  const Slice<T, kResident> slice{.logits = logits + first,
                                  .kept = reinterpret_cast<Pack<T, kUnit>*>(kept),
                                  .first = static_cast<uint32_t>(first),
                                  .tokens = tokens,
                                  .units = (tokens + kUnit - 1) / kUnit,
                                  .whole = aligned ? tokens / kUnit : 0};
  wait_for_previous_grid();
  const float inv_temperature = 1.0f / p.temperature[b];
  const bool greedy = !(p.temperature[b] > 0) || isinf(inv_temperature);
  const int32_t top_k = p.top_k[b];
  const float top_p = p.top_p[b], min_p = p.min_p[b];
  const uint64_t own_most = slice.take();
  if (kResident && threadIdx.x == 0 && b + rows_ahead < p.batch)
    prefetch_bulk(slice.logits + rows_ahead * p.logits_stride_row, tokens * int64_t{sizeof(T)});
  cluster_wait();  // the other blocks have started: their shared memory is there
  const uint64_t most = team.reduce(own_most, Max{});
  const float greatest = from_ordered(static_cast<uint32_t>(most >> 32));

  uint32_t token = ~static_cast<uint32_t>(most);
  if (greatest == kLowest) {
    token = 0;
  } else if (!greedy && !isinf(greatest)) {
    Row<T, kResident> row{slice, team, greatest, inv_temperature, token};
    row.own_x = row.x_of(from_ordered(static_cast<uint32_t>(own_most >> 32)));
    const Noise noise(p.seeds[b], p.positions[b]);
    float cut = min_p > 0 ? fminf(0.0f, logf(min_p)) : kLowest;
    if (top_k > 0 && top_k < vocab) {
      const float least = row.bound_of_kth(top_k);
      if (top_k <= kThreads && least > kLowest) {
        const uint32_t count = row.gather(least);
        if (count <= kThreads) {
          if (team.rank != 0) return;
          token = pick_candidate(shared, count, top_k, cut, top_p, noise);
          if (threadIdx.x == 0) p.token_ids[b] = token;
          return;
        }
      }
      cut = fmaxf(cut, row.kth_greatest(top_k, least));
    }
    const bool nucleus = top_p < 1;
    const float target = nucleus ? fmaxf(0.0f, top_p) * row.mass(cut) : 0.0f;
    if (nucleus && target <= 1) cut = 0;  // the greatest token holds exp(0)
    for (;;) {
      token = row.pick(cut, noise);
      if (!nucleus) break;
      const float x = row.x_of(to_float(logits[token]));
      const float above = nextafterf(x, 1.0f);
      if (x >= 0 || row.mass(above) < target) break;
      cut = above;
    }
  }
  if (team.rank == 0 && threadIdx.x == 0) p.token_ids[b] = token;
}

constexpr int kMaxDevices = 64;

struct Device {
  int index = 0, major = 0, num_sms = 0, smem = 0;  // smem: bytes that a block may have
  cudaError_t read() {
    cudaError_t status = cudaGetDevice(&index);
    if (status == cudaSuccess)
      status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
    if (status == cudaSuccess)
      status = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, index);
    if (status == cudaSuccess)
      status = cudaDeviceGetAttribute(&smem, cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
    return status;
  }
};

/// Once a kernel and device.
template <class T>
cudaError_t raise_smem_limit(const Device& device, int bytes) {
  static std::array<std::atomic<bool>, kMaxDevices> raised;
  if (device.index < kMaxDevices && raised[device.index]) return cudaSuccess;
  const cudaError_t status =
      cudaFuncSetAttribute(sample_kernel<T, true>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status == cudaSuccess && device.index < kMaxDevices) raised[device.index] = true;
  return status;
}

template <class T>
cudaError_t launch(const SampleParams& p, cudaStream_t stream) {
  Device device;
  if (const cudaError_t status = device.read(); status != cudaSuccess) return status;
  const int cluster = device.major >= 9 ? kMaxCluster : 1;
  const int units = static_cast<int>((p.vocab + kUnit - 1) / kUnit);
  const int units_per_block = (units + cluster - 1) / cluster;
  const bool aligned = is_aligned(p.logits, {p.logits_stride_row}, sizeof(T), kUnit * sizeof(T));
  const int64_t smem = int64_t{units_per_block} * kUnit * sizeof(T);
  const int most = device.smem - static_cast<int>(sizeof(Shared));
  const dim3 blocks(p.batch * cluster);
  const int rows_ahead = std::max(1, kBlocksPerSm * device.num_sms / cluster);
  if (smem > most)
    return launch_pdl_clusters(sample_kernel<T, false>, cluster, blocks, kThreads, 0, stream, p,
                               units_per_block, rows_ahead, aligned);
  if (const cudaError_t status = raise_smem_limit<T>(device, most); status != cudaSuccess) return status;
  return launch_pdl_clusters(sample_kernel<T, true>, cluster, blocks, kThreads, smem, stream, p,
                             units_per_block, rows_ahead, aligned);
}

}  // namespace

cudaError_t launch_sample(const SampleParams& p, cudaStream_t stream) {
  return p.dtype == DType::kFloat32 ? launch<float>(p, stream) : launch<__nv_bfloat16>(p, stream);
}

}  // namespace nanovllm::kernels
