// Launch with programmatic dependent launch (PDL): a kernel may start while the one before it on the stream
// drains. Until `wait_for_previous_grid()` it must not touch what that kernel writes, or write what that one
// reads. Nothing happens below sm_90, where a launch waits by itself.
#pragma once
#include <cuda_runtime.h>

#include <cstddef>
#include <utility>

namespace nanovllm::kernels {

/// Returns when the previous grid is complete and its writes are visible.
__device__ __forceinline__ void wait_for_previous_grid() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets the next grid start once every block of this one has called it or exited.
__device__ __forceinline__ void launch_next_grid() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// `cluster` blocks of neighbouring blockIdx.x share their shared memory; more than 1 needs sm_90.
template <class... Params, class... Args>
cudaError_t launch_pdl_clusters(void (*kernel)(Params...), int cluster, dim3 grid, dim3 block,
                                size_t smem_bytes, cudaStream_t stream, Args&&... args) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = cluster;
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
}

template <class... Params, class... Args>
cudaError_t launch_pdl(void (*kernel)(Params...), dim3 grid, dim3 block, size_t smem_bytes,
                       cudaStream_t stream, Args&&... args) {
  return launch_pdl_clusters(kernel, 1, grid, block, smem_bytes, stream, std::forward<Args>(args)...);
}

}  // namespace nanovllm::kernels
