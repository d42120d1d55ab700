"""Engine benchmarks behind `nanovllm bench`."""
