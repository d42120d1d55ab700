// Flash attention: an item is a block of query tokens of one sequence and one KV head; the rows of the block
// are its tokens times the query heads of the group. Tiles of 64 keys and values are packed to fp32, keys
// transposed, so that scores = q . k^T and out += probs . v are small matrix products, with an online softmax
// between them. Tiles start at multiples of 64 of the context: a row sees the same tiles however its prompt
// was chunked. An e4m3 cache is widened as it is packed; its scales go into the queries and the output.
#include "kernels/paged_attention_prefill.h"

#include <cmath>
#include <vector>

#include "cpu/gemm.h"
#include "cpu/paged.h"
#include "cpu/softmax.h"

namespace nanovllm::cpu {
namespace {

constexpr int64_t kTile = 64;        // keys
constexpr int64_t kBlockRows = 192;  // aimed at: query tokens times group

using Params = PagedAttentionPrefillParams;

int64_t group_size(const Params& p) { return p.num_q_heads / p.num_kv_heads; }
int64_t block_tokens(const Params& p) {
  return std::clamp<int64_t>(p.max_seqlen_q, 1, std::max<int64_t>(1, kBlockRows / group_size(p)));
}
int64_t padded(int64_t head_dim) { return (head_dim + kVec - 1) / kVec * kVec; }

/// Of one thread.
struct Scratch {
  explicit Scratch(const Params& p)
      : Scratch(block_tokens(p) * group_size(p), p.head_dim, padded(p.head_dim)) {}
  Scratch(int64_t rows, int64_t dim, int64_t wide)
      : q(rows * dim),
        out(rows * wide),
        scores(rows * kTile),
        top(rows),
        total(rows),
        k(wide * kTile),
        v(kTile * wide) {}
  std::vector<float> q;           // [rows][head_dim], scaled
  std::vector<float> out;         // [rows][padded head_dim], times total
  std::vector<float> scores;      // [rows][kTile], then weights
  std::vector<float> top, total;  // [rows] greatest score so far, sum of weights
  std::vector<float> k;           // [padded head_dim][kTile]
  std::vector<float> v;           // [kTile][padded head_dim]
  const void* rows[kTile];        // of keys, then of values
};

/// One block of queries: tokens first_row... of `out` and `q`, the first of them at `position` of its
/// context.
struct Block {
  int64_t seq, kv_head, first_row, tokens, position;
};

template <class T>
NV_INLINE void find(const T** rows, const Params& p, const Block& b, const void* data, int64_t stride_block,
                    int64_t stride_slot, int64_t stride_head, int64_t begin, int64_t count) {
  const T* head = static_cast<const T*>(data) + b.kv_head * stride_head;
  if (p.block_tables != nullptr) {
    find_rows(rows, head, stride_block, stride_slot, p.block_tables + b.seq * p.table_stride_row,
              p.block_size, begin, count);
  } else {
    head += (b.first_row - b.position + begin) * stride_slot;  // packed: queries and keys start together
    for (int64_t t = 0; t < count; ++t) rows[t] = head + t * stride_slot;
  }
}

/// dim is a multiple of 8.
template <class V, class T>
NV_INLINE V load_dims(const T* row, int64_t d, int64_t dim) {
  if constexpr (kIsWide<V>)
    return d + kVec <= dim ? load_vec(row + d) : load_part(row + d, kVec / 2);
  else
    return load_vec<V>(row + d);
}

template <class V, class T>
NV_INLINE void pack_keys(float* k, const T* const* rows, int64_t count, int64_t dim) {
  constexpr int kWidth = kLanes<V>;
  for (int64_t d = 0; d < dim; d += kWidth)
    for (int64_t t = 0; t < kTile; t += kWidth) {
      V v[kWidth];
      for (int i = 0; i < kWidth; ++i) v[i] = t + i < count ? load_dims<V>(rows[t + i], d, dim) : V{};
      transpose(v);
      for (int i = 0; i < kWidth; ++i) store_vec(k + (d + i) * kTile + t, v[i]);
    }
}

template <class V, class T>
NV_INLINE void pack_values(float* v, const T* const* rows, int64_t count, int64_t dim) {
  const int64_t wide = padded(dim);
  for (int64_t t = 0; t < count; ++t)
    for (int64_t d = 0; d < dim; d += kLanes<V>) store_vec(v + t * wide + d, load_dims<V>(rows[t], d, dim));
}

/// One row of the online softmax: scores become weights 2^(score - top), zero past the `visible` ones.
template <class V>
NV_INLINE void soften_row(float* scores, int64_t visible, float* out, int64_t wide, float& top,
                          float& total) {
  std::fill(scores + std::min(visible, kTile), scores + kTile, kNoScore);
  const float new_top = greatest<V>(scores, kTile, top);
  if (new_top != top) {
    const float shrink = std::exp2(top - new_top);
    for (int64_t d = 0; d < wide; d += kLanes<V>) store_vec(out + d, load_vec<V>(out + d) * shrink);
    total *= shrink;
    top = new_top;
  }
  total += soften<V>(scores, kTile, top);
}

/// In vectors V; T is the type of queries and output, Kv that of keys and values.
template <class V, class T, class Kv>
NV_INLINE void attend(const Params& p, const Block& b, Scratch& s) {
  const int64_t group = group_size(p), dim = p.head_dim, wide = padded(dim), num_rows = b.tokens * group;
  const float scale = p.scale * kLog2E * value_or_one(p.k_scale), v_scale = value_or_one(p.v_scale);
  for (int64_t r = 0; r < num_rows; ++r) {
    const T* q = static_cast<const T*>(p.q) + (b.first_row + r / group) * p.q_stride_row +
                 (b.kv_head * group + r % group) * p.q_stride_head;
    for (int64_t d = 0; d < dim; ++d) s.q[r * dim + d] = scale * to_float(q[d]);
  }
  std::fill_n(s.out.begin(), num_rows * wide, 0.0f);
  std::fill_n(s.total.begin(), num_rows, 0.0f);
  std::fill_n(s.top.begin(), num_rows, kNoScore);
  const Kv** rows = reinterpret_cast<const Kv**>(s.rows);
  const int64_t end = b.position + b.tokens;  // keys that the last query sees
  for (int64_t begin = 0; begin < end; begin += kTile) {
    const int64_t count = std::min(kTile, end - begin);
    const int64_t first = std::max<int64_t>(0, begin - b.position) * group;  // row that sees this tile
    find(rows, p, b, p.k, p.k_stride_block, p.k_stride_slot, p.k_stride_head, begin, count);
    pack_keys<V>(s.k.data(), rows, count, dim);
    gemm<V, false>(&s.scores[first * kTile], kTile, &s.q[first * dim], dim, s.k.data(), kTile,
                   num_rows - first, kTile, dim);
    for (int64_t r = first; r < num_rows; ++r)
      soften_row<V>(&s.scores[r * kTile], b.position + r / group + 1 - begin, &s.out[r * wide], wide,
                    s.top[r], s.total[r]);
    find(rows, p, b, p.v, p.v_stride_block, p.v_stride_slot, p.v_stride_head, begin, count);
    pack_values<V>(s.v.data(), rows, count, dim);
    gemm<V, true>(&s.out[first * wide], wide, &s.scores[first * kTile], kTile, s.v.data(), wide,
                  num_rows - first, wide, count);
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    T* out = static_cast<T*>(p.out) + (b.first_row + r / group) * p.out_stride_row +
             (b.kv_head * group + r % group) * p.out_stride_head;
    for (int64_t d = 0; d < dim; ++d) store(out + d, s.out[r * wide + d] / s.total[r] * v_scale);
  }
}
template <class T, class Kv>
NV_INLINE void attend(const Params& p, const Block& b, Scratch& s) {
  has_wide_registers() ? attend<Vec, T, Kv>(p, b, s) : attend<HalfVec, T, Kv>(p, b, s);
}
NV_MULTIVERSION void attend_f32(const Params& p, const Block& b, Scratch& s) {
  attend<float, float>(p, b, s);
}
NV_MULTIVERSION void attend_bf16(const Params& p, const Block& b, Scratch& s) {
  attend<BFloat16, BFloat16>(p, b, s);
}
NV_MULTIVERSION void attend_f32_e4m3(const Params& p, const Block& b, Scratch& s) {
  attend<float, Float8E4M3>(p, b, s);
}
NV_MULTIVERSION void attend_bf16_e4m3(const Params& p, const Block& b, Scratch& s) {
  attend<BFloat16, Float8E4M3>(p, b, s);
}

/// The lengths fit each other, and the sizes of the tensors.
void check_lengths(const Params& p) {
  constexpr auto kOp = "paged_attention_prefill";
  ops::check(p.cu_seqlens_q[0] >= 0, kOp, "cu_seqlens_q", "expected 0 or more at [0], got ",
             p.cu_seqlens_q[0]);
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t q_len = static_cast<int64_t>(p.cu_seqlens_q[b + 1]) - p.cu_seqlens_q[b];
    ops::check(q_len >= 0 && p.cu_seqlens_q[b + 1] <= p.num_tokens, kOp, "cu_seqlens_q", "expected ",
               p.cu_seqlens_q[b], " to ", p.num_tokens, " (num_tokens) at [", b + 1, "], got ",
               p.cu_seqlens_q[b + 1]);
    ops::check(q_len <= p.max_seqlen_q, kOp, "max_seqlen_q", "expected at least ", q_len,
               " (queries of sequence ", b, "), got ", p.max_seqlen_q);
    if (p.block_tables != nullptr)
      ops::check(p.context_lens[b] >= q_len, kOp, "context_lens", "expected at least ", q_len,
                 " (queries of the sequence) at [", b, "], got ", p.context_lens[b]);
    else
      ops::check(p.context_lens[b] == q_len, kOp, "context_lens", "expected ", q_len,
                 " (queries of the sequence, as k and v are packed) at [", b, "], got ", p.context_lens[b]);
  }
  if (p.block_tables != nullptr)
    check_block_tables(kOp, p.block_tables, p.table_stride_row, p.context_lens, p.batch, p.max_blocks,
                       p.num_blocks, p.block_size);
}

}  // namespace

