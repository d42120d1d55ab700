// What the two prefill kernels share: the online softmax over accumulators of m16n8 shape (those of mma.sync
// and of wgmma alike), and their launchers.
//
// A warp holds 16 rows of scores s[]; element 4 * j + 2 * i + e of a lane is row lane / 4 + 8 * i, column 8 *
// j + 2 * (lane % 4) + e.
#pragma once
#include <cmath>

#include "common/mma.cuh"
#include "kernels/paged_attention_prefill.h"

namespace nanovllm::kernels {

/// mma.sync, sm_80 and up: every shape.
cudaError_t launch_paged_attention_prefill_mma(const PagedAttentionPrefillParams& p, cudaStream_t stream);
/// wgmma and tensor copies, sm_90a. cudaErrorNotSupported, with nothing launched: not this shape, these
/// strides, this device or this build.
cudaError_t launch_paged_attention_prefill_sm90(const PagedAttentionPrefillParams& p, cudaStream_t stream);

#ifdef __CUDACC__

constexpr float kLowest = -INFINITY;
constexpr float kLog2E = 1.4426950408889634f;

/// Of a lane's two rows; `sum` is over the lane's own columns until `finish`.
struct OnlineSoftmax {
  float max[2] = {kLowest, kLowest};  // of the unscaled scores
  float sum[2] = {0, 0};

  /// Scores become 2^(scale * (s - max)); `shrink` is what earlier sums and outputs must be multiplied by.
  template <bool kMasked, int kSize>
  __device__ void add(float (&s)[kSize], float (&shrink)[2], float scale_log2) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float top = s[2 * i];
#pragma unroll
      for (int j = 0; j < kSize; j += 4) top = fmaxf(top, fmaxf(s[j + 2 * i], s[j + 2 * i + 1]));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      top = fmaxf(top, max[i]);
      // A row that has seen no key yet keeps -inf; any finite base turns its scores into 0.
      const float base = kMasked && top == kLowest ? 0.0f : top * scale_log2;
      shrink[i] = exp2_approx(max[i] * scale_log2 - base);
      max[i] = top;
      float total = 0;
#pragma unroll
      for (int j = 0; j < kSize; j += 4)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[j + 2 * i + e];
          x = exp2_approx(x * scale_log2 - base);
          total += x;
        }
      sum[i] = sum[i] * shrink[i] + total;
    }
  }

  /// 1 / sum over all columns.
  __device__ float inverse_sum(int i) const {
    float total = sum[i];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    return 1.0f / total;
  }
};

/// -inf where the key comes after the query. first_key: of this lane's element 0; position: of its row 0.
template <int kSize>
__device__ void mask_scores(float (&s)[kSize], int first_key, int position) {
  const int visible = position - first_key;
#pragma unroll
  for (int j = 0; j < kSize; j += 4)
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (2 * j + e > visible + 8 * i) s[j + 2 * i + e] = kLowest;
}

template <int kSize>
__device__ void scale_rows(float (&o)[kSize], const float (&factor)[2]) {
#pragma unroll
  for (int j = 0; j < kSize; j += 4)
#pragma unroll
    for (int i = 0; i < 2; ++i) o[j + 2 * i] *= factor[i], o[j + 2 * i + 1] *= factor[i];
}

/// Probabilities rounded to T, as the A operand: 4 registers for each 16 keys.
template <class T, int kSize>
__device__ void round_probs(uint32_t (&p)[kSize / 2], const float (&s)[kSize]) {
#pragma unroll
  for (int j = 0; j < kSize; j += 2) p[j / 2] = pack_pair<T>(s[j], s[j + 1]);
}

/// Two neighbouring elements of out, whose rows may start anywhere.
template <class T>
__device__ void store_pair(T* out, uint32_t pair) {
  if (reinterpret_cast<uintptr_t>(out) % 4 == 0) {
    *reinterpret_cast<uint32_t*>(out) = pair;
  } else {
    reinterpret_cast<uint16_t*>(out)[0] = static_cast<uint16_t>(pair);
    reinterpret_cast<uint16_t*>(out)[1] = static_cast<uint16_t>(pair >> 16);
  }
}

#endif

}  // namespace nanovllm::kernels
