// out[i, h] = softmax(scale * q[i, h] . K^T) @ V, causal from the end of each context, on mma.sync (sm_80 and
// up).
//
// A block of 4 warps owns kRows query tokens of one sequence and one query head; a warp owns 16 or 32 of
// them, and walks the keys from the diagonal down in tiles of 64, with the online softmax in registers. The
// loads of V run under Q . K^T, those of the next K under the softmax and P . V (cp.async, 16 bytes). Shared
// rows are padded by 16 bytes, so that ldmatrix meets every bank once. 4 * head_dim operations a (query, key)
// pair: bound by the tensor cores. After Dao, FlashAttention-2.
//
// Trusted: block ids of the contexts' own blocks are in the cache, lengths fit each other (the caller;
// checking would wait for the device); rows are 16-byte aligned, block_size a power of two
// (ops/attention_checks.h).
#include <cuda_fp8.h>

#include <algorithm>

#include "kernels/paged_attention_prefill.cuh"

namespace nanovllm::kernels {
namespace {

using Params = PagedAttentionPrefillParams;

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kKeys = 64;  // of a tile

template <int kHeadDim>
struct Tile {
  static constexpr int kParts = kHeadDim <= 128 ? 2 : 1;  // 16-row parts of a warp
  static constexpr int kRows = 16 * kParts * kWarps;
  static constexpr int kPitch = kHeadDim + 8;  // elements of a shared row
  static constexpr int kBytes = (kRows + 2 * kKeys) * kPitch * 2;
};

/// Query tokens of one block.
struct Work {
  int64_t seq, first_row;  // row of q and out
  int rows, position;      // the context position of first_row
  int64_t first_key_row;   // packed: the row of k and v that holds the sequence's token 0
};

/// Tile `index` of all sequences' tiles, a sequence's last first; false past the end. Every warp computes it.
template <int kRows>
__device__ bool find_work(Work& w, const Params& p, int64_t index) {
  const int lane = threadIdx.x % 32;
  for (int64_t base = 0; base < p.batch; base += 32) {
    const int64_t seq = base + lane;
    const int begin = seq < p.batch ? p.cu_seqlens_q[seq] : 0;
    const int len = seq < p.batch ? p.cu_seqlens_q[seq + 1] - begin : 0;
    const int tiles = (len + kRows - 1) / kRows;
    int upto = tiles;  // tiles of this and earlier lanes
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(~0u, upto, step);
      if (lane >= step) upto += before;
    }
    const int total = __shfl_sync(~0u, upto, 31);
    if (index < total) {
      const int owner = __ffs(__ballot_sync(~0u, index < upto)) - 1;
      const int first = __shfl_sync(~0u, begin, owner), length = __shfl_sync(~0u, len, owner);
      const int tile = __shfl_sync(~0u, upto, owner) - 1 - static_cast<int>(index);
      w.seq = base + owner;
      w.first_row = first + tile * kRows;
      w.rows = min(kRows, length - tile * kRows);
      const int context = p.block_tables == nullptr ? length : p.context_lens[w.seq];
      w.position = context - length + tile * kRows;
      w.first_key_row = first;
      return true;
    }
    index -= total;
  }
  return false;
}

/// The two e4m3 of x's lower half, as T.
template <class T>
__device__ uint32_t widen_e4m3(uint32_t x) {
  const __half2 pair(
      __half2_raw(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(x), __NV_E4M3)));
  const float2 wide = __half22float2(pair);
  return pack_pair<T>(wide.x, wide.y);
}

/// 16 rows of a shared tile by all threads, asynchronously; zeros from `valid` on, so that no probability of
/// 0 meets a NaN. `rows`: the first one, `stride` elements from row to row.
template <class T, int kHeadDim>
__device__ void load_16_rows(uint32_t to, const T* rows, int64_t stride, int valid) {
  constexpr int kChunks = kHeadDim / 8, kPitch = Tile<kHeadDim>::kPitch;
#pragma unroll
  for (int first = 0; first < 16 * kChunks; first += kThreads) {
    const int i = first + static_cast<int>(threadIdx.x), row = i / kChunks, d = i % kChunks * 8;
    if (first + kThreads > 16 * kChunks && row >= 16) break;
    cp_async_16(to + (row * kPitch + d) * 2, rows + row * stride + d, row < valid);
  }
}

