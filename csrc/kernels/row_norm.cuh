// out[t] = v / sqrt(mean(v^2) + eps) * weight, where v is x[t], or x[token_ids[t]] or the rounded residual[t]
// + x[t], which become the residual: the kernel of rms_norm, embed_rms_norm and add_rms_norm.
//
// A row of up to 1,024 elements belongs to a warp (four rows a block), a longer one to a block; a thread
// holds four packs of it in registers from the one read to the one write, and re-reads what is longer (over
// 16,384 elements in packs of 8, 2,048 in packs of 1). Packs are 16 bytes where pointers, strides and hidden
// allow, else one element. Moves 4 bytes an element, 8 with the residual: bound by memory.
//
// Trusted: out and x are the same rows or do not overlap, residual overlaps neither (the caller).
#pragma once
#include <algorithm>

#include "common/convert.cuh"
#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "kernels/add_rms_norm.h"

namespace nanovllm::kernels {

constexpr int kNormThreads = 512;  // of a row, at most
constexpr int kNormPacks = 4;      // of a thread, in registers
constexpr int kNormRows = 4;       // of a block, where a warp has a row

/// What becomes of the residual.
enum class Residual { kNone, kAdd, kSet };

struct RowNormParams : AddRmsNormParams {
  const int64_t* __restrict__ token_ids = nullptr;  // [num_tokens], rows of x, with Residual::kSet
  int64_t vocab = 0;                                // rows of x
};

template <class T, int kPack, Residual kResidual>
__global__ void __launch_bounds__(kNormThreads) row_norm_kernel(const RowNormParams p) {
  using Packed = Pack<T, kPack>;
  constexpr bool kAdd = kResidual == Residual::kAdd, kSet = kResidual == Residual::kSet;
  launch_next_grid();
  const int64_t t = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int packs = static_cast<int>(p.hidden / kPack);
  const T* weight = static_cast<const T*>(p.weight);
  T* residual = static_cast<T*>(p.residual) + t * p.residual_stride_row;
  T* out = static_cast<T*>(p.out) + t * p.out_stride_row;
  wait_for_previous_grid();
  if (t >= p.num_tokens) return;
  const int64_t id = kSet ? p.token_ids[t] : t;
  const T* x = static_cast<const T*>(p.x) + (!kSet || (id >= 0 && id < p.vocab) ? id : 0) * p.x_stride_row;

  const auto add = [&](const Packed& a, const Packed& b) {
    float sum[kPack];
#pragma unroll
    for (int j = 0; j < kPack; ++j) sum[j] = to_float(a.data[j]) + to_float(b.data[j]);
    return rounded<T>(sum);
  };
  float squares = 0;
  const auto square = [&](const Packed& v) {
#pragma unroll
    for (int j = 0; j < kPack; ++j) squares += to_float(v.data[j]) * to_float(v.data[j]);
  };

  Packed v[kNormPacks], w[kNormPacks], r[kNormPacks];
#pragma unroll
  for (int i = 0; i < kNormPacks; ++i) {  // all loads before the first use
    const int pack = threadIdx.x + i * blockDim.x;
    if (pack >= packs) continue;
    v[i] = Packed::load(x + pack * kPack);
    if constexpr (kAdd) r[i] = Packed::load(residual + pack * kPack);
    w[i] = Packed::load(weight + pack * kPack);
  }
#pragma unroll
  for (int i = 0; i < kNormPacks; ++i) {
    const int pack = threadIdx.x + i * blockDim.x;
    if (pack >= packs) continue;
    if constexpr (kAdd) v[i] = add(v[i], r[i]);
    if constexpr (kAdd || kSet) v[i].store(residual + pack * kPack);
    square(v[i]);
  }
  const int first_left = threadIdx.x + kNormPacks * blockDim.x;
  for (int pack = first_left; pack < packs; pack += blockDim.x) {
    Packed u = Packed::load(x + pack * kPack);
    if constexpr (kAdd) u = add(u, Packed::load(residual + pack * kPack));
    if constexpr (kAdd || kSet) u.store(residual + pack * kPack);
    square(u);
  }

  squares = reduce_lanes(squares, Sum{});
  if (blockDim.x > 32) {
    __shared__ float warps[kNormThreads / 32];
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = squares;
    __syncthreads();
    squares = 0;
    for (int i = 0; i < blockDim.x / 32; ++i) squares += warps[i];
  }
  const float scale = rsqrtf(squares / static_cast<float>(p.hidden) + p.eps);
  const auto write = [&](const Packed& u, const Packed& by, int pack) {
    float y[kPack];
#pragma unroll
    for (int j = 0; j < kPack; ++j) y[j] = to_float(u.data[j]) * scale * to_float(by.data[j]);
    rounded<T>(y).store(out + pack * kPack);
  };
#pragma unroll
  for (int i = 0; i < kNormPacks; ++i) {
    const int pack = threadIdx.x + i * blockDim.x;
    if (pack < packs) write(v[i], w[i], pack);
  }
  for (int pack = first_left; pack < packs; pack += blockDim.x)
    write(Packed::load((kAdd ? residual : x) + pack * kPack), Packed::load(weight + pack * kPack), pack);
}

template <Residual kResidual>
cudaError_t launch_row_norm(const RowNormParams& p, cudaStream_t stream) {
  return dispatch(p.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    constexpr int kPack = 8;
    const bool packed = p.hidden % kPack == 0 && is_aligned(p.x, {p.x_stride_row}, sizeof(T), 16) &&
                        is_aligned(p.out, {p.out_stride_row}, sizeof(T), 16) &&
                        is_aligned(p.residual, {p.residual_stride_row}, sizeof(T), 16) &&
                        is_aligned(p.weight, {}, sizeof(T), 16);
    const int64_t packs = p.hidden / (packed ? kPack : 1);
    const int64_t warps = (packs + 32 * kNormPacks - 1) / (32 * kNormPacks);
    const dim3 threads(std::min<int64_t>(kNormThreads, 32 * warps), warps == 1 ? kNormRows : 1);
    const dim3 blocks((p.num_tokens + threads.y - 1) / threads.y);
    const auto kernel = packed ? row_norm_kernel<T, kPack, kResidual> : row_norm_kernel<T, 1, kResidual>;
    return launch_pdl(kernel, blocks, threads, 0, stream, p);
  });
}

}  // namespace nanovllm::kernels
