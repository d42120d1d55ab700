#!/usr/bin/env bash
# Every GPU test, then the engine's benchmark, every kernel's and, where there are two GPUs, those of two ranks; JSON in
# the folder given (default benchmarks/results). Each section says how long it took.
# From the repository's root, after a build for this GPU:
#
#     NANOVLLM_CUDA=1 pip install --no-build-isolation -e . && bash benchmarks/gpu.sh
set -u
out=${1:-benchmarks/results}
mkdir -p "$out"
gpu=$(python3 -c "import torch; print(torch.cuda.get_device_name().split()[-1].lower())") || exit 1
num_gpus=$(python3 -c "import torch; print(torch.cuda.device_count())")
status=0

section() {
  local name=$1 begin=$SECONDS
  shift
  "$@" || status=1
  echo "== $name: $((SECONDS - begin)) s"
}

section "GPU tests" python3 -m pytest -q -m gpu -p no:cacheprovider tests
section engine python3 benchmarks/engine.py --json "$out/engine_$gpu.json"
for bench in benchmarks/bench_*.py; do
  op=$(basename "$bench" .py)
  op=${op#bench_}
  case $op in ops_cpu | all_reduce) continue ;; esac
  section "$op" python3 "$bench" --json "$out/${op}_$gpu.json"
done
if [ "$num_gpus" -ge 2 ]; then
  section all_reduce python3 benchmarks/bench_all_reduce.py --ranks 2 --json "$out/all_reduce_${gpu}_x2.json"
  section tensor_parallel python3 benchmarks/tensor_parallel.py --shapes smollm2 8b 32b --ranks 1 2 \
    --json "$out/tensor_parallel_${gpu}_x2.json"
else
  echo "== all_reduce, tensor_parallel: skipped, they need two GPUs"
fi
echo "== all: $SECONDS s, status $status"
exit $status