/// The same from e4m3, through registers: not asynchronous.
template <class T, int kHeadDim>
__device__ void load_16_rows(uint32_t to, const __nv_fp8_e4m3* rows, int64_t stride, int valid) {
  constexpr int kChunks = kHeadDim / 8, kPitch = Tile<kHeadDim>::kPitch;
#pragma unroll
  for (int first = 0; first < 16 * kChunks; first += kThreads) {
    const int i = first + static_cast<int>(threadIdx.x), row = i / kChunks, d = i % kChunks * 8;
    if (first + kThreads > 16 * kChunks && row >= 16) break;
    uint2 packed = {};
    if (row < valid) packed = *reinterpret_cast<const uint2*>(rows + row * stride + d);
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to + (row * kPitch + d) * 2),
                 "r"(widen_e4m3<T>(packed.x)), "r"(widen_e4m3<T>(packed.x >> 16)),
                 "r"(widen_e4m3<T>(packed.y)), "r"(widen_e4m3<T>(packed.y >> 16))
                 : "memory");
  }
}

template <class T, class Cache, int kHeadDim>
__global__ void __launch_bounds__(kThreads)
    paged_attention_prefill_mma_kernel(const Params p, const int block_shift, const float scale_log2) {
  using Shape = Tile<kHeadDim>;
  constexpr int kParts = Shape::kParts, kPitch = Shape::kPitch;
  extern __shared__ uint4 shared[];
  const int head = blockIdx.x % p.num_q_heads;
  Work w;
  if (!find_work<Shape::kRows>(w, p, blockIdx.x / p.num_q_heads)) return;
  const int64_t kv_head = head / (p.num_q_heads / p.num_kv_heads);
  const uint32_t q_tile = shared_address(shared);
  const uint32_t k_tile = q_tile + Shape::kRows * kPitch * 2, v_tile = k_tile + kKeys * kPitch * 2;
  const int num_keys = w.position + w.rows;  // that the last row sees
  const int32_t* table = p.block_tables + w.seq * p.table_stride_row;
  const Cache* k = static_cast<const Cache*>(p.k) + kv_head * p.k_stride_head;
  const Cache* v = static_cast<const Cache*>(p.v) + kv_head * p.v_stride_head;
  float score_scale = scale_log2;
  if constexpr (!std::is_same_v<T, Cache>) score_scale *= p.k_scale == nullptr ? 1.0f : *p.k_scale;

  auto load_keys = [&](uint32_t to, const Cache* data, int64_t stride_block, int64_t stride_slot, int first) {
#pragma unroll
    for (int row = 0; row < kKeys; row += 16) {  // 16 keys lie in one block
      const int key = first + row, valid = num_keys - key;
      const Cache* rows = data;
      if (p.block_tables == nullptr)
        rows += (w.first_key_row + key) * stride_slot;
      else if (valid > 0)
        rows += table[key >> block_shift] * stride_block + (key & ((1 << block_shift) - 1)) * stride_slot;
      load_16_rows<T, kHeadDim>(to + row * kPitch * 2, rows, stride_slot, valid);
    }
    cp_async_commit();
  };

  const int last = (num_keys - 1) / kKeys * kKeys;
  const T* q = static_cast<const T*>(p.q) + w.first_row * p.q_stride_row + head * p.q_stride_head;
  for (int row = 0; row < Shape::kRows; row += 16)
    load_16_rows<T, kHeadDim>(q_tile + row * kPitch * 2, q + row * p.q_stride_row, p.q_stride_row,
                              w.rows - row);
  load_keys(k_tile, k, p.k_stride_block, p.k_stride_slot, last);

  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16 * kParts;
  // Addresses of this lane's rows for ldmatrix: q and v walk rows first, k columns first.
  const uint32_t q_lane = q_tile + ((warp_row + lane % 16) * kPitch + lane / 16 * 8) * 2;
  const uint32_t k_lane = k_tile + ((lane / 16 * 8 + lane % 8) * kPitch + lane / 8 % 2 * 8) * 2;
  const uint32_t v_lane = v_tile + (lane % 16 * kPitch + lane / 16 * 8) * 2;
  float o[kParts][kHeadDim / 2] = {};
  OnlineSoftmax softmax[kParts];

  for (int first = last; first >= 0; first -= kKeys) {
    cp_async_wait<0>();
    __syncthreads();  // k is there, and nobody reads v any more
    load_keys(v_tile, v, p.v_stride_block, p.v_stride_slot, first);

    float s[kParts][kKeys / 2] = {};
#pragma unroll
    for (int d = 0; d < kHeadDim; d += 16) {
      uint32_t a[kParts][4];
#pragma unroll
      for (int m = 0; m < kParts; ++m) ldmatrix_x4(a[m], q_lane + (m * 16 * kPitch + d) * 2);
#pragma unroll
      for (int n = 0; n < kKeys; n += 16) {
        uint32_t b[4];
        ldmatrix_x4(b, k_lane + (n * kPitch + d) * 2);
#pragma unroll
        for (int m = 0; m < kParts; ++m)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            mma_16816<T>(reinterpret_cast<float (&)[4]>(s[m][n / 2 + 4 * half]), a[m], b[2 * half],
                         b[2 * half + 1]);
      }
    }

    cp_async_wait<0>();
    __syncthreads();  // v is there, and nobody reads k any more
    if (first > 0) load_keys(k_tile, k, p.k_stride_block, p.k_stride_slot, first - kKeys);

    uint32_t probs[kParts][kKeys / 4];
#pragma unroll
    for (int m = 0; m < kParts; ++m) {
      const int row = w.position + warp_row + 16 * m;
      if (first + kKeys - 1 > row) mask_scores(s[m], first + lane % 4 * 2, row + lane / 4);
      float shrink[2];
      softmax[m].template add<true>(s[m], shrink, score_scale);
      scale_rows(o[m], shrink);
      round_probs<T>(probs[m], s[m]);
    }
#pragma unroll
    for (int n = 0; n < kKeys; n += 16)
#pragma unroll
      for (int d = 0; d < kHeadDim; d += 16) {
        uint32_t b[4];
        ldmatrix_x4_trans(b, v_lane + (n * kPitch + d) * 2);
#pragma unroll
        for (int m = 0; m < kParts; ++m)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            mma_16816<T>(reinterpret_cast<float (&)[4]>(o[m][d / 2 + 4 * half]),
                         reinterpret_cast<const uint32_t (&)[4]>(probs[m][n / 4]), b[2 * half],
                         b[2 * half + 1]);
      }
  }

#pragma unroll
  for (int m = 0; m < kParts; ++m)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float inverse = softmax[m].inverse_sum(i);
      if constexpr (!std::is_same_v<T, Cache>) inverse *= p.v_scale == nullptr ? 1.0f : *p.v_scale;
      const int row = warp_row + 16 * m + 8 * i + lane / 4;
      if (row >= w.rows) continue;
      T* out = static_cast<T*>(p.out) + (w.first_row + row) * p.out_stride_row + head * p.out_stride_head;
#pragma unroll
      for (int d = 0; d < kHeadDim; d += 8) {
        const float* x = &o[m][d / 2 + 2 * i];
        store_pair(out + d + lane % 4 * 2, pack_pair<T>(x[0] * inverse, x[1] * inverse));
      }
    }
}