void paged_attention_prefill(const Params& p) {
  check_lengths(p);
  const int64_t step = block_tokens(p);
  std::vector<Block> blocks;
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t begin = p.cu_seqlens_q[b], q_len = p.cu_seqlens_q[b + 1] - begin;
    for (int64_t i = 0; i < q_len; i += step)
      for (int64_t h = 0; h < p.num_kv_heads; ++h)
        blocks.push_back({b, h, begin + i, std::min(step, q_len - i), p.context_lens[b] - q_len + i});
  }
  // The longest work first, so that the threads end together.
  std::stable_sort(blocks.begin(), blocks.end(), [](const Block& x, const Block& y) {
    return (x.position + x.tokens) * x.tokens > (y.position + y.tokens) * y.tokens;
  });
  const bool e4m3 = p.kv_dtype == DType::kFloat8E4M3;
  const auto attend = p.dtype == DType::kFloat32 ? (e4m3 ? attend_f32_e4m3 : attend_f32)
                                                 : (e4m3 ? attend_bf16_e4m3 : attend_bf16);
  parallel_items(std::ssize(blocks), [&](std::atomic<int64_t>& next) {
    Scratch scratch(p);
    for (int64_t i; (i = next++) < std::ssize(blocks);) attend(p, blocks[i], scratch);
  });
}

}  // namespace nanovllm::cpu
