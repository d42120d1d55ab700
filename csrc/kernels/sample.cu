// token_ids[b] = the token with the greatest x + Gumbel noise among those that min-p, top-k and top-p leave;
// x = (logit - greatest logit) / temperature (nanovllm/ops/sample.py, csrc/common/philox.h).
//
// A cluster of 8 blocks owns a row (below sm_90: one block). The row is read once, into the shared memory of
// the cluster where it fits, and later passes run over it there; else they read memory (L2) again. A thread's
// unit is 4 tokens: the words of one Philox block.
//
//   greatest  of all; a greedy row ends here, with the lowest token that has it
//   top-k     the k-th greatest x, exact: three digits of the float's bits, a histogram of counts for each.
//             The k-th of the threads' greatest, if there are as many threads, bounds it from below: few
//             tokens get into the histograms
//   pick      the greatest x + noise of x >= cut. Tokens without a chance are dropped before the logarithms:
//             -log(u) >= 1 - u, so a token beats `bound` only if 1 - u <= exp(x - bound)
//   top-p     the winner is kept if the tokens above it hold less than top_p of the mass. Else the cut is
//             above it, and the pick repeats over x > its x: the winner of a set is that of every subset that
//             holds it, so the token is that of an exact cut. Half the mass goes each time, on average
//
// All sums run in one order and all else is exact, so a row gives the same token at every call, in any batch.
// Moves vocab * 4 (or 2) bytes a row: bound by memory, and by Philox where nothing is filtered.
#include <algorithm>
#include <array>
#include <atomic>

#include "common/cluster.cuh"
#include "common/convert.cuh"
#include "common/launch.cuh"
#include "common/philox.h"
#include "common/reduce.cuh"
#include "kernels/sample.h"

namespace nanovllm::kernels {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kMaxCluster = 8;
constexpr int kUnit = 4;     // tokens
constexpr int kLoads = 5;    // units of a thread, in flight
constexpr int kBins = 2048;  // of a histogram
constexpr float kLowest = -INFINITY;
constexpr float kMinGumbel = -3.2f;  // below -log(-log(2^-33)) = -3.13: no noise is smaller
constexpr uint32_t kAllLanes = 0xffffffff;

struct Shared {
  uint64_t warps[kWarps];
  uint64_t blocks[2][kMaxCluster];  // two of each that other blocks touch: the next round needs no barrier
  alignas(16) uint32_t histogram[2][kBins];
  uint32_t warp_counts[kWarps];
  uint32_t bin, below;
};

/// The blocks of a row, and what they do together. All threads call; all get the result.
struct Team {
  Shared& shared;
  const int rank = cluster_rank(), size = cluster_size();
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

