// What the warps of the decoder step do: two stream the weights, one clears, eight compute.
#pragma once
#include "common/prefetch.cuh"
#include "kernels/decoder_step_layout.cuh"

namespace nanovllm::kernels::step {

constexpr int kPrefetched = 256;  // tokens of a block's context

/// SiLU as silu_and_mul computes it.
__device__ inline float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }
__device__ inline float rounded(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }
__device__ inline float bias_at(const void* bias, int i) {
  return bias == nullptr ? 0.0f : __bfloat162float(static_cast<const bf16*>(bias)[i]);
}

template <int kDim, int kR>
struct Step {
  const DecoderStepParams& p;
  Smem<kDim>& smem;
  const DecoderStepLayer* layers;
  const Buffers& at;
  const int qkv_size, q_size;
  const int qkv_tiles, hidden_tiles, active_tiles, head_tiles;  // of this block
  const float inverse_hidden;

  __device__ Step(const DecoderStepParams& p, const Buffers& at, Smem<kDim>& smem,
                  const DecoderStepLayer* layers)
      : p(p),
        smem(smem),
        layers(layers),
        at(at),
        qkv_size((p.num_q_heads + 2 * p.num_kv_heads) * kDim),
        q_size(p.num_q_heads * kDim),
        qkv_tiles(num_tiles(qkv_size / 16)),
        hidden_tiles(num_tiles(p.hidden / 8)),
        active_tiles(num_tiles(p.intermediate / 8)),
        head_tiles(num_tiles((p.vocab + 15) / 16)),
        inverse_hidden(1.0f / static_cast<float>(p.hidden)) {}

  __device__ uint32_t* set(int layer) const { return p.workspace + (layer & 1) * at.set; }
  __device__ uint32_t* residual_after(int layer) const {
    return layer + 1 == p.num_layers ? p.workspace + at.last : set(layer) + at.out;
  }

  // The streaming warps

  __device__ void stream(Streamer to) const {
    // Of a weight with `depth` columns: rows 8 * i ... 8 * i + 7, of `limit`.
    const auto eight = [](const void* weight, int depth, int64_t i, int limit) -> EightRows {
      const int first = static_cast<int>(min(8 * i, static_cast<int64_t>(limit) - 1));
      return {static_cast<const bf16*>(weight) + static_cast<int64_t>(first) * depth, min(8, limit - first)};
    };
#pragma unroll 1
    for (int half = 0; half <= 2 * p.num_layers; ++half) {
      const bool is_mlp = half % 2 == 1, is_head = half == 2 * p.num_layers;
      const DecoderStepLayer& w = layers[is_head ? 0 : half / 2];
      if (!is_mlp && !is_head) prefetch_small(half / 2);
      const void* wide = is_head ? p.lm_head : is_mlp ? w.gate_up : w.qkv;
      const int outputs = is_head ? p.vocab : is_mlp ? 2 * p.intermediate : qkv_size;
      to.matrix<16>(p.hidden,
                    is_head  ? head_tiles
                    : is_mlp ? active_tiles
                             : qkv_tiles,
                    is_head, [&](int i, int part) {
                      return eight(wide, p.hidden, is_mlp ? i + part * (p.intermediate / 8) : 2 * i + part,
                                   outputs);
                    });
      if (is_head) return;
      const void* narrow = is_mlp ? w.down : w.o;
      const int depth = is_mlp ? p.intermediate : q_size;
      to.matrix<8>(depth, hidden_tiles, false, [&](int i, int) { return eight(narrow, depth, i, p.hidden); });
    }
  }
  /// Vectors that every block will read, into L2; blocks take turns.
  __device__ void prefetch_small(int layer) const {
    if (layer % gridDim.x != blockIdx.x || threadIdx.x / 32 != kWarps) return;
    const DecoderStepLayer& w = layers[layer];
    const int lane = threadIdx.x % 32;
    if (lane == 0) prefetch_bulk(w.input_norm, p.hidden * 2);
    if (lane == 1) prefetch_bulk(w.post_norm, p.hidden * 2);
    if (lane == 2 && w.q_norm != nullptr) prefetch_bulk(w.q_norm, kDim * 2);
    if (lane == 3 && w.k_norm != nullptr) prefetch_bulk(w.k_norm, kDim * 2);
    if (lane == 4 && w.qkv_bias != nullptr) prefetch_bulk(w.qkv_bias, qkv_size * 2);
  }

