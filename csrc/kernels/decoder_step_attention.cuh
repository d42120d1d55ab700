// Attention of the decoder step: norm and rotation of the new queries and keys, the cache store, and the
// attention of one token a row over its paged context.
//
// A work item is a row, a KV head and a part of the context; items are shared out over the blocks, so many
// parts that all blocks have one. A warp takes 16 tokens at a time: keys and values travel from global memory
// to registers, the first while the block still waits for its queries (tokens of earlier steps are in the
// cache), the next during the arithmetic of these, and are mma operands there: scores are keys (M) times
// queries of the group (N), results are values, transposed in registers (M), times probabilities (N). Where a
// context has several parts, the block of part 0 combines.
#pragma once
#include <cmath>

#include "kernels/decoder_step_linear.cuh"

namespace nanovllm::kernels::step {

constexpr int kMaxGroup = kDecoderStepMaxGroup;
constexpr int kMinPart = 64;        // tokens of a context, at least, that are worth another block
constexpr int kPass = 16 * kWarps;  // tokens that a block takes at a time
constexpr int kCombined = 8;        // parts that a thread loads at a time
constexpr int kHeadPad = 4;         // floats after a head of a partial result: maximum, sum, two unused
constexpr float kLog2E = 1.4426950408889634f;

/// How the rows' contexts are cut, made by every block from the lengths alone.
struct Split {
  int len[kRows], parts[kRows], part_tokens[kRows], first_item[kRows + 1];

  /// A warp's. The smallest parts for which every item has a block of its own, found by trying one size a
  /// lane; whole contexts where there are more rows and KV heads than blocks.
  __device__ void init(const DecoderStepParams& p) {
    const int lane = threadIdx.x % 32;
    if (lane < p.rows) {
      const int64_t limit = p.max_blocks << p.block_shift;
      len[lane] = static_cast<int>(min(max(static_cast<int64_t>(p.context_lens[lane]), int64_t{0}), limit));
    }
    __syncwarp();
    int64_t sum = 0;
    int longest = 1;
#pragma unroll 1
    for (int r = 0; r < p.rows; ++r) sum += len[r], longest = max(longest, len[r]);
    const int blocks = gridDim.x;
    const int least = max(static_cast<int>(sum * p.num_kv_heads / blocks) + 1, kMinPart);
    int size = lane == 31 ? longest : min(least + least / 16 * lane, longest);
    int items = 0;
#pragma unroll 1
    for (int r = 0; r < p.rows; ++r) items += max((len[r] + size - 1) / size, 1) * p.num_kv_heads;
    const uint32_t fits = __ballot_sync(~0u, items <= blocks);
    size = __shfl_sync(~0u, size, fits == 0 ? 31 : __ffs(fits) - 1);
    if (lane < p.rows) {
      const int wanted = max((len[lane] + size - 1) / size, 1);
      part_tokens[lane] = max((len[lane] + wanted - 1) / wanted + 15 & ~15, 16);
      parts[lane] = max((len[lane] + part_tokens[lane] - 1) / part_tokens[lane], 1);
    }
    __syncwarp();
    if (lane > 0) return;
    first_item[0] = 0;
#pragma unroll 1
    for (int r = 0; r < p.rows; ++r) first_item[r + 1] = first_item[r] + parts[r] * p.num_kv_heads;
  }
};

struct Item {
  int number, row, head, part, parts;
  int begin, end, len;  // tokens of the part, of the context
  Item() = default;
  __device__ Item(const Split& split, int number, int rows, int kv_heads) : number(number), row(0) {
#pragma unroll 1
    while (row + 1 < rows && number >= split.first_item[row + 1]) ++row;
    const int item = number - split.first_item[row];
    head = item % kv_heads, part = item / kv_heads, parts = split.parts[row], len = split.len[row];
    begin = part * split.part_tokens[row];
    end = min(begin + split.part_tokens[row], len);
  }
  __device__ bool is_last() const { return part + 1 == parts; }
  __device__ int newest() const { return len - 1; }
};

/// Where a lane's two tokens are in the cache, from its columns of the KV head's first slot on.
struct TokenOffsets {
  int64_t at[2];
  bool has[2];  // before `end`
  TokenOffsets() = default;
  __device__ TokenOffsets(const DecoderStepParams& p, const int32_t* table, int first, int end) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int token = first + 8 * side;
      has[side] = token < end;
      at[side] = 0;
      if (has[side])
        at[side] = __ldg(table + (token >> p.block_shift)) * p.stride_block +
                   (token & ((1 << p.block_shift) - 1)) * p.stride_slot;
    }
  }
};

