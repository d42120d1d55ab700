// The driver's encoder of tensor maps, found at run time: nothing links against libcuda.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

namespace nanovllm::kernels {

/// Null where the driver has none.
inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encoder = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    const auto status =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
    return status == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(entry)
                                                                         : nullptr;
  }();
  return encoder;
}

}  // namespace nanovllm::kernels
