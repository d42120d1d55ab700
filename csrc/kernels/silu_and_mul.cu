// out[t, i] = silu(gate_up[t, i]) * gate_up[t, width + i]; gate_up [num_tokens, 2 * width].
//
// A thread owns two packs of a row of out (four loads in flight): 16 bytes where pointers, strides and width
// allow, else one element. blockIdx.x is the token, blockIdx.y the part of its row. Moves 6 bytes an element
// of out: bound by memory.
//
// Trusted: out does not overlap gate_up (the caller).
#include "common/convert.cuh"
#include "common/launch.cuh"
#include "kernels/silu_and_mul.h"

namespace nanovllm::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kPacks = 2;  // of a thread

/// Fast division and exponential: a few units in the last place of fp32; -inf / inf is NaN, as on CPU.
__device__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

template <class T, int kPack>
__global__ void __launch_bounds__(kThreads) silu_and_mul_kernel(const SiluAndMulParams p) {
  using Packed = Pack<T, kPack>;
  launch_next_grid();
  const int64_t t = blockIdx.x;
  const int64_t packs = p.width / kPack;
  const int64_t first = static_cast<int64_t>(blockIdx.y) * blockDim.x * kPacks + threadIdx.x;
  const T* gate = static_cast<const T*>(p.gate_up) + t * p.gate_up_stride_row;
  T* out = static_cast<T*>(p.out) + t * p.out_stride_row;
  wait_for_previous_grid();
  Packed g[kPacks], u[kPacks];
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int64_t pack = first + i * blockDim.x;
    if (pack >= packs) continue;
    g[i] = Packed::load(gate + pack * kPack);
    u[i] = Packed::load(gate + p.width + pack * kPack);
  }
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int64_t pack = first + i * blockDim.x;
    if (pack >= packs) continue;
    float y[kPack];
#pragma unroll
    for (int j = 0; j < kPack; ++j) y[j] = silu(to_float(g[i].data[j])) * to_float(u[i].data[j]);
    rounded<T>(y).store(out + pack * kPack);
  }
}

}  // namespace

cudaError_t launch_silu_and_mul(const SiluAndMulParams& p, cudaStream_t stream) {
  return dispatch(p.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    constexpr int kPack = 8;
    const bool packed = p.width % kPack == 0 &&
                        is_aligned(p.gate_up, {p.gate_up_stride_row}, sizeof(T), 16) &&
                        is_aligned(p.out, {p.out_stride_row}, sizeof(T), 16);
    const int64_t packs = p.width / (packed ? kPack : 1);
    const int64_t parts = (packs + kThreads * kPacks - 1) / (kThreads * kPacks);
    const int64_t warps = (packs + 32 * kPacks * parts - 1) / (32 * kPacks * parts);
    const dim3 blocks(p.num_tokens, parts);
    const auto kernel = packed ? silu_and_mul_kernel<T, kPack> : silu_and_mul_kernel<T, 1>;
    return launch_pdl(kernel, blocks, 32 * warps, 0, stream, p);
  });
}

}  // namespace nanovllm::kernels
