// Hopper's asynchronous instructions: mbarrier, tensor copies (TMA), wgmma, setmaxnreg. Built for sm_90a
// only; the names and operand orders are those of the PTX manual.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

namespace nanovllm::kernels {

// ---- mbarrier: `address` in shared memory, 8 bytes ----

__device__ inline void mbarrier_init(uint32_t address, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address), "r"(arrivals) : "memory");
}
/// Makes initialised barriers visible to the copy engine; then __syncthreads.
__device__ inline void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void mbarrier_arrive(uint32_t address) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address) : "memory");
}
/// Arrives, and makes the phase wait for `bytes` of copies too.
__device__ inline void mbarrier_arrive_expect(uint32_t address, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes)
               : "memory");
}
/// Waits until the phase of this parity has completed.
__device__ inline void mbarrier_wait(uint32_t address, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(address),
      "r"(parity)
      : "memory");
}

/// A position in a ring of `kStages` slots, and the parity of its current round.
template <int kStages>
struct RingPosition {
  uint32_t slot = 0, parity = 0;
  __device__ void advance() {
    if (++slot == kStages) slot = 0, parity ^= 1;
  }
};

// ---- copies by tensor map ----

__device__ inline void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
/// The box at (c0, c1) to shared memory; completes its bytes on `barrier`.
__device__ inline void tma_load_2d(uint32_t to, const CUtensorMap* map, uint32_t barrier, int32_t c0,
                                   int32_t c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4}], "
      "[%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1)
      : "memory");
}
/// The box at (c0, c1, c2, c3) to shared memory; completes its bytes on `barrier`.
__device__ inline void tma_load_4d(uint32_t to, const CUtensorMap* map, uint32_t barrier, int32_t c0,
                                   int32_t c1, int32_t c2, int32_t c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, "
      "%5, "
      "%6}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
/// Orders this thread's stores to shared memory before later reads by wgmma and the copy engine.
__device__ inline void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ inline void store_shared(uint32_t to, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

// ---- warps ----

/// Of a warpgroup, before its role's code.
template <int kRegisters>
__device__ void set_max_registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ void set_max_registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
__device__ inline void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- wgmma ----

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
/// Keeps the compiler from moving uses of these registers across this point: wgmma writes them behind its
/// back.
template <class T, int kSize>
__device__ void pin_registers(T (&r)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    if constexpr (std::is_same_v<T, float>)
      asm volatile("" : "+f"(r[i])::"memory");
    else
      asm volatile("" : "+r"(r[i])::"memory");
  }
}

/// A matrix in shared memory as 128-byte rows, swizzled by 128 bytes in groups of 8 rows, 1,024 bytes a
/// group. `leading_bytes`: from one block of 64 columns to the next, where the rows are the summed dimension.
__device__ inline uint64_t wgmma_descriptor(uint32_t address, uint32_t leading_bytes) {
  constexpr uint64_t kGroupBytes = 1024, kSwizzle128 = 1;
  return (uint64_t{(address & 0x3ffff) >> 4}) | (uint64_t{leading_bytes >> 4} << 16) |
         ((kGroupBytes >> 4) << 32) | (kSwizzle128 << 62);
}

#define NV_ACC4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define NV_ACC16(d, i) NV_ACC4(d, i), NV_ACC4(d, i + 4), NV_ACC4(d, i + 8), NV_ACC4(d, i + 12)
#define NV_ACC8(d) NV_ACC4(d, 0), NV_ACC4(d, 4)
#define NV_ACC16_ALL(d) NV_ACC16(d, 0)
#define NV_ACC32(d) NV_ACC16(d, 0), NV_ACC16(d, 16)
#define NV_ACC64(d) NV_ACC16(d, 0), NV_ACC16(d, 16), NV_ACC16(d, 32), NV_ACC16(d, 48)
// clang-format off
#define NV_REGS8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NV_REGS16 NV_REGS8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NV_REGS32 \
  NV_REGS16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NV_REGS64 \
  NV_REGS32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NV_WGMMA_SS(n, type, regs, acc, a, b, p)                                                        \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p ", 0;\n"                                        \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" regs "}, %" #a ", %" #b \
               ", p, 1, 1, 0, 0;\n}" : acc(d) : "l"(a_desc), "l"(b_desc), "r"(accumulate))
