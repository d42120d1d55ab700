// token_ids[b] = the winner of a race of the tokens that min-p, top-k and top-p leave (csrc/common/philox.h,
// nanovllm/ops/sample.py); x = (logit - greatest logit) / temperature.
//
// A cluster of 8 blocks owns a row (below sm_90: one block). The row streams once through rings of
// asynchronous copies, a ring a warp, four blocks a multiprocessor: while one block starts, ends or makes a
// later pass, the others keep the memory busy. A step of a thread is 8 tokens, a group.
//
//   greedy    the greatest logit, the lowest token on ties
//   stream    unless there is a top-k, race 0 (sample_row.cuh); with a filter, the mass, the greatest logit
//             and an index of the greatest logit of each step, by which later passes read again (from L2)
//             only the steps that matter
//   top-k     the k-th of the greatest logits of 256 groups of threads bounds the k-th greatest from below:
//             few tokens reach it. Where at most 256 do, they go to the first block, one a thread, and all
//             filters and races work on them. Else the k-th greatest is found by three digits of the
//             float's bits, a histogram of counts for each
//   min-p     a winner with x < cut is dropped
//   top-p     so is one whose betters hold top_p of the mass. Half the mass goes with it, on average
//
// All sums run in one order and all else is exact, so a row gives the same token at every call, in any batch.
// Moves vocab * 4 (or 2) bytes a row: bound by memory.
#include "common/launch.cuh"
#include "common/prefetch.cuh"
#include "kernels/sample.h"
#include "kernels/sample_row.cuh"