/// Shared memory of a block's attention.
template <int kDim>
struct AttentionSmem {
  Item first_item;  // of the block: the same in all layers, too much to keep in registers
  TokenOffsets first_tokens[kThreads];
  bf16 q[kMaxGroup][kDim], k[kDim], v[kDim];  // of the item's row, ready to use
  float maxima[kWarps][kMaxGroup], weights[kWarps][kMaxGroup];
};

/// Keys or values of a warp's 16 tokens, as the lanes' 16-byte operands: tokens lane / 4 and that + 8.
template <int kDim>
using TokenRows = uint32_t[kDim / 32][2][4];

template <int kDim>
__device__ void load_tokens(TokenRows<kDim>& to, const bf16* from, const TokenOffsets& tokens) {
#pragma unroll
  for (int side = 0; side < 2; ++side)
#pragma unroll
    for (int s = 0; s < kDim / 32; ++s)
      if (tokens.has[side]) load_global(to[s][side], from + tokens.at[side] + s * 32);
}
/// The newest token, which is not in the cache yet, in place of tokens that `load_tokens` has left out:
/// itself, and those past the context, which then are finite at least (the cache may hold NaN there).
template <int kDim>
__device__ void load_newest(TokenRows<kDim>& to, const bf16* from, const bool (&has)[2]) {
#pragma unroll
  for (int side = 0; side < 2; ++side)
#pragma unroll
    for (int s = 0; s < kDim / 32; ++s)
      if (!has[side]) load_shared(to[s][side], shared_address(from + s * 32));
}

/// Head `head` of a row's q, k, v: normed where there is a weight, and rotated, fp32 inside; a warp's.
/// `scratch`: [kDim] floats.
template <int kDim, int kR>
__device__ void prepare_head(int lane, bf16* to, const uint32_t* qkv, int row, int head, const bf16* weight,
                             bool rotate, const float* cos_sin, int rotary_dim, float eps, float* scratch) {
  constexpr int kEach = kDim / 32;
  const int d = lane * kEach;
  uint32_t by[kEach / 2] = {}, pairs[1][kEach / 2];
  if (weight != nullptr)
#pragma unroll
    for (int i = 0; i < kEach / 2; ++i) by[i] = __ldg(reinterpret_cast<const uint32_t*>(weight + d) + i);
  const uint32_t* const from[1] = {qkv + word_of<kR>(row, head * kDim + d)};
  receive(pairs, from);
  float x[kEach];
#pragma unroll
  for (int i = 0; i < kEach / 2; ++i) {
    const float2 v = unpack(pairs[0][i]);
    x[2 * i] = v.x, x[2 * i + 1] = v.y;
  }
  if (weight != nullptr) {
    float squares = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) squares += x[i] * x[i];
    const float scale = rsqrtf(reduce_lanes(squares, Sum{}) / static_cast<float>(kDim) + eps);
#pragma unroll
    for (int i = 0; i < kEach / 2; ++i) {
      const float2 w = unpack(by[i]);
      x[2 * i] = x[2 * i] * scale * w.x, x[2 * i + 1] = x[2 * i + 1] * scale * w.y;
    }
  }
  if (rotate) {
    const int half = rotary_dim / 2;
#pragma unroll
    for (int i = 0; i < kEach; ++i) scratch[d + i] = x[i];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int e = d + i;
      if (e < half)
        x[i] = x[i] * cos_sin[e] - scratch[e + half] * cos_sin[half + e];
      else if (e < rotary_dim)
        x[i] = x[i] * cos_sin[e - half] + scratch[e - half] * cos_sin[e];
    }
  }
#pragma unroll
  for (int i = 0; i < kEach / 2; ++i)
    reinterpret_cast<uint32_t*>(to + d)[i] = pack_pair<bf16>(x[2 * i], x[2 * i + 1]);
  __syncwarp();
}

/// What a launch's attention reads and writes, for one layer.
struct AttentionLayer {
  const bf16 *q_norm, *k_norm;
  bf16* keys;           // of the layer; values are kv_stride further
  const uint32_t* qkv;  // exchange buffer of (num_q_heads + 2 * num_kv_heads) * kDim columns
  uint32_t* out;        // the same of num_q_heads * kDim
  uint32_t* partials;   // [items, group, kDim + kHeadPad]
};