#define NV_WGMMA_RS(n, type, regs, acc, a0, a1, a2, a3, b, p)                                           \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p ", 0;\n"                                        \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" regs "}, {%" #a0 ", %" #a1 \
               ", %" #a2 ", %" #a3 "}, %" #b ", p, 1, 1, 1;\n}"                                         \
               : acc(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_desc), "r"(accumulate))
// clang-format on

/// d [64, 2 * kSize] (+)= A [64, 16] . B [2 * kSize, 16]^T, both in shared memory with the summed dimension
/// contiguous. A warpgroup's call; T: __nv_bfloat16 or __half.
template <class T, int kSize>
__device__ void wgmma_ss(float (&d)[kSize], uint64_t a_desc, uint64_t b_desc, int accumulate) {
  static_assert(kSize == 8 || kSize == 16 || kSize == 32 || kSize == 64, "N is 16, 32, 64 or 128");
  constexpr bool kBFloat16 = std::is_same_v<T, __nv_bfloat16>;
  if constexpr (kSize == 8 && kBFloat16)
    NV_WGMMA_SS(16, "bf16", NV_REGS8, NV_ACC8, 8, 9, 10);
  else if constexpr (kSize == 8)
    NV_WGMMA_SS(16, "f16", NV_REGS8, NV_ACC8, 8, 9, 10);
  else if constexpr (kSize == 16 && kBFloat16)
    NV_WGMMA_SS(32, "bf16", NV_REGS16, NV_ACC16_ALL, 16, 17, 18);
  else if constexpr (kSize == 16)
    NV_WGMMA_SS(32, "f16", NV_REGS16, NV_ACC16_ALL, 16, 17, 18);
  else if constexpr (kSize == 32 && kBFloat16)
    NV_WGMMA_SS(64, "bf16", NV_REGS32, NV_ACC32, 32, 33, 34);
  else if constexpr (kSize == 32)
    NV_WGMMA_SS(64, "f16", NV_REGS32, NV_ACC32, 32, 33, 34);
  else if constexpr (kBFloat16)
    NV_WGMMA_SS(128, "bf16", NV_REGS64, NV_ACC64, 64, 65, 66);
  else
    NV_WGMMA_SS(128, "f16", NV_REGS64, NV_ACC64, 64, 65, 66);
}

/// d [64, 2 * kSize] (+)= A [64, 16] . B [16, 2 * kSize], A in registers, B in shared memory with its columns
/// contiguous.
template <class T, int kSize>
__device__ void wgmma_rs(float (&d)[kSize], const uint32_t* a, uint64_t b_desc, int accumulate) {
  static_assert(kSize == 32 || kSize == 64, "N is 64 or 128");
  if constexpr (std::is_same_v<T, __nv_bfloat16> && kSize == 64)
    NV_WGMMA_RS(128, "bf16", NV_REGS64, NV_ACC64, 64, 65, 66, 67, 68, 69);
  else if constexpr (std::is_same_v<T, __nv_bfloat16>)
    NV_WGMMA_RS(64, "bf16", NV_REGS32, NV_ACC32, 32, 33, 34, 35, 36, 37);
  else if constexpr (kSize == 64)
    NV_WGMMA_RS(128, "f16", NV_REGS64, NV_ACC64, 64, 65, 66, 67, 68, 69);
  else
    NV_WGMMA_RS(64, "f16", NV_REGS32, NV_ACC32, 32, 33, 34, 35, 36, 37);
}

#undef NV_WGMMA_SS
#undef NV_WGMMA_RS
#undef NV_REGS8
#undef NV_REGS16
#undef NV_REGS32
#undef NV_REGS64
#undef NV_ACC4
#undef NV_ACC8
#undef NV_ACC16
#undef NV_ACC16_ALL
#undef NV_ACC32
#undef NV_ACC64

}  // namespace nanovllm::kernels
