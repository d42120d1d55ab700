#include "kernels/slot_mapping.h"

#include <algorithm>

#include "common/check.h"

namespace nanovllm::cpu {
namespace {

/// Everything that the loop trusts, before its first write.
void check_values(const SlotMappingParams& p) {
  constexpr auto kOp = "slot_mapping";
  ops::check(p.cu_seqlens_q[0] == 0, kOp, "cu_seqlens_q", "expected 0 first, got ", p.cu_seqlens_q[0]);
  for (int64_t b = 0; b < p.num_seqs; ++b) {
    const int64_t begin = p.cu_seqlens_q[b], end = p.cu_seqlens_q[b + 1];
    ops::check(begin <= end && end <= p.num_tokens, kOp, "cu_seqlens_q",
               "expected non-decreasing offsets of at most num_tokens = ", p.num_tokens, ", got ", begin,
               " then ", end, " for sequence ", b);
    ops::check(p.start_pos[b] >= -1, kOp, "start_pos", "expected at least -1, got ", p.start_pos[b],
               " for sequence ", b);
    if (begin == end || p.start_pos[b] < 0) continue;
    const int64_t last = p.start_pos[b] + (end - begin) - 1;
    ops::check((last >> p.block_shift) < p.table_width, kOp, "block_tables", "expected at least ",
               (last >> p.block_shift) + 1, " entries for position ", last, " of sequence ", b,
               " in blocks of ", int64_t{1} << p.block_shift, ", got ", p.table_width);
  }
}

}  // namespace

// A few nanoseconds a token: never worth a second thread.
void slot_mapping(const SlotMappingParams& p) {
  check_values(p);
  for (int64_t b = 0; b < p.num_seqs; ++b) {
    const int32_t* table = p.block_tables + b * p.table_stride_row;
    int64_t pos = p.start_pos[b];
    if (pos < 0) {  // a padding row
      std::fill(p.positions + p.cu_seqlens_q[b], p.positions + p.cu_seqlens_q[b + 1], 0);
      std::fill(p.slots + p.cu_seqlens_q[b], p.slots + p.cu_seqlens_q[b + 1], -1);
      continue;
    }
    for (int64_t t = p.cu_seqlens_q[b]; t < p.cu_seqlens_q[b + 1]; ++t, ++pos) {
      const int64_t block = pos >> p.block_shift, first = block << p.block_shift;
      p.positions[t] = pos;
      p.slots[t] = table[block] < 0 ? -1 : (int64_t{table[block]} << p.block_shift) + pos - first;
    }
  }
  const int64_t padding = p.cu_seqlens_q[p.num_seqs];
  std::fill(p.positions + padding, p.positions + p.num_tokens, 0);
  std::fill(p.slots + padding, p.slots + p.num_tokens, -1);
}

}  // namespace nanovllm::cpu