  // The clearing warp

  /// Clears, layer by layer, what this block published a layer ago. When a block has seen all of a layer's
  /// attention, every block has published its part of q, k and v for it, so has read the whole residual
  /// stream after the layer before, so all of that layer has been read. What is cleared is in use again in
  /// the layer after this one, which no block enters before this block has published its part of this one's
  /// result; and that waits for the fence.
  __device__ void clear() const {
    prefetch_context(0);
#pragma unroll 1
    for (int l = 0; l <= p.num_layers; ++l) {
      named_barrier_sync(kReset, kThreads + 32);
      if (l == 0) {
        clear_tiles<8>(p.workspace + at.last, p.hidden, kRows);  // of the launch before, whatever its rows
        clear_tiles<8>(residual_after(-1), p.hidden);
      } else {
        uint32_t* buffers = set(l - 1);
        clear_tiles<16>(buffers + at.qkv, qkv_size);
        clear_attention(buffers);
        clear_tiles<8>(buffers + at.middle, p.hidden);
        clear_tiles<8>(buffers + at.active, p.intermediate);
        if (l < p.num_layers) clear_tiles<8>(buffers + at.out, p.hidden);
      }
      asm volatile("fence.acq_rel.gpu;" ::: "memory");
      __syncwarp();
      if (l < p.num_layers) named_barrier_arrive(kResetDone, kThreads + 32);
      if (l + 1 < p.num_layers) prefetch_context(l + 1);
    }
  }
  /// Into L2, the first tokens that this block will attend to: not behind the weights then.
  __device__ void prefetch_context(int layer) const {
    if (blockIdx.x >= smem.split.first_item[p.rows]) return;
    const Item item(smem.split, blockIdx.x, p.rows, p.num_kv_heads);
    const int32_t* table = p.block_tables + item.row * p.table_stride_row;
    const bf16* keys =
        static_cast<const bf16*>(p.kv_cache) + layer * p.stride_layer + item.head * p.stride_head;
    const int end = min(min(item.end, item.newest()), item.begin + kPrefetched);
#pragma unroll 1
    for (int token = item.begin + threadIdx.x % 32; token < end; token += 32) {
      const bf16* at = keys + table[token >> p.block_shift] * p.stride_block +
                       (token & ((1 << p.block_shift) - 1)) * p.stride_slot;
      prefetch_bulk(at, kDim * 2);
      prefetch_bulk(at + p.kv_stride, kDim * 2);
    }
  }
  /// The words at(0) ... at(count - 1).
  template <class At>
  __device__ void clear_words(int count, At const& at) const {
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < count; i += 32) publish(at(i), kAbsent);
  }
  /// This block's tiles, `kTile` columns wide, of a buffer of `width` columns and kR rows.
  template <int kTile>
  __device__ void clear_tiles(uint32_t* buffer, int width, int rows = kR) const {
    const int words = kTile / 2 * rows;
    clear_words(num_tiles(width / kTile) * words,
                [&](int i) { return buffer + tile_of(i / words) * words + i % words; });
  }
  __device__ void clear_attention(uint32_t* buffers) const {
    const int group = p.num_q_heads / p.num_kv_heads, items = smem.split.first_item[p.rows];
#pragma unroll 1
    for (int number = blockIdx.x; number < items; number += gridDim.x) {
      const Item item(smem.split, number, p.rows, p.num_kv_heads);
      if (item.part == 0)
        clear_words(group * kDim / 2, [&](int i) {
          return buffers + at.attention + word_of<kR>(item.row, item.head * group * kDim + 2 * i);
        });
      uint32_t* partials = buffers + at.partials + static_cast<int64_t>(number) * group * (kDim + kHeadPad);
      if (smem.split.parts[item.row] > 1)
        clear_words(group * (kDim + kHeadPad), [&](int i) { return partials + i; });
    }
  }

  // The warps that compute

  /// A layer is two halves: a product of the normed residual stream (q, k and v; gate and up), what is done
  /// with that (attention; SiLU), and a product added to the residual stream (o; down). The head is half of
  /// one. All share the code, for the instruction cache's sake.
  __device__ void compute(Consumer<kR> c) const {
    init_residual(c.thread);
    if (blockIdx.x < smem.split.first_item[p.rows]) {
      const Item item(smem.split, blockIdx.x, p.rows, p.num_kv_heads);
      if (c.thread == 0) smem.attention.first_item = item;
      smem.attention.first_tokens[c.thread] = tokens_of(c, item);
    }
    c.sync();
#pragma unroll 1
    for (int half = 0; half <= 2 * p.num_layers; ++half) {
      c.forget();
      const int l = half / 2;
      const bool is_mlp = half % 2 == 1, is_head = l == p.num_layers;
      const DecoderStepLayer& w = layers[is_head ? 0 : l];
      uint32_t* buffers = set(l);
      const void* norm = is_head ? p.norm : is_mlp ? w.post_norm : w.input_norm;
      const uint32_t* residual = is_mlp ? buffers + at.middle : residual_after(l - 1);
      multiply<16>(
          c, p.hidden,
          is_head  ? head_tiles
          : is_mlp ? active_tiles
                   : qkv_tiles,
          [&](int) {
            const float squares = fetch_activations<16>(c, residual, p.hidden, 0, norm);
            if (is_head) named_barrier_arrive(kReset, kThreads + 32);
            return squares;
          },
          [&](int first, int count, const float* sums) {
            if (is_head)
              emit_logits(c.thread, first, count, sums);
            else if (is_mlp)
              emit_active(c.thread, first, count, sums, buffers + at.active, w.gate_up_bias);
            else
              emit_qkv(c.thread, first, count, sums, buffers + at.qkv, w.qkv_bias);
          });
      if (is_head) return;
      if (!is_mlp) attention(c, w, l, buffers);
      const int depth = is_mlp ? p.intermediate : q_size;
      const uint32_t* from = buffers + (is_mlp ? at.active : at.attention);
      multiply<8>(
          c, depth, hidden_tiles, [&](int block) { return fetch_activations<8>(c, from, depth, block); },
          [&](int first, int count, const float* sums) {
            if (first == 0) {
              if (is_mlp)
                named_barrier_sync(kResetDone, kThreads + 32);
              else
                named_barrier_arrive(kReset, kThreads + 32);
            }
            emit_residual(c.thread, first, count, sums, is_mlp ? residual_after(l) : buffers + at.middle,
                          is_mlp ? w.down_bias : w.o_bias);
          });
    }
  }

  /// The residual stream begins as the embedding: as if a layer before the first had published it.
  __device__ void init_residual(int thread) const {
    for_pairs(thread, hidden_tiles, [&](int i, int m, int n) {
      const int column = tile_of(i) * 8 + m;
      const float2 pair = unpack(*reinterpret_cast<const uint32_t*>(static_cast<const bf16*>(p.embedding) +
                                                                    smem.token[n] * p.hidden + column));
      put_residual(residual_after(-1), i, m, n, pair.x, pair.y);
    });
  }
  /// Two neighbours of the residual stream, kept and published.
  __device__ void put_residual(uint32_t* to, int i, int m, int n, float low, float high) const {
    const uint32_t pair = pack_pair<bf16>(low, high);
    smem.residual[(i * 4 + m / 2) * kRows + n] = pair;
    publish(to + word_of<kR>(n, tile_of(i) * 8 + m), pair);
  }
  __device__ TokenOffsets tokens_of(const Consumer<kR>& c, const Item& item) const {
    return {p, p.block_tables + item.row * p.table_stride_row, item.begin + c.warp() * 16 + c.lane() / 4,
            min(item.end, item.newest())};
  }
  /// Item i; blocks have one, but for many rows and KV heads.
  __device__ Item item_of(int i) const {
    return i == blockIdx.x ? smem.attention.first_item : Item(smem.split, i, p.rows, p.num_kv_heads);
  }
  __device__ void attention(Consumer<kR>& c, const DecoderStepLayer& w, int l, uint32_t* buffers) const {
    const AttentionLayer layer{
        .q_norm = static_cast<const bf16*>(w.q_norm),
        .k_norm = static_cast<const bf16*>(w.k_norm),
        .keys = static_cast<bf16*>(p.kv_cache) + l * p.stride_layer,
        .qkv = buffers + at.qkv,
        .out = buffers + at.attention,
        .partials = buffers + at.partials,
    };
    const int items = smem.split.first_item[p.rows];
#pragma unroll 1
    for (int i = blockIdx.x; i < items; i += gridDim.x) {
      const Item item = item_of(i);
      const TokenOffsets tokens =
          i == blockIdx.x ? smem.attention.first_tokens[c.thread] : tokens_of(c, item);
      attend<kDim>(c, p, layer, item, tokens, smem.cos_sin, smem.attention);
    }
#pragma unroll 1
    for (int i = blockIdx.x; i < items; i += gridDim.x) {
      const Item item = item_of(i);
      if (item.part == 0 && item.parts > 1) combine<kDim, kR>(c.thread, p, layer, item);
    }
  }

  /// f(tile, first of two neighbouring weight rows, batch row), over the threads, for tiles of 8 rows.
  template <class F>
  __device__ void for_pairs(int thread, int count, F const& f) const {
#pragma unroll 1
    for (int i = thread; i < count * 4 * kR; i += kThreads)
      if (i / 4 % kR < p.rows) f(i / 4 / kR, i % 4 * 2, i / 4 % kR);
  }
  /// f(tile, weight row m, batch row n, sum, whether there is such an element), neighbours in m in
  /// neighbouring lanes; whole warps call it.
  template <int kTileRows, class F>
  __device__ void for_sums(int thread, int count, const float* sums, F const& f) const {
    const int elements = count * kTileRows * kR;
#pragma unroll 1
    for (int i = thread; i - i % 32 < elements; i += kThreads) {
      const int m = i % kTileRows, n = i / kTileRows % kR, tile = min(i / kTileRows / kR, kGroup - 1);
      float x = total(sums, tile, m, n);
      if constexpr (kTileRows == 16) x *= inverse_rms(smem.squares, n, inverse_hidden, p.eps);
      f(tile, m, n, x, i < elements && n < p.rows);
    }
  }
  __device__ static float neighbour(float x, int lanes) { return __shfl_xor_sync(~0u, x, lanes); }

  __device__ void emit_qkv(int thread, int first, int count, const float* sums, uint32_t* to,
                           const void* bias) const {
    for_sums<16>(thread, count, sums, [&](int i, int m, int n, float x, bool has) {
      const int column = tile_of(first + i) * 16 + m;
      if (has) x += bias_at(bias, column);
      const float next = neighbour(x, 1);
      if (has && m % 2 == 0) publish(to + word_of<kR>(n, column), pack_pair<bf16>(x, next));
    });
  }
  __device__ void emit_residual(int thread, int first, int count, const float* sums, uint32_t* to,
                                const void* bias) const {
    for_sums<8>(thread, count, sums, [&](int i, int m, int n, float x, bool has) {
      if (has) x += bias_at(bias, tile_of(first + i) * 8 + m);
      x = rounded(x);
      const float next = neighbour(x, 1);
      if (!has || m % 2 != 0) return;
      const float2 residual = unpack(smem.residual[((first + i) * 4 + m / 2) * kRows + n]);
      put_residual(to, first + i, m, n, residual.x + x, residual.y + next);
    });
  }
  /// silu(gate) * up; a tile has 8 rows of gate, then the same of up.
  __device__ void emit_active(int thread, int first, int count, const float* sums, uint32_t* to,
                              const void* bias) const {
    for_sums<16>(thread, count, sums, [&](int i, int m, int n, float x, bool has) {
      const int column = tile_of(first + i) * 8 + m % 8;
      if (has) x += bias_at(bias, column + (m < 8 ? 0 : p.intermediate));
      x = rounded(x);
      const float y = silu(x) * neighbour(x, 8), next = neighbour(y, 1);
      if (has && m < 8 && m % 2 == 0) publish(to + word_of<kR>(n, column), pack_pair<bf16>(y, next));
    });
  }
  __device__ void emit_logits(int thread, int first, int count, const float* sums) const {
    for_sums<16>(thread, count, sums, [&](int i, int m, int n, float x, bool has) {
      const int column = tile_of(first + i) * 16 + m;
      if (has && column < p.vocab)
        static_cast<bf16*>(p.logits)[static_cast<int64_t>(n) * p.vocab + column] = __float2bfloat16_rn(x);
    });
  }
};

}  // namespace nanovllm::kernels::step