template <class T, class Cache, int kHeadDim>
cudaError_t launch(const Params& p, cudaStream_t stream) {
  using Shape = Tile<kHeadDim>;
  const auto kernel = paged_attention_prefill_mma_kernel<T, Cache, kHeadDim>;
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kBytes);
  if (status != cudaSuccess) return status;
  int block_shift = 0;
  while ((int64_t{1} << block_shift) < p.block_size) ++block_shift;
  // Lengths are on the device: enough blocks for any, those past the last tile leave at once.
  const int64_t tiles = std::min(p.num_tokens, p.num_tokens / Shape::kRows + p.batch);
  const unsigned blocks = static_cast<unsigned>(tiles * p.num_q_heads);
  kernel<<<blocks, kThreads, Shape::kBytes, stream>>>(p, block_shift, p.scale * kLog2E);
  return cudaGetLastError();
}

template <class T, class Cache>
cudaError_t launch(const Params& p, cudaStream_t stream) {
  switch (p.head_dim) {
    case 64:
      return launch<T, Cache, 64>(p, stream);
    case 80:
      return launch<T, Cache, 80>(p, stream);
    case 96:
      return launch<T, Cache, 96>(p, stream);
    case 128:
      return launch<T, Cache, 128>(p, stream);
    case 256:
      return launch<T, Cache, 256>(p, stream);
    default:
      return cudaErrorInvalidValue;  // ops/attention_checks.h refuses it by name
  }
}

}  // namespace

cudaError_t launch_paged_attention_prefill_mma(const Params& p, cudaStream_t stream) {
  const bool narrow = p.kv_dtype == DType::kFloat8E4M3;
  if (p.dtype == DType::kBFloat16)
    return narrow ? launch<__nv_bfloat16, __nv_fp8_e4m3>(p, stream)
                  : launch<__nv_bfloat16, __nv_bfloat16>(p, stream);
  return narrow ? launch<__half, __nv_fp8_e4m3>(p, stream) : launch<__half, __half>(p, stream);
}

}  // namespace nanovllm::kernels
