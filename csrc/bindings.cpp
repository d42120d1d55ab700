// Every operator's schema, one purpose line each. Implementations register in csrc/ops/<op>.cpp, for CPU and
// CUDA. Each op writes into outputs that the caller gives and returns nothing: no allocation, no
// synchronisation, no fake kernel needed. Shapes and dtypes: nanovllm/ops/<op>.py.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(nanovllm, m) {
  // Position and cache slot of every scheduled token, from block tables and each sequence's first position.
  m.def(
      "slot_mapping(Tensor(a!) positions, Tensor(b!) slots, Tensor block_tables, Tensor cu_seqlens_q, "
      "Tensor start_pos, int block_size) -> ()");
  // Scatter new keys and values into their slots of the paged cache; slot -1 writes nothing.
  m.def(
      "store_kv_cache(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, Tensor? "
      "k_scale, "
      "Tensor? v_scale) -> ()");
  // Per-head RMS norm (optional) and rotary of q and k in place in qkv, then k and v into their cache slots.
  m.def(
      "qk_norm_rope_store(Tensor(a!) qkv, Tensor? q_weight, Tensor? k_weight, Tensor cos_sin, Tensor "
      "positions, "
      "Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor slots, Tensor? k_scale, Tensor? v_scale, int "
      "num_q_heads, "
      "int num_kv_heads, float eps) -> ()");
  // Rotary embedding of q and k in place, NeoX pairing.
  m.def("rotary_embedding(Tensor(a!) q, Tensor(b!) k, Tensor cos_sin, Tensor positions) -> ()");
  // out = x / rms(x) * weight.
  m.def("rms_norm(Tensor(a!) out, Tensor x, Tensor weight, float eps) -> ()");
  // residual = table[token_ids]; out = rms_norm(residual).
  m.def(
      "embed_rms_norm(Tensor(a!) out, Tensor(b!) residual, Tensor token_ids, Tensor table, Tensor weight, "
      "float eps) -> ()");
  // residual += x; out = rms_norm(residual).
  m.def("add_rms_norm(Tensor(a!) out, Tensor(b!) residual, Tensor x, Tensor weight, float eps) -> ()");
  // out = silu(gate) * up.
  m.def("silu_and_mul(Tensor(a!) out, Tensor gate_up) -> ()");
  // Work split of one decode step over the context, reused by all layers.
  m.def("decode_plan(Tensor(a!) plan, Tensor context_lens, int num_kv_heads, int block_size) -> ()");
  // Attention of one query token per sequence over its paged context.
  m.def(
      "paged_attention_decode(Tensor(a!) out, Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, "
      "Tensor context_lens, Tensor plan, Tensor(b!) workspace, Tensor? k_scale, Tensor? v_scale, float "
      "scale, bool past_complete) -> ()");
  // Norms, rotation, cache store and attention of one token per sequence, from its row of projections.
  m.def(
      "rope_attention_decode(Tensor(a!) out, Tensor qkv, Tensor? q_weight, Tensor? k_weight, Tensor cos_sin, "
      "Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor block_tables, Tensor context_lens, Tensor plan, "
      "Tensor(d!) workspace, Tensor? k_scale, Tensor? v_scale, float eps, float scale, bool past_complete) "
      "-> ()");
  // Causal attention of packed queries, aligned to the end of each context; keys packed or paged.
  m.def(
      "paged_attention_prefill(Tensor(a!) out, Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, "
      "Tensor context_lens, Tensor? block_tables, int max_seqlen_q, Tensor? k_scale, Tensor? v_scale, float "
      "scale) "
      "-> ()");
  // A whole decode step for a few rows, from token ids to logits, in one launch. Hopper only.
  m.def(
      "decoder_step(Tensor(a!) logits, Tensor(b!) workspace, Tensor(c!) kv_cache, Tensor token_ids, Tensor "
      "block_tables, Tensor context_lens, Tensor layers, Tensor embedding, Tensor norm, Tensor lm_head, "
      "Tensor cos_sin, int num_q_heads, int intermediate_size, float eps) -> ()");
  // One token per row: temperature, min-p, top-k, top-p, an exponential race with a counter-based generator.
  m.def(
      "sample(Tensor(a!) token_ids, Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor "
      "min_p, Tensor seeds, Tensor positions, Tensor(b!)? copies, Tensor? copy) -> ()");
  // out = x @ weight.T + bias for the rows of a decode step, or silu_and_mul of it; squares: x is half
  // normed.
  m.def(
      "decode_linear(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias, Tensor? squares, float eps, bool "
      "silu_and_mul, bool weight_complete, Tensor(b!)? workspace) -> ()");
  // residual += x @ weight.T + bias, and half of the norm that follows: scaled, and the rows' sums of
  // squares.
  m.def(
      "decode_linear_add(Tensor(a!) residual, Tensor(b!) scaled, Tensor(c!) squares, Tensor x, Tensor "
      "weight, "
      "Tensor? bias, Tensor norm_weight, bool weight_complete, Tensor(d!)? workspace) -> ()");
  // out = x @ weight.T + bias for a few rows, bound by reading the weight once.
  m.def("skinny_linear(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias) -> ()");
  // The same with the weight as the rows of a GGUF file: Q4_0, Q4_1 or Q8_0 blocks of bytes.
  m.def("skinny_linear_gguf(Tensor(a!) out, Tensor x, Tensor weight, int quant_type, Tensor? bias) -> ()");
  // Sum of x over the ranks of a host, by peer memory; with a residual: added to it, then RMS norm. CUDA
  // only.
  m.def(
      "all_reduce(Tensor(a!) out, Tensor(b!)? residual, Tensor x, Tensor? weight, float eps, Tensor peers, "
      "Tensor(c!) state, int rank, int slot_bytes, int shared_bytes, bool two_shot) -> ()");
}