/// An item of a layer: a partial result published, or the result where the context is whole. `first`: the
/// lane's tokens of the first pass.
template <int kDim, int kR>
__device__ void attend(Consumer<kR>& c, const DecoderStepParams& p, const AttentionLayer& layer,
                       const Item& item, const TokenOffsets& first, const float* cos_sin,
                       AttentionSmem<kDim>& smem) {
  constexpr int kSteps = kDim / 32;
  const int group = p.num_q_heads / p.num_kv_heads, g = c.lane() / 4, t = c.lane() % 4;
  const int32_t* table = p.block_tables + item.row * p.table_stride_row;
  const bf16* head_keys = layer.keys + item.head * p.stride_head + t * 8;
  const int begin = item.begin, end = item.end, last = item.newest();
  TokenRows<kDim> k, v;
  load_tokens<kDim>(k, head_keys, first);
  load_tokens<kDim>(v, head_keys + p.kv_stride, first);

  float* sums = c.next_sums();
  const float* angles = cos_sin + item.row * p.rotary_dim;
#pragma unroll 1
  for (int job = c.warp(); job < group + (item.is_last() ? 2 : 0); job += kWarps) {
    const bool is_q = job < group, is_k = job == group;
    bf16* to = is_q ? smem.q[job] : is_k ? smem.k : smem.v;
    const int head = is_q   ? item.head * group + job
                     : is_k ? p.num_q_heads + item.head
                            : p.num_q_heads + p.num_kv_heads + item.head;
    prepare_head<kDim, kR>(c.lane(), to, layer.qkv, item.row, head,
                           is_q   ? layer.q_norm
                           : is_k ? layer.k_norm
                                  : nullptr,
                           is_q || is_k, angles, p.rotary_dim, p.eps, sums + c.warp() * kDim);
    if (is_q || item.len == 0) continue;
    const int64_t block = table[last >> p.block_shift];
    if (block < 0) continue;
    bf16* slot = layer.keys + block * p.stride_block + (last & ((1 << p.block_shift) - 1)) * p.stride_slot +
                 item.head * p.stride_head + (is_k ? 0 : p.kv_stride);
    if (c.lane() < kDim / 8)
      reinterpret_cast<uint4*>(slot)[c.lane()] = reinterpret_cast<const uint4*>(to)[c.lane()];
  }
  c.sync();

  const float scale = rsqrtf(static_cast<float>(kDim)) * kLog2E;
  float maximum[2] = {-INFINITY, -INFINITY}, weight[2] = {}, out[kSteps][2][4] = {};
  int token = begin + c.warp() * 16 + g;
  bool has[2] = {first.has[0], first.has[1]};
#pragma unroll 1
  for (int pass = begin; pass + c.warp() * 16 < end; pass += kPass, token += kPass) {
    if (pass + kPass > last) {
      load_newest<kDim>(k, smem.k + t * 8, has);
      load_newest<kDim>(v, smem.v + t * 8, has);
    }
    float score[2][4] = {};
    uint32_t q[kSteps][4] = {};
    if (g < group) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) load_shared(q[s], shared_address(&smem.q[g][s * 32 + t * 8]));
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t a[4] = {k[s][0][2 * half], k[s][1][2 * half], k[s][0][2 * half + 1],
                               k[s][1][2 * half + 1]};
        mma_16816<bf16>(score[half], a, q[s][2 * half], q[s][2 * half + 1]);
      }
    const bool more = pass + kPass < end;
    TokenOffsets next;
    if (more) {
      next = {p, table, token + kPass, min(end, last)};
      load_tokens<kDim>(k, head_keys, next);
    }
    float x[4];  // of token g, heads 2t and 2t + 1, then of token g + 8
#pragma unroll
    for (int i = 0; i < 4; ++i)
      x[i] = token + i / 2 * 8 < end ? (score[0][i] + score[1][i]) * scale : -INFINITY;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float most = fmaxf(x[h], x[h + 2]);
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, lanes));
      most = fmaxf(most, maximum[h]);
      const float decay = maximum[h] == -INFINITY ? 0.0f : exp2_approx(maximum[h] - most);
      maximum[h] = most;
      x[h] = exp2_approx(x[h] - most), x[h + 2] = exp2_approx(x[h + 2] - most);
      weight[h] = weight[h] * decay + x[h] + x[h + 2];
#pragma unroll
      for (int s = 0; s < kSteps; ++s)
#pragma unroll
        for (int j = 0; j < 2; ++j) out[s][j][h] *= decay, out[s][j][h + 2] *= decay;
    }
    const uint32_t b0 = movmatrix_trans(pack_pair<bf16>(x[0], x[1]));
    const uint32_t b1 = movmatrix_trans(pack_pair<bf16>(x[2], x[3]));
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint32_t a[4] = {movmatrix_trans(v[s][0][2 * j]), movmatrix_trans(v[s][0][2 * j + 1]),
                               movmatrix_trans(v[s][1][2 * j]), movmatrix_trans(v[s][1][2 * j + 1])};
        mma_16816<bf16>(out[s][j], a, b0, b1);
      }
    if (more) {
      load_tokens<kDim>(v, head_keys + p.kv_stride, next);
      has[0] = next.has[0], has[1] = next.has[1];
    }
  }

  // The warps' results become the item's, a few heads at a time.
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) weight[h] += __shfl_xor_sync(~0u, weight[h], lanes);
    if (g == 0) smem.maxima[c.warp()][2 * t + h] = maximum[h], smem.weights[c.warp()][2 * t + h] = weight[h];
  }
  constexpr int kHeadsAtOnce = kSumsFloats / (kWarps * kDim);