namespace nanovllm::kernels {
namespace {

constexpr int kBlocksPerSm = 4;

template <class T>
struct Shared {
  union {
    typename Slice<T>::Ring ring;   // until the row is read
    uint32_t histograms[2][kBins];  // after it
  };
  typename Slice<T>::Index index;
  TeamShared team;
  RowShared row;
};
static_assert(sizeof(Shared<float>) <= 48 << 10, "static shared memory");

/// The token with the greatest logit, the lowest on ties; 0 if there is none but NaN and -inf. Both begin
/// after slice.start().
template <class T>
__device__ uint32_t greedy(const Slice<T>& slice, Team& team) {
  float greatest = kLowest;
  uint32_t token = 0;
  slice.stream([&](int step, const float (&logit)[kStepTokens]) {
    const float top = greatest_of(logit);
    if (!(top > greatest)) return;
    greatest = top;
#pragma unroll
    for (int j = kStepTokens - 1; j >= 0; --j)
      if (logit[j] == top) token = slice.token_of(step, j);
  });
  return token_of(team.reduce(ranked(greatest + 0.0f, token), Max{}));  // -0 + 0 = 0
}

/// The token of a row that is not greedy, for thread 0 of the first block.
template <class T>
__device__ uint32_t drawn(Row<T>& row, const SampleParams& p, int64_t b) {
  const int vocab = static_cast<int>(p.vocab), top_k = p.top_k[b];
  const float top_p = p.top_p[b], min_p = p.min_p[b];
  const bool limited = top_k > 0 && top_k < vocab, few = limited && top_k <= kCandidates, nucleus = top_p < 1;
  const bool plain = !limited && !nucleus && !(min_p > 0);
  float cut = min_p > 0 ? fminf(0.0f, logf(min_p)) : kLowest, racing = kLowest;  // x >= them
  Streamed streamed{};
  if (!limited) streamed = row.stream_race(!plain);
  if (plain && streamed.valid)
    return row.team.rank == 0 && threadIdx.x < 32 ? row.winner(streamed.winner, kLowest, 0).token : 0;
  if (plain) row.slice.start();
  if (plain || limited) row.stream(few);
  if (row.greatest == kLowest) return 0;
  if (isinf(row.greatest)) {
    row.slice.start();
    return greedy(row.slice, row.team);
  }
  if (few) {
    const float least = row.bound_of_few(top_k);
    const uint32_t count = least > kLowest ? row.gather(least) : UINT32_MAX;
    if (count <= kCandidates) return row.team.rank == 0 ? row.pick_candidate(count, top_k, cut, top_p) : 0;
  }
  if (limited) racing = cut = fmaxf(cut, row.kth_greatest(top_k, row.bound_of_kth(top_k)));
  float target = 0;
  if (nucleus)
    target = fmaxf(0.0f, top_p) * (cut == kLowest && streamed.valid ? streamed.mass : row.mass(cut));
  for (uint32_t d = 0;; ++d) {
    const uint32_t group = d == 0 && streamed.valid ? streamed.winner : row.race(racing, d);
    const Candidate winner = row.winner(group, racing, d);
    const float above = nextafterf(winner.x, 1.0f);
    if (winner.x >= cut && (!nucleus || winner.x >= 0 || row.mass(above) < target)) return winner.token;
    racing = fmaxf(cut, above);
  }
}

template <class T>
__global__ void __launch_bounds__(kSampleThreads, kBlocksPerSm)
    sample_kernel(const SampleParams p, int tokens_per_block, bool aligned, bool prefetch) {
  __shared__ Shared<T> storage;
  Shared<T>& shared = *by_register(&storage);
  launch_next_grid();
  cluster_arrive_relaxed();
  Team team{shared.team, shared.histograms, cluster_rank(), cluster_size()};
  if (threadIdx.x == 0) {
    shared.row.count = 0;
    shared.row.reached = Race::kNone;
  }
  const int64_t b = blockIdx.x / team.size;
  const Slice<T> slice(static_cast<const T*>(p.logits) + b * p.logits_stride_row, p.vocab, team.rank,
                       tokens_per_block, aligned, shared.ring, shared.index);
  wait_for_previous_grid();
  slice.start();
  const int64_t position = p.positions[b];
  const float temperature = p.temperature[b], inv_temperature = 1.0f / temperature;
  if (prefetch && threadIdx.x == 0) prefetch_bulk(slice.logits, slice.tokens * int64_t{sizeof(T)});
  cluster_wait();  // the other blocks have started: their shared memory is there
  __syncthreads();
  if (position < 0) {
    cp_async_wait<0>();
    return;
  }
  uint32_t token;
  if (!(temperature > 0) || isinf(inv_temperature)) {
    token = greedy(slice, team);
  } else {
    Row<T> row{slice, team, shared.row, Random(p.seeds[b], position), inv_temperature};
    token = drawn(row, p, b);
  }
  if (team.rank != 0 || threadIdx.x != 0) return;
  p.token_ids[b] = token;
  if (p.copies != nullptr && *p.copy >= 0 && *p.copy < p.num_copies)
    p.copies[*p.copy * p.copies_stride_row + b] = token;
}

template <class T>
cudaError_t launch(const SampleParams& p, cudaStream_t stream) {
  int device, major, num_sms;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess)
    status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (status == cudaSuccess)
    status = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess) return status;
  const int cluster = major >= 9 ? kMaxTeam : 1;
  constexpr int kBlockTokens =
      kGroupTokens * kBlockWords;  // of Philox: its words stay in one block of threads
  const int64_t philox_blocks = (p.vocab + kBlockTokens - 1) / kBlockTokens;
  const int tokens_per_block = static_cast<int>((philox_blocks + cluster - 1) / cluster) * kBlockTokens;
  const bool aligned = is_aligned(p.logits, {p.logits_stride_row}, sizeof(T), 16);
  const bool prefetch = p.batch * cluster <= num_sms;  // few blocks, whose copies alone leave the memory idle
  return launch_pdl_clusters(sample_kernel<T>, cluster, dim3(p.batch * cluster), kSampleThreads, 0, stream, p,
                             tokens_per_block, aligned, prefetch);
}

}  // namespace

cudaError_t launch_sample(const SampleParams& p, cudaStream_t stream) {
  return p.dtype == DType::kFloat32 ? launch<float>(p, stream) : launch<__nv_bfloat16>(p, stream);
}

}  // namespace nanovllm::kernels
