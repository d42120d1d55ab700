// Reads ahead of use, into L2 alone: no register or shared memory waits for them.
#pragma once
#include <cstdint>

namespace nanovllm::kernels {

/// The 16-byte words that lie whole in [p, p + bytes), by one instruction of one thread (nothing below
/// sm_90).
__device__ inline void prefetch_bulk(const void* p, int64_t bytes) {
#if __CUDA_ARCH__ >= 900
  const uint64_t first = (reinterpret_cast<uint64_t>(p) + 15) & ~uint64_t{15};
  const uint64_t end = (reinterpret_cast<uint64_t>(p) + bytes) & ~uint64_t{15};
  if (first < end)
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(
                     __cvta_generic_to_global(reinterpret_cast<const void*>(first))),
                 "r"(static_cast<uint32_t>(end - first))
                 : "memory");
#endif
}

}  // namespace nanovllm::kernels