#pragma unroll 1
  for (int first = 0; first < group; first += kHeadsAtOnce) {
    const int heads = min(kHeadsAtOnce, group - first);
    if (first > 0) c.sync();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int head = 2 * t + h - first;
      if (head < 0 || head >= heads) continue;
      float* to = sums + (c.warp() * heads + head) * kDim;
#pragma unroll
      for (int s = 0; s < kSteps; ++s)
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
          for (int i = 0; i < 2; ++i) to[s * 32 + g / 2 * 8 + 4 * j + 2 * i + g % 2] = out[s][j][h + 2 * i];
    }
    c.sync();
#pragma unroll 1
    for (int i = c.thread; i < heads * kDim / 2; i += kThreads) {
      const int head = i / (kDim / 2), d = i % (kDim / 2) * 2;
      float most = -INFINITY;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) most = fmaxf(most, smem.maxima[w][first + head]);
      float sum = 0, x = 0, y = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float max_of_warp = smem.maxima[w][first + head];
        if (max_of_warp == -INFINITY) continue;
        const float factor = exp2_approx(max_of_warp - most);
        const float2 o = *reinterpret_cast<const float2*>(sums + (w * heads + head) * kDim + d);
        sum += factor * smem.weights[w][first + head], x += factor * o.x, y += factor * o.y;
      }
      if (item.parts == 1) {
        const float norm = sum > 0 ? 1.0f / sum : 0.0f;
        publish(layer.out + word_of<kR>(item.row, (item.head * group + first + head) * kDim + d),
                pack_pair<bf16>(x * norm, y * norm));
      } else {
        uint32_t* to =
            layer.partials + (static_cast<int64_t>(item.number) * group + first + head) * (kDim + kHeadPad);
        publish(to + d, x, y);
        if (d == 0) publish(to + kDim, most, sum);
      }
    }
  }
}

/// The parts of a context, in order, into the result; `item` is part 0.
template <int kDim, int kR>
__device__ void combine(int thread, const DecoderStepParams& p, const AttentionLayer& layer,
                        const Item& item) {
  const int parts = item.parts, group = p.num_q_heads / p.num_kv_heads;
  // Whole warps take part: `receive` is theirs.
#pragma unroll 1
  for (int i = thread; i < group * kDim / 2; i += kThreads) {
    const int head = i / (kDim / 2), d = i % (kDim / 2) * 2;
    const uint32_t* from =
        layer.partials + (static_cast<int64_t>(item.number) * group + head) * (kDim + kHeadPad);
    const int64_t stride =
        static_cast<int64_t>(p.num_kv_heads) * group * (kDim + kHeadPad);  // to the next part
    float most = -INFINITY, sum = 0, x = 0, y = 0;
#pragma unroll 1
    for (int first = 0; first < parts; first += kCombined) {
      uint32_t got[2 * kCombined][2];
      const uint32_t* at[2 * kCombined];
#pragma unroll
      for (int j = 0; j < kCombined; ++j) {
        const uint32_t* part = first + j < parts ? from + (first + j) * stride : nullptr;
        at[2 * j] = part == nullptr ? nullptr : part + d;
        at[2 * j + 1] = part == nullptr ? nullptr : part + kDim;
      }
      receive(got, at);
#pragma unroll
      for (int j = 0; j < kCombined; ++j) {
        const float max_of_part = __uint_as_float(got[2 * j + 1][0]);
        if (first + j >= parts || max_of_part == -INFINITY) continue;
        const float higher = fmaxf(most, max_of_part);
        const float old = most == -INFINITY ? 0.0f : exp2_approx(most - higher);
        const float now = exp2_approx(max_of_part - higher);
        most = higher;
        sum = sum * old + now * __uint_as_float(got[2 * j + 1][1]);
        x = x * old + now * __uint_as_float(got[2 * j][0]);
        y = y * old + now * __uint_as_float(got[2 * j][1]);
      }
    }
    const float norm = sum > 0 ? 1.0f / sum : 0.0f;
    publish(layer.out + word_of<kR>(item.row, (item.head * group + head) * kDim + d),
            pack_pair<bf16>(x * norm, y * norm));
  }
}

}  // namespace nanovllm::kernels::step
