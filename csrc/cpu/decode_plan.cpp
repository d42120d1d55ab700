// plan[b] is the first work item of sequence b, plan[batch] their number. A sequence is one item, or, when it
// alone is a large share of the batch's work, one item for each of its tiles.
#include "kernels/decode_plan.h"

#include "cpu/paged.h"

namespace nanovllm::cpu {

void decode_plan(const DecodePlanParams& p) {
  int64_t total = 0;
  for (int64_t b = 0; b < p.batch; ++b) total += decode_tiles(p.context_lens[b]);
  const int64_t threads = torch::stable::get_num_threads();
  // Items of at most a quarter of a thread's share keep the threads equally busy.
  const int64_t most = total * p.num_kv_heads / (4 * threads);
  int64_t items = 0, splits = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t tiles = decode_tiles(p.context_lens[b]);
    const bool split = tiles > most && splits < kMaxSplitSeqs;
    p.plan[b] = static_cast<int32_t>(items);
    items += split ? tiles : 1;
    splits += split;
  }
  p.plan[p.batch] = static_cast<int32_t>(items);
}

}  // namespace nanovllm::cpu
