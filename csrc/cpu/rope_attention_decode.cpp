// qk_norm_rope_store on a copy of the projections, then paged_attention_decode.
#include "kernels/rope_attention_decode.h"

#include <bit>
#include <cstring>
#include <vector>

#include "cpu/paged.h"
#include "kernels/qk_norm_rope_store.h"

namespace nanovllm::cpu {

void rope_attention_decode(const RopeAttentionDecodeParams& p) {
  constexpr auto kOp = "rope_attention_decode";
  PagedAttentionDecodeParams a = p.attention;
  check_block_tables(kOp, a.block_tables, a.table_stride_row, a.context_lens, a.batch, a.max_blocks,
                     a.num_blocks, a.block_size);
  std::vector<int64_t> positions(a.batch), slots(a.batch);
  for (int64_t b = 0; b < a.batch; ++b) {
    const int64_t len = a.context_lens[b], position = len == 0 ? 0 : len - 1;
    ops::check(len <= p.max_pos, kOp, "context_lens", "expected at most ", p.max_pos,
               " (rows of cos_sin), got ", len, " at [", b, "]");
    const int64_t block = len == 0 ? -1 : a.block_tables[b * a.table_stride_row + position / a.block_size];
    positions[b] = position;
    slots[b] = len == 0 ? -1 : block * a.block_size + position % a.block_size;
  }
  const int64_t element = a.dtype == DType::kFloat32 ? 4 : 2;
  const int64_t width = (a.num_q_heads + 2 * a.num_kv_heads) * a.head_dim;
  std::vector<char> qkv(a.batch * width * element);
  for (int64_t b = 0; b < a.batch; ++b)
    std::memcpy(&qkv[b * width * element], static_cast<const char*>(a.q) + b * a.q_stride_row * element,
                width * element);
  qk_norm_rope_store({.qkv = qkv.data(),
                      .q_weight = p.q_weight,
                      .k_weight = p.k_weight,
                      .num_tokens = a.batch,
                      .qkv_stride_row = width,
                      .num_q_heads = static_cast<int32_t>(a.num_q_heads),
                      .eps = p.eps,
                      .dtype = a.dtype,
                      .rotary = {.cos_sin = p.cos_sin,
                                 .positions = positions.data(),
                                 .max_pos = p.max_pos,
                                 .dim = static_cast<int32_t>(p.rotary_dim)},
                      .cache = {.k = a.k_cache,
                                .v = a.v_cache,
                                .slots = slots.data(),
                                .k_scale = a.k_scale,
                                .v_scale = a.v_scale,
                                .num_blocks = a.num_blocks,
                                .head_dim = a.head_dim,
                                .k_stride_block = a.k_stride_block,
                                .k_stride_slot = a.k_stride_slot,
                                .k_stride_head = a.k_stride_head,
                                .v_stride_block = a.v_stride_block,
                                .v_stride_slot = a.v_stride_slot,
                                .v_stride_head = a.v_stride_head,
                                .num_kv_heads = static_cast<int32_t>(a.num_kv_heads),
                                .block_shift = std::countr_zero(static_cast<uint64_t>(a.block_size)),
                                .dtype = a.cache_dtype}});
  a.q = qkv.data();
  a.q_stride_row = width;
  paged_attention_decode(a);
}

}  // namespace nanovllm::cpu
