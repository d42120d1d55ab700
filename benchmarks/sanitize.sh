#!/usr/bin/env bash
# memcheck, racecheck and synccheck of every kernel on small shapes; a few minutes. From the repository's root, after a
# build for this GPU:
#
#     bash benchmarks/sanitize.sh [tool ...]
#
# Only this project's kernels are instrumented. The shapes are those of tests: one call of every operator, then batches
# that cross the borders of blocks, heads and sequences.
set -u
status=0
tests=(
  tests/ops/test_dispatcher.py::test_a_sample_changes_what_the_schema_says
  "tests/ops/test_decoder_step.py::test_logits_and_cache[odd widths]"
  "tests/ops/test_decoder_step.py::test_logits_and_cache[two layers]"
  tests/ops/test_decoder_step.py::test_only_padding_rows_store_nothing
  "tests/ops/test_decode_linear.py::test_large_weights_take_the_rest_of_a_norm[3-False]"
  tests/ops/test_paged_attention_decode_cuda.py::test_keys_beside_values
  tests/ops/test_paged_attention_decode_cuda.py::test_graph_replay_after_changed_lengths
  "tests/ops/test_rope_attention_decode.py::test_float8_cache[cuda-bfloat16-b9-max600-h9+1-d64-rot64-block16-qknorm]"
  "tests/ops/test_rope_attention_decode.py::test_float8_cache[cuda-float16-b9-max600-h32+2-d128-rot128-block16-qknorm]"
  "tests/ops/test_rope_attention_decode.py::test_past_complete_in_a_graph[4]"
  tests/ops/test_sample.py::test_rows_left_out_and_copies
  "tests/ops/test_sample.py::test_tokens_of_the_reference[cuda--1-0.7-0-1009]"
  "tests/ops/test_sample.py::test_tokens_of_the_reference[cuda-40-0.8-0.02-1009]"
  "tests/ops/test_sample.py::test_tokens_of_the_reference[cuda--1-1-0.1-1009]"
  tests/ops/test_sample.py::test_many_ties_at_the_border_are_kept
  tests/ops/test_sample.py::test_masked_and_broken_logits
  "tests/ops/test_store_kv_cache.py::test_bits[cuda-bfloat16-t67-h2-d24-block32]"
  "tests/ops/test_store_kv_cache.py::test_bits[cuda-float16-t7-h3-d17-block4]"
  "tests/ops/test_store_kv_cache.py::test_float8_bits[cuda-bfloat16-t257-h8-d128-block256]"
  "tests/ops/test_store_kv_cache.py::test_strides[cuda-bfloat16]"
  "tests/ops/test_store_kv_cache.py::test_misaligned_rows[cuda-float16]"
  "tests/ops/test_paged_attention_prefill_cuda.py::test_every_row_of_a_mixed_batch[None-128]"
  "tests/ops/test_paged_attention_prefill_cuda.py::test_every_row_of_a_mixed_batch[16-80]"
  "tests/ops/test_paged_attention_prefill_cuda.py::test_every_row_of_a_mixed_batch[256-128]"
  "tests/ops/test_paged_attention_prefill_cuda.py::test_e4m3_in_a_mixed_batch[16-128]"
)
export NANOVLLM_REFERENCE_ON_CPU=1 PYTORCH_NO_CUDA_MEMORY_CACHING=1
[ $# -gt 0 ] || set -- memcheck racecheck synccheck
for name in "$@"; do
  begin=$SECONDS
  run=("${tests[@]}")
  if [ "$name" = racecheck ]; then
    # decoder_step's ring is filled by cp.async with mbarrier.arrive.noinc, which racecheck tells from a plain arrival since
    # 2025.4 only, and in code of nvcc 13.1 and later (Compute Sanitizer's release notes): before, it reports all its reads.
    run+=(-k "not decoder_step")
  fi
  timeout 480 compute-sanitizer --tool "$name" --kernel-name kernel_substring=nanovllm \
    --error-exitcode 9 --print-limit 5 python3 -m pytest -q -m gpu -p no:cacheprovider "${run[@]}" || status=1
  echo "== $name: $((SECONDS - begin)) s, status $status"
done
exit $status
