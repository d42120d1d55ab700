// Where the decoder step keeps what: the exchange buffers in the workspace, and a block's shared memory.
#pragma once
#include "kernels/decoder_step_attention.cuh"

namespace nanovllm::kernels::step {

constexpr int kMaxTiles = 8;  // of 8 hidden elements, that a block owns
constexpr int kMaxSlots = 16;
constexpr int kMaxRotaryDim = 128;

/// Where the exchange buffers are in the workspace, in words; each has room for kRows rows, in the order of
/// `word_of`. Two sets, for even and odd layers: one is cleared while the other is in use.
struct Buffers {
  int64_t qkv, attention, middle, active, out, partials, set, last, total;
  __host__ __device__ Buffers(const DecoderStepParams& p, int blocks) {
    const int64_t group = p.num_q_heads / p.num_kv_heads, pairs = kRows / 2;
    const int64_t items = blocks + static_cast<int64_t>(kRows) * p.num_kv_heads;
    qkv = 0;
    attention = qkv + pairs * (p.num_q_heads + 2 * p.num_kv_heads) * p.head_dim;
    middle = attention + pairs * p.num_q_heads * p.head_dim;
    active = middle + pairs * p.hidden;
    out = active + pairs * p.intermediate;
    partials = out + pairs * p.hidden;
    set = partials + items * group * (p.head_dim + kHeadPad);
    last = 2 * set;
    total = last + pairs * p.hidden;
  }
};

template <int kDim>
struct Smem {
  float sums[2][kSumsFloats];
  float squares[kRows * kWarps];
  float cos_sin[kRows * kMaxRotaryDim];
  AttentionSmem<kDim> attention;
  uint32_t residual[kMaxTiles * 4 * kRows];  // the block's part of that stream, [pair of elements, row]
  Split split;
  int64_t token[kRows];
  uint64_t full[kMaxSlots], empty[kMaxSlots];
};

/// What follows it in shared memory, in bytes from its begin: the layers' table, activations, the ring.
struct Layout {
  int layers, activations, ring;
  template <int kDim, int kR>
  __host__ __device__ static Layout of(const DecoderStepParams& p) {
    Layout at;
    constexpr int kStep = Slot<8>::kSlotDepth;
    const int depth = (widest(p.hidden, p.intermediate, p.num_q_heads * kDim) + kStep - 1) / kStep * kStep;
    at.layers = (sizeof(Smem<kDim>) + 15) / 16 * 16;
    at.activations =
        (at.layers + p.num_layers * static_cast<int>(sizeof(DecoderStepLayer)) + 127) / 128 * 128;
    at.ring = at.activations + (depth < kDepth ? depth : kDepth) * 2 * kR;
    return at;
  }
  __host__ __device__ static int widest(int a, int b, int c) {
    const int ab = a > b ? a : b;
    return ab > c ? ab : c;
  }
};

}  // namespace nanovllm::kernels::step
