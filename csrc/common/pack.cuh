// N elements moved by one load or store: 16 bytes where the caller's pointers and strides allow.
#pragma once
#include <vector_types.h>

#include <cstdint>
#include <initializer_list>
#include <type_traits>

namespace nanovllm::kernels {

/// The built-in type that one access of `kBytes` moves.
template <int kBytes>
using Word = std::conditional_t<
    kBytes == 16, uint4,
    std::conditional_t<
        kBytes == 8, uint2,
        std::conditional_t<kBytes == 4, uint32_t, std::conditional_t<kBytes == 2, uint16_t, uint8_t>>>>;

template <class T, int kSize>
union Pack {
  using Raw = Word<sizeof(T) * kSize>;
  static_assert(sizeof(Raw) == sizeof(T) * kSize, "a pack is 1, 2, 4, 8 or 16 bytes");
  Raw raw;
  T data[kSize];

  static __device__ Pack load(const T* p) { return {*reinterpret_cast<const Raw*>(p)}; }
  /// A plain assignment means the same, but nvcc 13.0 splits it into 4-byte stores.
  __device__ void store(T* p) const { __stwb(reinterpret_cast<Raw*>(p), raw); }
};

/// Whether `p`, and all that strides (in elements of `element_bytes`) reach from it, is aligned to `bytes`.
inline bool is_aligned(const void* p, std::initializer_list<int64_t> strides, int64_t element_bytes,
                       int64_t bytes) {
  if (reinterpret_cast<uintptr_t>(p) % bytes != 0) return false;
  for (int64_t stride : strides)
    if (stride * element_bytes % bytes != 0) return false;
  return true;
}

}  // namespace nanovllm::kernels
