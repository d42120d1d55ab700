// Blocks of one cluster and each other's shared memory (sm_90 and up; below, a block is alone).
#pragma once
#include <cstdint>

namespace nanovllm::kernels {

__device__ inline int cluster_rank() {
#if __CUDA_ARCH__ >= 900
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
#else
  return 0;
#endif
}
__device__ inline int cluster_size() {
#if __CUDA_ARCH__ >= 900
  uint32_t size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return static_cast<int>(size);
#else
  return 1;
#endif
}

/// Arrive, then wait: all threads of all blocks meet, and see what the others wrote before they arrived.
__device__ inline void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
#endif
}
/// Without the order of writes: for meeting only.
__device__ inline void cluster_arrive_relaxed() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ inline void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

/// Where `p`, in this block's shared memory, is in that of block `rank`.
template <class T>
__device__ T* in_block(T* p, int rank) {
#if __CUDA_ARCH__ >= 900
  uint64_t address;
  asm volatile("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(p), "r"(rank));
  return reinterpret_cast<T*>(address);
#else
  return p;
#endif
}

}  // namespace nanovllm::kernels
