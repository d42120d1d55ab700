#!/usr/bin/env bash
# Every GPU test, then the engine's benchmark and every kernel's; JSON in the folder given (default benchmarks/results).
# Each section says how long it took.
# From the repository's root, after a build for this GPU:
#
#     NANOVLLM_CUDA=1 pip install --no-build-isolation -e . && bash benchmarks/gpu.sh
set -u
out=${1:-benchmarks/results}
mkdir -p "$out"
gpu=$(python3 -c "import torch; print(torch.cuda.get_device_name().split()[-1].lower())") || exit 1
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
  [ "$op" = ops_cpu ] && continue
  section "$op" python3 "$bench" --json "$out/${op}_$gpu.json"
done
echo "== all: $SECONDS s, status $status"
exit $status
