// N elements moved by one load or store: 16 bytes where the caller's pointers and strides allow.
#pragma once
#include <cstdint>
#include <initializer_list>

namespace nanovllm::kernels {

template <class T, int kSize>
struct alignas(sizeof(T) * kSize) Pack {
  T data[kSize];

  static __device__ Pack load(const T* p) { return *reinterpret_cast<const Pack*>(p); }
  __device__ void store(T* p) const { *reinterpret_cast<Pack*>(p) = *this; }
};

/// Whether `p` and every multiple of the strides (elements of `element_bytes`) from it are aligned to
/// `bytes`.
inline bool is_aligned(const void* p, std::initializer_list<int64_t> strides, int64_t element_bytes,
                       int64_t bytes) {
  if (reinterpret_cast<uintptr_t>(p) % bytes != 0) return false;
  for (int64_t stride : strides)
    if (stride * element_bytes % bytes != 0) return false;
  return true;
}

}  // namespace nanovllm::kernels
