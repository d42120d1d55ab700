// CUDA only: a fused step has no advantage on a CPU, and no CPU module knows it.
#ifdef NV_CUDA
#include "kernels/decoder_step.h"

#include <bit>
#include <string_view>

#include "common/run.h"
#include "ops/attention_checks.h"

namespace nanovllm::ops {
namespace {

void check_weight(const char* op, const char* arg, const Tensor& t, std::initializer_list<Extent> extents) {
  check_shape(op, arg, t, extents);
  check_dtype(op, arg, t, ScalarType::BFloat16);
  check_contiguous(op, arg, t);
  check_aligned(op, arg, t);
}

void check_range(const char* op, const char* arg, int64_t value, int64_t most, int64_t factor) {
  check(value > 0 && value <= most && value % factor == 0, op, arg, "expected a multiple of ", factor,
        " up to ", most, ", got ", value);
}

}  // namespace

void decoder_step(Tensor logits, Tensor workspace, Tensor kv_cache, Tensor token_ids, Tensor block_tables,
                  Tensor context_lens, Tensor layers, Tensor embedding, Tensor norm, Tensor lm_head,
                  Tensor cos_sin, int64_t num_q_heads, int64_t intermediate_size, double eps) {
  constexpr auto kOp = "decoder_step";
  Dim rows{"rows"}, vocab{"vocab_size"}, hidden{"hidden_size"}, num_layers{"num_layers"},
      blocks{"num_blocks"}, block_size{"block_size"}, kv_heads{"num_kv_heads"}, head_dim{"head_dim"},
      max_blocks{"max_blocks"}, max_pos{"max_pos"}, rotary_dim{"rotary_dim"}, numel{"workspace_numel"};
  check_shape(kOp, "token_ids", token_ids, {rows});
  check_shape(kOp, "context_lens", context_lens, {rows});
  check_shape(kOp, "block_tables", block_tables, {rows, max_blocks});
  check_weight(kOp, "embedding", embedding, {vocab, hidden});
  check_weight(kOp, "norm", norm, {hidden});
  check_weight(kOp, "lm_head", lm_head, {vocab, hidden});
  check_shape(kOp, "logits", logits, {rows, vocab});
  check_dtype(kOp, "logits", logits, ScalarType::BFloat16);
  check_contiguous(kOp, "logits", logits);
  check_shape(kOp, "layers", layers, {num_layers, kDecoderStepPointers});
  check_dtype(kOp, "layers", layers, ScalarType::Long);
  check_contiguous(kOp, "layers", layers);
  check_shape(kOp, "kv_cache", kv_cache, {2, num_layers, blocks, block_size, kv_heads, head_dim});
  check_dtype(kOp, "kv_cache", kv_cache, ScalarType::BFloat16);
  check_last_contiguous(kOp, "kv_cache", kv_cache);
  check_aligned(kOp, "kv_cache", kv_cache);
  check_shape(kOp, "cos_sin", cos_sin, {max_pos, rotary_dim});
  check_dtype(kOp, "cos_sin", cos_sin, ScalarType::Float);
  check_contiguous(kOp, "cos_sin", cos_sin);
  check_dtype(kOp, "token_ids", token_ids, ScalarType::Long);
  check_contiguous(kOp, "token_ids", token_ids);
  check_dtype(kOp, "context_lens", context_lens, ScalarType::Int);
  check_contiguous(kOp, "context_lens", context_lens);
  check_dtype(kOp, "block_tables", block_tables, ScalarType::Int);
  check_last_contiguous(kOp, "block_tables", block_tables);
  check_shape(kOp, "workspace", workspace, {numel});
  check_dtype(kOp, "workspace", workspace, ScalarType::Int);
  check_contiguous(kOp, "workspace", workspace);

  check(rows.value <= kDecoderStepMaxRows, kOp, "token_ids", "expected at most ", kDecoderStepMaxRows,
        " rows, got ", rows.value);
  check(head_dim.value == 64 || head_dim.value == 128, kOp, "kv_cache", "expected head_dim 64 or 128, got ",
        head_dim.value);
  check_range(kOp, "hidden_size", hidden.value, kDecoderStepMaxHidden, 8);
  check_range(kOp, "intermediate_size", intermediate_size, INT32_MAX / 2, 8);
  check(kv_heads.value > 0 && num_q_heads > 0 && num_q_heads % kv_heads.value == 0 &&
            num_q_heads / kv_heads.value <= kDecoderStepMaxGroup,
        kOp, "num_q_heads", "expected 1 to ", kDecoderStepMaxGroup, " times num_kv_heads = ", kv_heads.value,
        ", got ", num_q_heads);
  check(num_layers.value >= 2 && num_layers.value <= kDecoderStepMaxLayers, kOp, "layers", "expected 2 to ",
        kDecoderStepMaxLayers, " layers, got ", num_layers.value);
  check(max_pos.value > 0 && rotary_dim.value > 0 && rotary_dim.value % 2 == 0 &&
            rotary_dim.value <= head_dim.value,
        kOp, "cos_sin", "expected at least a row, of an even rotary_dim up to head_dim = ", head_dim.value,
        ", got ", shape(cos_sin));
  check_cuda_block_size(kOp, "kv_cache", block_size.value);
  check(kernels::decoder_step_runs_on(logits.get_device_index()), kOp, "logits",
        "expected a device of compute capability 9.0, got another");
  if (rows.value == 0) return;
  const DecoderStepParams p{
      .logits = logits.data_ptr(),
      .workspace = static_cast<uint32_t*>(workspace.data_ptr()),
      .kv_cache = kv_cache.data_ptr(),
      .token_ids = static_cast<const int64_t*>(token_ids.data_ptr()),
      .block_tables = static_cast<const int32_t*>(block_tables.data_ptr()),
      .context_lens = static_cast<const int32_t*>(context_lens.data_ptr()),
      .layers = static_cast<const DecoderStepLayer*>(layers.data_ptr()),
      .embedding = embedding.data_ptr(),
      .norm = norm.data_ptr(),
      .lm_head = lm_head.data_ptr(),
      .cos_sin = static_cast<const float*>(cos_sin.data_ptr()),
      .kv_stride = kv_cache.stride(0),
      .stride_layer = kv_cache.stride(1),
      .stride_block = kv_cache.stride(2),
      .stride_slot = kv_cache.stride(3),
      .stride_head = kv_cache.stride(4),
      .table_stride_row = block_tables.stride(0),
      .max_blocks = max_blocks.value,
      .max_pos = max_pos.value,
      .rows = static_cast<int32_t>(rows.value),
      .num_layers = static_cast<int32_t>(num_layers.value),
      .hidden = static_cast<int32_t>(hidden.value),
      .intermediate = static_cast<int32_t>(intermediate_size),
      .vocab = static_cast<int32_t>(vocab.value),
      .num_q_heads = static_cast<int32_t>(num_q_heads),
      .num_kv_heads = static_cast<int32_t>(kv_heads.value),
      .head_dim = static_cast<int32_t>(head_dim.value),
      .rotary_dim = static_cast<int32_t>(rotary_dim.value),
      .block_shift = std::countr_zero(static_cast<uint64_t>(block_size.value)),
      .eps = static_cast<float>(eps),
  };
  const int64_t max_hidden = kernels::decoder_step_max_hidden(logits.get_device_index(), p);
  check(hidden.value <= max_hidden, kOp, "norm", "expected at most ", max_hidden,
        " hidden elements beside these heads, MLP and vocabulary, got ", hidden.value);
  const int64_t needed = kernels::decoder_step_workspace_numel(logits.get_device_index(), p);
  check(numel.value >= needed, kOp, "workspace", "expected at least ", needed, " elements, got ",
        numel.value);
  NV_RUN(decoder_step, p, logits);
}

// Without Hopper's instructions there is no kernel: the operator is not registered then.
STABLE_TORCH_LIBRARY_IMPL(nanovllm, NV_DISPATCH_KEY, m) {
  if (std::string_view(NV_CUDA_ARCHS).find("9.0a") != std::string_view::npos)
    m.impl("decoder_step", TORCH_BOX(&decoder_step));
}

}  // namespace nanovllm::ops
#endif
