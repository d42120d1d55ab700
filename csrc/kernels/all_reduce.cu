// All-reduce over peer memory, with the residual addition and RMS norm that follow it. No barrier and no
// flag: a rank pushes its rows into the exchange buffers of its peers, and each polls the data itself until
// no word of it is the sentinel, a pair of -0.0 (a -0.0 in the data travels as +0.0, which no sum can tell
// apart).
//
// One shot: every rank gets all rows of all ranks and adds them up in the order of ranks, so all have the
// same bits. It moves (ranks - 1) times the message out of each GPU: best for few bytes, and for two ranks
// always. Two shots: a row has an owner, which alone gets the parts, adds up and pushes the rounded sum to
// all: twice the latency, 2 (ranks - 1) / ranks times the message.
//
// The exchange buffer of each rank has three epochs, taken in turn, of
//   [num_ranks][slot_bytes]                  one shot: the rows of each source
//   [num_ranks][shared_bytes / num_ranks]    two shots: the parts of the rows that this rank owns, by source
//   [shared_bytes]                           two shots: the sums
// all sentinels at first. A call of epoch e also clears what the call before it used. A peer writes there at
// e + 2, after it saw this rank's data of e + 1, which was pushed by a later kernel of this stream than the
// one that cleared: two epochs would not do. The epoch is in device memory, so graphs and eager calls may
// follow each other freely.
//
// A block owns a row at a time, a thread 16 bytes of it, which stay in registers; blocks take their rows in
// the same order on every rank, and there are no more blocks than fit on the GPU together, so that waiting
// ones cannot keep others from running. Who waits long also looks at an abort word in host memory. Once it is
// set, this call and all later ones go on with garbage.
//
// Sources: Lamport-style exchange as in TensorRT-LLM's and SGLang's custom all-reduce.
// Trusted (csrc/ops/all_reduce.cpp): rows contiguous and 16-byte aligned, hidden a multiple of 8, at most
// 8,192; the message fits. Not checked: all ranks make the same calls.
#include <algorithm>

#include "common/convert.cuh"
#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "kernels/all_reduce.h"

namespace nanovllm::kernels {

constexpr int kElements = 8;                // of a thread: 16 bytes
constexpr uint32_t kSentinel = 0x80008000;  // two times -0.0, in bf16 and fp16
constexpr int kEpochs = 3;
// Some 10 ms. Looks at host memory queue up, half a microsecond each: 1 ms for the warps of a large message.
// Were they as frequent as that, a rank that once came late would be waited for with looks, which make the
// others late in the next call, and so on for ever.
constexpr uint32_t kSpinsPerAbortCheck = 1 << 15;
constexpr int kMaxThreads = 1024;
constexpr int64_t kMaxRowBytes = kMaxThreads * 16;

/// Volatile: to memory, at once and every time. Each 32-bit word arrives as a whole.
__device__ inline void push(char* to, const uint4& v) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}
__device__ inline uint4 peek(const char* from) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

/// Every 16-bit half that is -0.0 becomes +0.0.
__device__ inline uint32_t without_sentinel(uint32_t word) { return word & ~(__vcmpeq2(word, kSentinel)); }
__device__ inline uint4 without_sentinel(const uint4& v) {
  return {without_sentinel(v.x), without_sentinel(v.y), without_sentinel(v.z), without_sentinel(v.w)};
}
__device__ inline bool has_arrived(const uint4& v) {
  return v.x != kSentinel && v.y != kSentinel && v.z != kSentinel && v.w != kSentinel;
}

/// This rank's view of the exchange buffers in the current epoch.
template <int kRanks>
struct Exchange {
  const AllReduceParams& p;
  char* const* peers;       // [kRanks], in shared memory
  volatile int32_t* abort;  // [2]: not 0 once the host wants no more of it; 1 + the rank that was waited for
  int64_t offset = 0, before = 0;  // bytes: the epoch's place in the buffers, and that of the one to clear
  bool is_over = false;            // nothing is waited for any more

  __device__ void enter(int epoch) {
    const int64_t epoch_bytes = kRanks * p.slot_bytes + 2 * p.shared_bytes;
    offset = epoch * epoch_bytes;
    before = (epoch + kEpochs - 1) % kEpochs * epoch_bytes;
  }
  __device__ int64_t slot(int source) const { return offset + source * p.slot_bytes; }
  __device__ int64_t part(int source) const {
    return offset + kRanks * p.slot_bytes + source * (p.shared_bytes / kRanks);
  }
  __device__ int64_t sums() const { return offset + kRanks * p.slot_bytes + p.shared_bytes; }

  /// To all other ranks, the next one first: links are used evenly.
  __device__ void push_to_others(int64_t at, const uint4& v) const {
#pragma unroll
    for (int i = 1; i < kRanks; ++i) {
      const int to = p.rank + i;
      push(peers[to < kRanks ? to : to - kRanks] + at, v);
    }
  }

  /// Between two looks at missing data: true when the host wants no more of it.
  __device__ bool gives_up(uint32_t spin, int source) {
    if (is_over) return true;
    if (spin % kSpinsPerAbortCheck != 0 || *abort == 0) return false;
    abort[1] = source + 1;
    p.state[4] = is_over = true;
    return true;
  }

