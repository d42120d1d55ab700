// Flash decoding: an item is one KV head of one sequence, or of one 256-token tile of it (decode_plan). A
// tile's keys meet all query heads of the group while they are in L1, then its values do. A tile gives, for
// each query head, the maximum score m, the sum l of exp(score - m), and the values weighted with exp(score -
// m); tiles are merged in order, with the same arithmetic wherever they were computed. An e4m3 cache is
// widened as it is read; its scales go into the queries and the output.
#include "kernels/paged_attention_decode.h"

#include <cmath>
#include <vector>

#include "cpu/paged.h"
#include "cpu/softmax.h"

namespace nanovllm::cpu {
namespace {

constexpr int64_t kStats = 2;  // m and l, before the head_dim weighted values of a query head
/// In vectors V, up to kHeads query heads meet kColumns keys at a time, then kColumns vectors of head_dim: 16
/// sums in registers with AVX-512, 8 elsewhere. head_dim is a multiple of 8, so only a Vec needs half loads.
template <class V>
constexpr int kHeads = kIsWide<V> ? 4 : 2;
template <class V, int kRows>
constexpr int kColumns = kIsWide<V> ? 4 : 8 / kRows;

/// Of one thread.
struct Scratch {
  Scratch(int64_t group, int64_t dim)
      : q(group * dim), scores(group * kDecodeTile), tile(group * (kStats + dim)), total(tile.size()) {}
  std::vector<float> q;            // [group][dim], scaled
  std::vector<float> scores;       // [group][kDecodeTile]
  std::vector<float> tile, total;  // [group][kStats + dim]
  const void* rows[kDecodeTile];   // of keys, then of values
};

/// scores[r][t] = q[r] . k[t] of kRows query heads.
template <class V, int kRows, class T>
NV_INLINE void score_heads(float* scores, const float* q, const T* const* k, int64_t count, int64_t dim) {
  constexpr int kTokens = kColumns<V, kRows>;
  for (int64_t t = 0; t < count; t += kTokens) {
    const T* row[kTokens];
    for (int j = 0; j < kTokens; ++j) row[j] = k[std::min(t + j, count - 1)];
    V acc[kRows == 3 ? 16 : kRows * kTokens] = {};
    const auto step = [&](int64_t d, auto const& load) {
      V kv[kTokens];
      for (int j = 0; j < kTokens; ++j) kv[j] = load(row[j] + d);
      for (int r = 0; r < kRows; ++r) {
        const V qv = load(q + r * dim + d);
        for (int j = 0; j < kTokens; ++j) acc[r * kTokens + j] += qv * kv[j];
      }
    };
    int64_t d = 0;
    for (; d + kLanes<V> <= dim; d += kLanes<V>) step(d, [](auto* p) { return load_vec<V>(p); });
    if constexpr (kIsWide<V>) {
      if (d < dim) step(d, [](auto* p) { return load_part(p, kVec / 2); });
      const Vec total = sums(acc);
      for (int r = 0; r < kRows; ++r)
        for (int j = 0; j < kTokens; ++j) scores[r * kDecodeTile + t + j] = total[r * kTokens + j];
    } else {
      for (int i = 0; i < kRows * kTokens; i += 4) {
        const HalfVec total = sums({acc[i], acc[i + 1], acc[i + 2], acc[i + 3]});
        std::memcpy(&scores[i / kTokens * kDecodeTile + t + i % kTokens], &total, 4 * sizeof(float));
      }
    }
  }
}

/// values[r] = sum_t scores[r][t] * v[t], kCols vectors from column d of kRows query heads.
template <class V, int kRows, int kCols, bool kHalf, class T>
NV_INLINE void weigh_columns(float* values, int64_t stride, const float* scores, const T* const* v,
                             int64_t count, int64_t d) {
  constexpr int kWidth = kLanes<V>;
  V acc[kRows][kCols] = {};
  for (int64_t t = 0; t < count; ++t) {
    V vv[kCols];
    for (int c = 0; c < kCols; ++c)
      if constexpr (kHalf)
        vv[c] = load_part(v[t] + d, kWidth / 2);
      else
        vv[c] = load_vec<V>(v[t] + d + c * kWidth);
    for (int r = 0; r < kRows; ++r)
      for (int c = 0; c < kCols; ++c) acc[r][c] += scores[r * kDecodeTile + t] * vv[c];
  }
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kCols; ++c) {
      float* out = values + r * stride + d + c * kWidth;
      if constexpr (kHalf)
        store_part(out, acc[r][c], kWidth / 2);
      else
        store_vec(out, acc[r][c]);
    }
}

template <class V, int kRows, class T>
NV_INLINE void weigh_heads(float* values, int64_t stride, const float* scores, const T* const* v,
                           int64_t count, int64_t dim) {
  constexpr int kWidth = kLanes<V>, kCols = kColumns<V, kRows>;
  int64_t d = 0;
  for (; d + kCols * kWidth <= dim; d += kCols * kWidth)
    weigh_columns<V, kRows, kCols, false>(values, stride, scores, v, count, d);
  for (; d + kWidth <= dim; d += kWidth)
    weigh_columns<V, kRows, 1, false>(values, stride, scores, v, count, d);
  if constexpr (kIsWide<V>)
    if (d < dim) weigh_columns<V, kRows, 1, true>(values, stride, scores, v, count, d);
}

/// Calls f(rows as a constant, first row) over `rows` rows, kMax at a time.
template <int kMax, class F>
NV_INLINE void for_heads(int64_t rows, F const& f) {
  int64_t r = 0;
  for (; r + kMax <= rows; r += kMax) f(std::integral_constant<int, kMax>{}, r);
  if constexpr (kMax == 4) {
    if (rows - r == 3) f(std::integral_constant<int, 3>{}, r);
    if (rows - r == 2) f(std::integral_constant<int, 2>{}, r);
  }
  if (rows - r == 1) f(std::integral_constant<int, 1>{}, r);
}

/// Turns scores into weights, in place; gives m and l.
template <class V>
NV_INLINE void soften_row(float* scores, int64_t count, float* stats) {
  const int64_t padded = (count + kVec - 1) / kVec * kVec;
  std::fill(scores + count, scores + padded, kNoScore);
  stats[0] = greatest<V>(scores, padded, kNoScore);
  stats[1] = soften<V>(scores, padded, stats[0]);
}

/// One tile of sequence b and KV head h, of which s.q holds the scaled queries: [group][kStats + head_dim]. T
/// is the type of the cache, V that of vectors.
template <class V, class T>
NV_INLINE void attend(const PagedAttentionDecodeParams& p, int64_t b, int64_t h, int64_t tile, Scratch& s,
                      float* out) {
  const int64_t group = p.num_q_heads / p.num_kv_heads, dim = p.head_dim, stride = kStats + dim;
  const int64_t begin = tile * kDecodeTile;
  const int64_t count = std::min<int64_t>(kDecodeTile, p.context_lens[b] - begin);
  const int32_t* table = p.block_tables + b * p.table_stride_row;
  const T** rows = reinterpret_cast<const T**>(s.rows);
  find_rows(rows, static_cast<const T*>(p.k_cache) + h * p.k_stride_head, p.k_stride_block, p.k_stride_slot,
            table, p.block_size, begin, count);
  for_heads<kHeads<V>>(group, [&](auto n, int64_t r) {
    score_heads<V, n>(&s.scores[r * kDecodeTile], &s.q[r * dim], rows, count, dim);
  });
  for (int64_t r = 0; r < group; ++r) soften_row<V>(&s.scores[r * kDecodeTile], count, out + r * stride);
  find_rows(rows, static_cast<const T*>(p.v_cache) + h * p.v_stride_head, p.v_stride_block, p.v_stride_slot,
            table, p.block_size, begin, count);
  for_heads<kHeads<V>>(group, [&](auto n, int64_t r) {
    weigh_heads<V, n>(out + r * stride + kStats, stride, &s.scores[r * kDecodeTile], rows, count, dim);
  });
}

template <class T>
NV_INLINE void attend(const PagedAttentionDecodeParams& p, int64_t b, int64_t h, int64_t tile, Scratch& s,
                      float* out) {
  has_wide_registers() ? attend<Vec, T>(p, b, h, tile, s, out) : attend<HalfVec, T>(p, b, h, tile, s, out);
}

// These four are never inlined: one machine code for all callers, so that split and unsplit contexts round
// alike.
NV_MULTIVERSION void attend_f32(const PagedAttentionDecodeParams& p, int64_t b, int64_t h, int64_t tile,
                                Scratch& s, float* out) {
  attend<float>(p, b, h, tile, s, out);
}
NV_MULTIVERSION void attend_bf16(const PagedAttentionDecodeParams& p, int64_t b, int64_t h, int64_t tile,
                                 Scratch& s, float* out) {
  attend<BFloat16>(p, b, h, tile, s, out);
}
NV_MULTIVERSION void attend_e4m3(const PagedAttentionDecodeParams& p, int64_t b, int64_t h, int64_t tile,
                                 Scratch& s, float* out) {
  attend<Float8E4M3>(p, b, h, tile, s, out);
}
/// total <- total merged with the tile that follows it.
__attribute__((noinline)) void merge(float* total, const float* tile, int64_t rows, int64_t dim) {
  for (int64_t r = 0; r < rows; ++r, total += kStats + dim, tile += kStats + dim) {
    const float m = std::max(total[0], tile[0]);
    const float a = std::exp2(total[0] - m), c = std::exp2(tile[0] - m);
    total[0] = m;
    for (int64_t i = 1; i < kStats + dim; ++i) total[i] = total[i] * a + tile[i] * c;
  }
}

/// The group's output from its merged tiles; zero where there are none.
template <class T>
void write_out(const PagedAttentionDecodeParams& p, int64_t b, int64_t h, const float* total) {
  const int64_t group = p.num_q_heads / p.num_kv_heads;
  const float v_scale = value_or_one(p.v_scale);
  for (int64_t r = 0; r < group; ++r) {
    T* out = static_cast<T*>(p.out) + b * p.out_stride_row + (h * group + r) * p.out_stride_head;
    const float* row = total ? total + r * (kStats + p.head_dim) : nullptr;
    for (int64_t d = 0; d < p.head_dim; ++d) store(out + d, row ? row[kStats + d] / row[1] * v_scale : 0.0f);
  }
}

/// A sequence's workspace begins at tile slot first_slot[b], [tile][num_kv_heads][group][kStats + head_dim].
float* tile_slot(const PagedAttentionDecodeParams& p, int64_t slot, int64_t h) {
  return p.workspace + (slot * p.num_q_heads + h * (p.num_q_heads / p.num_kv_heads)) * (kStats + p.head_dim);
}

template <class T>
void run_items(const PagedAttentionDecodeParams& p, const int64_t* first_slot, std::atomic<int64_t>& next) {
  const auto attend_tile = p.cache_dtype == DType::kFloat8E4M3 ? attend_e4m3
                           : p.cache_dtype == DType::kFloat32  ? attend_f32
                                                               : attend_bf16;
  const float scale = p.scale * kLog2E * value_or_one(p.k_scale);
  const int64_t group = p.num_q_heads / p.num_kv_heads, dim = p.head_dim;
  Scratch s(group, dim);
  for (int64_t i; (i = next++) < p.plan[p.batch] * p.num_kv_heads;) {
    const int64_t item = i / p.num_kv_heads, h = i % p.num_kv_heads;
    const int64_t b = std::upper_bound(p.plan, p.plan + p.batch + 1, item) - p.plan - 1;
    const int64_t tiles = decode_tiles(p.context_lens[b]);
    for (int64_t r = 0; r < group; ++r) {
      const T* q = static_cast<const T*>(p.q) + b * p.q_stride_row + (h * group + r) * p.q_stride_head;
      for (int64_t d = 0; d < dim; ++d) s.q[r * dim + d] = scale * to_float(q[d]);
    }
    if (p.plan[b + 1] - p.plan[b] > 1) {
      const int64_t tile = item - p.plan[b];
      attend_tile(p, b, h, tile, s, tile_slot(p, first_slot[b] + tile, h));
    } else if (p.context_lens[b] == 0) {
      write_out<T>(p, b, h, nullptr);
    } else {
      attend_tile(p, b, h, 0, s, s.total.data());
      for (int64_t tile = 1; tile < tiles; ++tile) {
        attend_tile(p, b, h, tile, s, s.tile.data());
        merge(s.total.data(), s.tile.data(), group, dim);
      }
      write_out<T>(p, b, h, s.total.data());
    }
  }
}

template <class T>
void merge_tiles(const PagedAttentionDecodeParams& p, const int64_t* first_slot, int64_t b, int64_t h) {
  float* total = tile_slot(p, first_slot[b], h);
  for (int64_t tile = 1; tile < p.plan[b + 1] - p.plan[b]; ++tile)
    merge(total, tile_slot(p, first_slot[b] + tile, h), p.num_q_heads / p.num_kv_heads, p.head_dim);
  write_out<T>(p, b, h, total);
}

/// Workspace slots of the split sequences; the plan fits the contexts and the workspace fits the plan.
std::vector<int64_t> assign_slots(const PagedAttentionDecodeParams& p) {
  constexpr auto kOp = "paged_attention_decode";
  ops::check(p.plan_numel > p.batch, kOp, "plan", "expected at least ", p.batch + 1,
             " elements for a batch of ", p.batch, ", got ", p.plan_numel);
  std::vector<int64_t> first_slot(p.batch);
  int64_t slots = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t items = p.plan[b + 1] - p.plan[b], tiles = decode_tiles(p.context_lens[b]);
    ops::check(p.plan[0] == 0 && (items == 1 || items == tiles), kOp, "plan",
               "expected the plan that decode_plan made of these context_lens, got ", items,
               " work items for a context of ", p.context_lens[b], " at [", b, "]");
    first_slot[b] = slots;
    slots += items > 1 ? items : 0;
  }
  const int64_t needed = slots * p.num_q_heads * (kStats + p.head_dim);
  ops::check(p.workspace_numel >= needed, kOp, "workspace", "expected at least ", needed, " elements, got ",
             p.workspace_numel);
  return first_slot;
}

}  // namespace

void paged_attention_decode(const PagedAttentionDecodeParams& p) {
  check_block_tables("paged_attention_decode", p.block_tables, p.table_stride_row, p.context_lens, p.batch,
                     p.max_blocks, p.num_blocks, p.block_size);
  const std::vector<int64_t> first_slot = assign_slots(p);
  dispatch(p.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    parallel_items(p.plan[p.batch] * p.num_kv_heads,
                   [&](std::atomic<int64_t>& next) { run_items<T>(p, first_slot.data(), next); });
    if (p.plan[p.batch] == p.batch) return;  // nothing was split
    torch::stable::parallel_for(0, p.batch * p.num_kv_heads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t b = i / p.num_kv_heads, h = i % p.num_kv_heads;
        if (p.plan[b + 1] - p.plan[b] > 1) merge_tiles<T>(p, first_slot.data(), b, h);
      }
    });
  });
}

}  // namespace nanovllm::cpu
