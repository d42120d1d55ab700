// Element types that kernels are built for, as a tag in the params structs. No torch header here.
#pragma once
#include <cstdint>

namespace nanovllm {

enum class DType : int32_t { kFloat32, kBFloat16, kFloat16, kFloat8E4M3 };

inline const char* name(DType t) {
  constexpr const char* kNames[] = {"float32", "bfloat16", "float16", "float8_e4m3fn"};
  return kNames[static_cast<int>(t)];
}

inline int64_t size_of(DType t) { return t == DType::kFloat32 ? 4 : t == DType::kFloat8E4M3 ? 1 : 2; }

}  // namespace nanovllm