  /// Waits for 16 bytes of every other rank, at `at(source)` of this rank's buffer; got[rank] is left alone.
  template <class At>
  __device__ void wait_for_all(uint4 (&got)[kRanks], At const& at) {
    const char* base = peers[p.rank];
    for (uint32_t spin = 1;; ++spin) {
      int missing = -1;
#pragma unroll
      for (int s = 0; s < kRanks; ++s)
        if (s != p.rank) got[s] = peek(base + at(s));
#pragma unroll
      for (int s = 0; s < kRanks; ++s)
        if (s != p.rank && !has_arrived(got[s])) missing = s;
      if (missing < 0 || gives_up(spin, missing)) return;
    }
  }
  __device__ uint4 wait_for(int64_t at, int source) {
    const char* from = peers[p.rank] + at;
    for (uint32_t spin = 1;; ++spin) {
      const uint4 v = peek(from);
      if (has_arrived(v) || gives_up(spin, source)) return v;
    }
  }

  /// Sentinels over what the call before used, by all threads of the grid; its bytes by one shot and by two.
  __device__ void clear(int64_t slot_bytes, int64_t shared_bytes) const {
    char* base = peers[p.rank] + before;
    const int64_t first = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 16;
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x * 16;
    const auto fill = [&](int64_t at, int64_t bytes) {
      for (int64_t i = first; i < bytes; i += step)
        *reinterpret_cast<uint4*>(base + at + i) = {kSentinel, kSentinel, kSentinel, kSentinel};
    };
    const int64_t parts = kRanks * p.slot_bytes, part_bytes = p.shared_bytes / kRanks;
    const int64_t owned =
        shared_bytes == 0 ? 0 : min(shared_bytes / kRanks + kMaxRowBytes, part_bytes);  // or more
    for (int s = 0; s < kRanks; ++s) {
      if (s == p.rank) continue;
      fill(s * p.slot_bytes, slot_bytes);
      fill(parts + s * part_bytes, owned);
    }
    fill(parts + p.shared_bytes, shared_bytes);
  }
};

/// The sum over the ranks, in their order.
template <class T, int kRanks>
__device__ void add_up(float (&sum)[kElements], const Pack<T, kElements>& mine, const uint4 (&got)[kRanks],
                       int rank) {
#pragma unroll
  for (int s = 0; s < kRanks; ++s) {
    Pack<T, kElements> v{got[s]};
    if (s == rank) v = mine;
#pragma unroll
    for (int j = 0; j < kElements; ++j) sum[j] = s == 0 ? to_float(v.data[j]) : sum[j] + to_float(v.data[j]);
  }
}

/// What happens to a row's sum: stored, or added to the residual and normed. All threads of the block come
/// here.
template <class T>
struct Finish {
  const AllReduceParams& p;
  Pack<T, kElements> weight;
  int turn = 0;  // of the shared memory: rows may follow each other without a second barrier

  __device__ void operator()(int64_t row, bool is_active, float (&sum)[kElements]) {
    using Packed = Pack<T, kElements>;
    __shared__ float warps[2][kMaxThreads / 32];
    const int64_t at = row * p.hidden + threadIdx.x * kElements;
    T* out = static_cast<T*>(p.out) + at;
    if (p.residual == nullptr) {
      if (is_active) rounded<T>(sum).store(out);
      return;
    }
    Packed r;
    float squares = 0;
    if (is_active) {
      T* residual = static_cast<T*>(p.residual) + at;
      r = Packed::load(residual);
#pragma unroll
      for (int j = 0; j < kElements; ++j) sum[j] += to_float(r.data[j]);
      r = rounded<T>(sum);
      r.store(residual);
#pragma unroll
      for (int j = 0; j < kElements; ++j) squares += to_float(r.data[j]) * to_float(r.data[j]);
    }
    squares = reduce_lanes(squares, Sum{});
    if (threadIdx.x % 32 == 0) warps[turn][threadIdx.x / 32] = squares;
    __syncthreads();
    squares = 0;
    for (int i = 0; i < blockDim.x / 32; ++i) squares += warps[turn][i];
    turn ^= 1;
    if (!is_active) return;
    const float scale = rsqrtf(squares / static_cast<float>(p.hidden) + p.eps);
    float y[kElements];
#pragma unroll
    for (int j = 0; j < kElements; ++j) y[j] = to_float(r.data[j]) * scale * to_float(weight.data[j]);
    rounded<T>(y).store(out);
  }
};

