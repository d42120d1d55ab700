// plan: the split of a decode step's work, laid out in decode_split.cuh.
//
// One block. Thread t owns sequences t, t + kThreads, ...: first their tiles are summed, which fixes every
// block's share, then a prefix sum over kThreads sequences at a time finds the sequence in which each share
// begins. Reads 4 bytes a sequence twice, writes 16 a block of the decode grid: bound by launch and latency.
//
// Does not call launch_next_grid(): what runs after it starts when it has ended, and all before it, however
// early the kernels in between let the next one start. paged_attention_decode's past_complete builds on that.
//
// Trusted: context_lens are not negative; their tiles, times num_kv_heads, fit int32 (the caller).
#include "common/launch.cuh"
#include "kernels/decode_plan.h"
#include "kernels/decode_split.cuh"

namespace nanovllm::kernels {
namespace {

constexpr int kThreads = 1024, kWarp = 32, kWarps = kThreads / kWarp;

/// x summed over the lanes up to this one.
__device__ int prefix_sum(int x) {
#pragma unroll
  for (int i = 1; i < kWarp; i *= 2) {
    const int y = __shfl_up_sync(~0u, x, i);
    if (threadIdx.x % kWarp >= i) x += y;
  }
  return x;
}

/// x summed over the threads up to this one; shared [kWarps]. Ends with a barrier owed before its next use.
__device__ int block_prefix_sum(int x, int* shared) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  x = prefix_sum(x);
  if (lane == kWarp - 1) shared[warp] = x;
  __syncthreads();
  if (warp == 0) shared[lane] = prefix_sum(shared[lane]);
  __syncthreads();
  return warp == 0 ? x : x + shared[warp - 1];
}

__global__ void __launch_bounds__(kThreads) decode_plan_kernel(const DecodePlanParams p, int num_blocks) {
  __shared__ int warp_sums[kWarps];
  __shared__ int ends[kThreads];  // tiles up to and with each sequence of a round
  wait_for_previous_grid();
  const int num_kv_heads = static_cast<int>(p.num_kv_heads), batch = static_cast<int>(p.batch);
  const auto length = [&](int b) { return b < batch ? p.context_lens[b] : 0; };
  const auto tiles = [&](int len) { return (len + kTileTokens - 1) / kTileTokens * num_kv_heads; };

  const int first_len = length(threadIdx.x);
  int sum = tiles(first_len);
  for (int b = threadIdx.x + kThreads; b < batch; b += kThreads) sum += tiles(length(b));
  block_prefix_sum(sum, warp_sums);
  const int total = warp_sums[kWarps - 1];
  const DecodeSplit split{total, total / num_blocks, total % num_blocks, 0};
  int4* plan = reinterpret_cast<int4*>(p.plan);
  if (threadIdx.x == 0) plan[0] = {split.num_tiles, split.quota, split.extra, 0};

  int base = 0;  // tiles of the earlier rounds
  for (int first = 0; first < batch; first += kThreads) {
    const int len = first == 0 ? first_len : length(first + threadIdx.x);
    __syncthreads();
    ends[threadIdx.x] = base + block_prefix_sum(tiles(len), warp_sums);
    __syncthreads();
    const int round_end = ends[kThreads - 1];
    for (int c = threadIdx.x; c < num_blocks; c += kThreads) {
      const int begin = split.begin(c);
      if (begin < base || begin >= round_end) continue;
      int low = 0, high = kThreads - 1;  // the first end past `begin`
      while (low < high) {
        const int middle = (low + high) / 2;
        if (ends[middle] > begin)
          high = middle;
        else
          low = middle + 1;
      }
      const int b = first + low, context_len = p.context_lens[b];
      const int per_head = tiles(context_len) / num_kv_heads;
      const int offset = begin - (low == 0 ? base : ends[low - 1]);
      plan[1 + c] = {b, offset / per_head, offset % per_head, context_len};
    }
    base = round_end;
  }
  __threadfence();  // a kernel that starts now may read the plan before its wait
}

}  // namespace

int64_t decode_plan_numel(int device) {
  int blocks = 0;
  return decode_grid(device, &blocks) == cudaSuccess ? 4 * (1 + blocks) : 0;
}

cudaError_t launch_decode_plan(const DecodePlanParams& p, cudaStream_t stream) {
  int device = 0, blocks = 0;
  if (const cudaError_t status = cudaGetDevice(&device); status != cudaSuccess) return status;
  if (const cudaError_t status = decode_grid(device, &blocks); status != cudaSuccess) return status;
  return launch_pdl(decode_plan_kernel, 1, kThreads, 0, stream, p, blocks);
}

}  // namespace nanovllm::kernels
