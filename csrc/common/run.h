// How csrc/ops hands checked params to a backend: the CPU loop, or the CUDA launcher on the current stream.
// Each op has one params struct, `void cpu::<op>(params)` in csrc/cpu and `cudaError_t launch_<op>(params,
// stream)` in csrc/kernels; csrc/ops/<op>.cpp is compiled once for each of the two modules.
#pragma once
#include "common/check.h"

#ifdef NV_CUDA
#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

namespace nanovllm::ops {

/// Launches on the current stream of `t`'s device, which is made current; a failed launch names the op.
template <class Launch>
void run_on_device(const char* op, const Tensor& t, Launch const& launch) {
  const torch::stable::accelerator::DeviceGuard guard(t.get_device_index());
  void* stream = nullptr;
  check(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream) == 0, op, "stream",
        "torch has no current CUDA stream on device ", t.get_device_index());
  const cudaError_t status = launch(static_cast<cudaStream_t>(stream));
  check(status == cudaSuccess, op, "launch", cudaGetErrorString(status));
}

}  // namespace nanovllm::ops

#define NV_RUN(op, params, tensor) \
  run_on_device(#op, tensor, [&](cudaStream_t stream) { return kernels::launch_##op(params, stream); })
#else
#define NV_RUN(op, params, tensor) cpu::op(params)
#endif