template <class T, int kRanks, bool kTwoShot>
__global__ void __launch_bounds__(kMaxThreads) all_reduce_kernel(const __grid_constant__ AllReduceParams p) {
  using Packed = Pack<T, kElements>;
  launch_next_grid();
  __shared__ char* peers[kRanks + 1];
  if (threadIdx.x <= kRanks)
    peers[threadIdx.x] = reinterpret_cast<char*>(p.peers[threadIdx.x]);  // never change
  const bool is_active = threadIdx.x * kElements < p.hidden;
  const T* x = static_cast<const T*>(p.x) + threadIdx.x * kElements;
  const int64_t row_bytes = p.hidden * sizeof(T), column_bytes = threadIdx.x * 16;
  Finish<T> finish{p, {}};
  if (p.weight != nullptr && is_active)
    finish.weight = Packed::load(static_cast<const T*>(p.weight) + threadIdx.x * kElements);
  __syncthreads();
  Exchange<kRanks> exchange{p, peers, reinterpret_cast<volatile int32_t*>(peers[kRanks])};
  wait_for_previous_grid();

  const int4 state = *reinterpret_cast<const int4*>(p.state);
  exchange.enter(state.x);
  exchange.is_over = p.state[4] != 0;
  if constexpr (!kTwoShot) {
    for (int64_t row = blockIdx.x; row < p.num_rows && is_active; row += gridDim.x)
      exchange.push_to_others(exchange.slot(p.rank) + row * row_bytes + column_bytes,
                              without_sentinel(Packed::load(x + row * p.hidden).raw));
    exchange.clear(state.z, state.w);
    for (int64_t row = blockIdx.x; row < p.num_rows; row += gridDim.x) {
      float sum[kElements];
      if (is_active) {
        const Packed mine = Packed::load(x + row * p.hidden);
        uint4 got[kRanks];
        exchange.wait_for_all(got, [&](int s) { return exchange.slot(s) + row * row_bytes + column_bytes; });
        add_up(sum, mine, got, p.rank);
      }
      finish(row, is_active, sum);
    }
  } else {
    const auto owner = [&](int64_t row) { return static_cast<int>(row % kRanks); };
    const auto place = [&](int64_t row) { return row / kRanks * row_bytes + column_bytes; };
    for (int64_t row = blockIdx.x; row < p.num_rows && is_active; row += gridDim.x)
      if (owner(row) != p.rank)
        push(peers[owner(row)] + exchange.part(p.rank) + place(row),
             without_sentinel(Packed::load(x + row * p.hidden).raw));
    exchange.clear(state.z, state.w);
    for (int64_t row = blockIdx.x; row < p.num_rows; row += gridDim.x) {
      if (owner(row) != p.rank) continue;
      float sum[kElements];
      if (is_active) {
        const Packed mine = Packed::load(x + row * p.hidden);
        uint4 got[kRanks];
        exchange.wait_for_all(got, [&](int s) { return exchange.part(s) + place(row); });
        add_up(sum, mine, got, p.rank);
        const Packed total{without_sentinel(rounded<T>(sum).raw)};  // all go on from the same bits
        exchange.push_to_others(exchange.sums() + row * row_bytes + column_bytes, total.raw);
#pragma unroll
        for (int j = 0; j < kElements; ++j) sum[j] = to_float(total.data[j]);
      }
      finish(row, is_active, sum);
    }
    for (int64_t row = blockIdx.x; row < p.num_rows; row += gridDim.x) {
      if (owner(row) == p.rank) continue;
      float sum[kElements];
      if (is_active) {
        const Packed total{exchange.wait_for(exchange.sums() + row * row_bytes + column_bytes, owner(row))};
#pragma unroll
        for (int j = 0; j < kElements; ++j) sum[j] = to_float(total.data[j]);
      }
      finish(row, is_active, sum);
    }
  }

  __syncthreads();  // all threads of the block have read the state
  if (threadIdx.x == 0 && atomicAdd(p.state + 1, 1) == gridDim.x - 1) {
    const int bytes = static_cast<int>(p.num_rows * row_bytes);
    *reinterpret_cast<int4*>(p.state) = {(state.x + 1) % kEpochs, 0, kTwoShot ? 0 : bytes,
                                         kTwoShot ? bytes : 0};
  }
}

cudaError_t launch_all_reduce(const AllReduceParams& p, cudaStream_t stream) {
  int device = 0, num_sms = 0;
  if (const cudaError_t e = cudaGetDevice(&device)) return e;
  if (const cudaError_t e = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device))
    return e;
  const int64_t packs = p.hidden / kElements;
  const dim3 threads(static_cast<unsigned>((packs + 31) / 32 * 32));
  const dim3 blocks(static_cast<unsigned>(std::min<int64_t>(p.num_rows, num_sms)));
  return dispatch(p.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const auto launch = [&](auto ranks) {
      constexpr int kRanks = decltype(ranks)::value;
      const auto kernel =
          p.two_shot ? all_reduce_kernel<T, kRanks, true> : all_reduce_kernel<T, kRanks, false>;
      return launch_pdl(kernel, blocks, threads, 0, stream, p);
    };
    switch (p.num_ranks) {
      case 1:
        return launch(std::integral_constant<int, 1>{});
      case 2:
        return launch(std::integral_constant<int, 2>{});
      case 3:
        return launch(std::integral_constant<int, 3>{});
      case 4:
        return launch(std::integral_constant<int, 4>{});
      case 6:
        return launch(std::integral_constant<int, 6>{});
      case 8:
        return launch(std::integral_constant<int, 8>{});
      default:
        return cudaErrorInvalidValue;  // csrc/ops/all_reduce.cpp says which there are
    }
  });
}

}  // namespace nanovllm::kernels