  /// The one read of the row. Returns the greatest logit of this thread; NaN counts as -inf.
  __device__ float take() const {
    float greatest = kLowest;
    const auto use = [&](int i, const Unit& unit) {
      if constexpr (kResident) kept[i] = unit;
#pragma unroll
      for (int j = 0; j < kUnit; ++j) greatest = fmaxf(greatest, to_float(unit.data[j]));
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
    return greatest;
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

/// Floats in their order as integers.
__device__ uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ float from_ordered(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

/// One row whose token is drawn: what all passes after the first share.
template <class T, bool kResident>
struct Row {
  const Slice<T, kResident>& slice;
  Team& team;
  float greatest, inv_temperature;
  float own_x;  // this thread's greatest

  __device__ float x_of(float logit) const { return (logit - greatest) * inv_temperature; }

  __device__ void load_x(float (&x)[kUnit], int i) const {
    const auto unit = slice[i];
#pragma unroll
    for (int j = 0; j < kUnit; ++j) x[j] = x_of(to_float(unit.data[j]));
  }

  /// f(x) for this thread's tokens; none where all are below `least`.
  template <class F>
  __device__ void for_tokens(float least, F const& f) const {
    if (own_x < least) return;
    for (int i = threadIdx.x; i < slice.units; i += kThreads) {
      float x[kUnit];
      load_x(x, i);
#pragma unroll
      for (int j = 0; j < kUnit; ++j) f(x[j]);
    }
  }

  /// Sum of exp(x) over x >= least.
  __device__ float mass(float least) const {
    float sum = 0;
    for_tokens(least, [&](float x) { sum += x >= least ? __expf(x) : 0.0f; });
    return team.reduce(sum, Sum{});
  }

  /// x <= 0: the smaller the key, the greater x.
  static __device__ uint32_t key(float x) { return __float_as_uint(x) & 0x7fffffffu; }

  /// The k-th greatest x.
  __device__ float kth_greatest(uint32_t k) const {
    constexpr int kFirstShift = 20;  // 11 bits, then 10 and 10
    float least = kLowest;
    if (k <= kThreads * team.size) {
      const auto bin = team.find_bin(k, [&](auto const& add) { add(key(own_x) >> kFirstShift); });
      least = -__uint_as_float(((bin.index + 1) << kFirstShift) - 1);
    }
    uint32_t prefix = 0;
    for (int shift = kFirstShift; shift >= 0; shift -= 10) {
      const int width = shift == kFirstShift ? 11 : 10;
      const auto bin = team.find_bin(k, [&](auto const& add) {
        for_tokens(least, [&](float x) {
          const uint32_t digits = key(x) >> shift;
          if (digits >> width == prefix && !(x < least)) add(digits & ((1u << width) - 1));
        });
      });
      prefix = prefix << width | bin.index;
      k -= bin.below;
    }
    return -__uint_as_float(prefix);
  }

  /// The token with the greatest x + noise of those with x >= cut; the lowest on ties.
  __device__ uint32_t pick(float cut, uint64_t seed, uint64_t position) const {
    const uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
    const uint32_t low = static_cast<uint32_t>(position), high = static_cast<uint32_t>(position >> 32);
    float best = kLowest;
    uint32_t best_token = UINT32_MAX;
    float bound = kMinGumbel;  // a score that is reached: first that of the greatest token, at least
    const int lane = threadIdx.x % 32;
    const bool some = __any_sync(kAllLanes, own_x >= cut);
    for (int base = threadIdx.x - lane; some && base < slice.units; base += kThreads) {
      float x[kUnit] = {kLowest, kLowest, kLowest, kLowest};
      if (base + lane < slice.units) load_x(x, base + lane);
      const float top = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
      if (!__any_sync(kAllLanes, top >= fmaxf(cut, bound - kMaxGumbel))) continue;
      const uint32_t token = slice.first + kUnit * (base + lane);
      const auto words = philox(PhiloxBlock<uint32_t>{{token / kUnit, low, high, 0}}, key0, key1);
      uint32_t hits = 0;
#pragma unroll
      for (int j = 0; j < kUnit; ++j) {
        // 1 + (1 - u), rounded down to 23 bits, against 1 + exp(x - bound), with some slack.
        const float rest = __uint_as_float(0x3f800000u | (~words.word[j] >> 9));
        if (x[j] >= cut && rest <= fmaf(__expf(x[j] - bound), 1.001f, 1.0f)) hits |= 1u << j;
      }
      if (!__any_sync(kAllLanes, hits != 0)) continue;
      for (; hits != 0; hits &= hits - 1) {
        const uint32_t j = __ffs(hits) - 1;
        const float x_j = j < 2 ? (j == 0 ? x[0] : x[1]) : (j == 2 ? x[2] : x[3]);
        const uint32_t word =
            j < 2 ? (j == 0 ? words.word[0] : words.word[1]) : (j == 2 ? words.word[2] : words.word[3]);
        const float score = x_j + gumbel(word);
        if (score > best) best = score, best_token = token + j;
      }
      bound = fmaxf(bound, from_ordered(__reduce_max_sync(kAllLanes, ordered(best))));
    }
    const uint64_t own = static_cast<uint64_t>(ordered(best)) << 32 | ~best_token;
    return ~static_cast<uint32_t>(team.reduce(own, Max{}));
  }
};

template <class T, bool kResident>
__global__ void __launch_bounds__(kThreads, 2)
    sample_kernel(const SampleParams p, int units_per_block, bool aligned) {
  __shared__ Shared shared;
  extern __shared__ uint4 kept[];
  launch_next_grid();
  cluster_arrive();
  Team team{shared};
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
  const float own_greatest = slice.take();
  cluster_wait();  // the other blocks have started: their shared memory is there
  const float greatest = team.reduce(own_greatest, Max{});

  uint32_t token = 0;
  if (greedy || isinf(greatest)) {
    uint64_t own = 0;  // ~token of its first
    if (own_greatest == greatest)
      for (int i = threadIdx.x; own == 0 && i < slice.units; i += kThreads) {
        const auto unit = slice[i];
        for (int j = kUnit - 1; j >= 0; --j)
          if (to_float(unit.data[j]) == greatest) own = ~(slice.first + kUnit * i + j);
      }
    const uint64_t found = team.reduce(own, Max{});
    token = greatest == kLowest ? 0 : ~static_cast<uint32_t>(found);
  } else {
    Row<T, kResident> row{slice, team, greatest, inv_temperature};
    row.own_x = row.x_of(own_greatest);
    float cut = min_p > 0 ? fminf(0.0f, logf(min_p)) : kLowest;
    if (top_k > 0 && top_k < vocab) cut = fmaxf(cut, row.kth_greatest(top_k));
    const bool nucleus = top_p < 1;
    const float target = nucleus ? fmaxf(0.0f, top_p) * row.mass(cut) : 0.0f;
    if (nucleus && target <= 1) cut = 0;  // the greatest token holds exp(0)
    for (;;) {
      token = row.pick(cut, p.seeds[b], p.positions[b]);
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
  int index = 0, major = 0, smem = 0;  // bytes that a block may have
  cudaError_t read() {
    cudaError_t status = cudaGetDevice(&index);
    if (status == cudaSuccess)
      status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
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
  if (smem > most)
    return launch_pdl_clusters(sample_kernel<T, false>, cluster, blocks, kThreads, 0, stream, p,
                               units_per_block, aligned);
  if (const cudaError_t status = raise_smem_limit<T>(device, most); status != cudaSuccess) return status;
  return launch_pdl_clusters(sample_kernel<T, true>, cluster, blocks, kThreads, smem, stream, p,
                             units_per_block, aligned);
}

}  // namespace

cudaError_t launch_sample(const SampleParams& p, cudaStream_t stream) {
  return p.dtype == DType::kFloat32 ? launch<float>(p, stream) : launch<__nv_bfloat16>(p, stream);
}

}  // namespace nanovllm::kernels
