// How blocks of a grid hand each other vectors: the data is the signal.
//
// A word of a buffer is kAbsent until its owner publishes it, and readers load until none of their words is.
// So a hop costs one store and one load through L2: no fence, no counter, no barrier. Words are published
// whole: a pair of bfloat16 or a float, and neither is ever kAbsent (arithmetic yields the NaNs 0x7fff and
// 0x7fffffff only). Whoever knows that all have read a word makes it kAbsent again.
#pragma once
#include <cstdint>

namespace nanovllm::kernels {

constexpr uint32_t kAbsent = 0xffffffff;

/// Ends the launch with an error when a wait takes seconds, which only a bug can cause: no hang.
template <int kPolls = 1 << 22>
struct Patience {
  int polls = 0;
  __device__ void tick() {
    if (++polls == kPolls) __trap();
  }
};

__device__ inline void publish(uint32_t* to, uint32_t x) {
  asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}
__device__ inline void publish(uint32_t* to, float x, float y) {
  asm volatile("st.relaxed.gpu.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(__float_as_uint(x)),
               "r"(__float_as_uint(y))
               : "memory");
}
__device__ inline void publish(uint32_t* to, const uint4& v) {
  asm volatile("st.relaxed.gpu.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}
/// Past L1, which is not coherent.
__device__ inline void peek(uint32_t (&x)[4], const uint32_t* from) {
  asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "l"(from)
               : "memory");
}
__device__ inline void peek(uint32_t (&x)[2], const uint32_t* from) {
  asm volatile("ld.relaxed.gpu.global.v2.b32 {%0, %1}, [%2];"
               : "=r"(x[0]), "=r"(x[1])
               : "l"(from)
               : "memory");
}
__device__ inline void peek(uint32_t (&x)[1], const uint32_t* from) {
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(x[0]) : "l"(from) : "memory");
}

template <int kWords>
__device__ bool is_absent(const uint32_t (&x)[kWords]) {
  bool absent = false;
#pragma unroll
  for (int i = 0; i < kWords; ++i) absent |= x[i] == kAbsent;
  return absent;
}

/// All vectors in flight at once, again those that were not there yet, until the warp has all of its lanes'.
/// A null address: zeros.
template <int kCount, int kWords>
__device__ void receive(uint32_t (&x)[kCount][kWords], const uint32_t* const (&from)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i)
#pragma unroll
    for (int j = 0; j < kWords; ++j) x[i][j] = from[i] == nullptr ? 0 : kAbsent;
  Patience<> patience;
#pragma unroll 1
  while (true) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (is_absent(x[i])) peek(x[i], from[i]);
    bool absent = false;
#pragma unroll
    for (int i = 0; i < kCount; ++i) absent |= is_absent(x[i]);
    if (!__any_sync(~0u, absent)) return;
    patience.tick();
  }
}

}  // namespace nanovllm::kernels
