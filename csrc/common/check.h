// Argument checks of the operators. A failed check throws std::runtime_error, which torch turns into a
// RuntimeError whose text is `op: argument: expected ..., got ...` and holds no path of the machine that
// built it.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdio>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "common/dtype.h"

namespace nanovllm::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

#ifdef NV_CUDA
#define NV_DISPATCH_KEY CUDA
#else
#define NV_DISPATCH_KEY CPU
#endif

/// The sizes of a tensor, written [2, 3], and only when the check fails.
struct Shape {
  const Tensor& tensor;
};
inline Shape shape(const Tensor& t) { return {t}; }

/// A part of a message. Without streams: where libstdc++ is linked in twice, their locales crash.
template <class Part>
std::string to_text(Part const& part) {
  if constexpr (std::is_convertible_v<Part, std::string>) {
    return part;
  } else if constexpr (std::is_same_v<Part, Shape>) {
    std::string text = "[";
    for (int64_t i = 0; i < part.tensor.dim(); ++i)
      text += (i ? ", " : "") + std::to_string(part.tensor.size(i));
    return text + "]";
  } else if constexpr (std::is_floating_point_v<Part>) {
    char text[32];
    std::snprintf(text, sizeof text, "%g", static_cast<double>(part));
    return text;
  } else {
    return std::to_string(part);
  }
}

/// Throws `op: arg: expected <expected>, got <got>`, the parts put together, unless `ok`.
template <class... Parts>
void check(bool ok, const char* op, const char* arg, Parts const&... parts) {
  if (ok) return;
  throw std::runtime_error((std::string(op) + ": " + arg + ": " + ... + to_text(parts)));
}

inline const char* name(ScalarType t) {
  switch (t) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::Float8_e4m3fn:
      return "float8_e4m3fn";
    default:
      return "another dtype";
  }
}

/// A named dimension: bound by the first tensor that has it, held against the rest. 0 is a legal size.
struct Dim {
  const char* label;
  int64_t value = -1;
  const char* bound_by = nullptr;
};

/// A required size: a named dimension, or a number.
struct Extent {
  Extent(Dim& d) : dim(&d) {}       // NOLINT: implicit by design
  Extent(int64_t n) : number(n) {}  // NOLINT
  Dim* dim = nullptr;
  int64_t number = -1;
};

/// Checks device, rank and sizes; binds dimensions not yet bound.
inline void check_shape(const char* op, const char* arg, const Tensor& t,
                        std::initializer_list<Extent> extents) {
#ifdef NV_CUDA
  check(t.is_cuda(), op, arg, "expected a CUDA tensor, got another device");
#else
  check(t.is_cpu(), op, arg, "expected a CPU tensor, got another device");
#endif
  check(t.dim() == static_cast<int64_t>(extents.size()), op, arg, "expected ", extents.size(),
        " dimensions, got ", t.dim(), " of shape ", shape(t));
  int64_t i = 0;
  for (const Extent& e : extents) {
    const int64_t got = t.size(i);
    if (e.dim == nullptr) {
      check(got == e.number, op, arg, "expected size ", e.number, " in dimension ", i, ", got ", got,
            " of shape ", shape(t));
    } else if (e.dim->bound_by == nullptr) {
      e.dim->value = got;
      e.dim->bound_by = arg;
    } else {
      check(got == e.dim->value, op, arg, "expected ", e.dim->label, " = ", e.dim->value, " (from ",
            e.dim->bound_by, ") in dimension ", i, ", got ", got, " of shape ", shape(t));
    }
    ++i;
  }
}

inline void check_dtype(const char* op, const char* arg, const Tensor& t, ScalarType want) {
  check(t.scalar_type() == want, op, arg, "expected dtype ", name(want), ", got ", name(t.scalar_type()));
}

/// The last dimension has stride 1 (a size of 0 or 1 always passes).
inline void check_last_contiguous(const char* op, const char* arg, const Tensor& t) {
  const int64_t d = t.dim() - 1;
  check(t.size(d) <= 1 || t.stride(d) == 1, op, arg, "expected stride 1 in the last dimension, got ",
        t.stride(d));
}

inline void check_contiguous(const char* op, const char* arg, const Tensor& t) {
  check(t.is_contiguous(), op, arg, "expected a contiguous tensor, got a strided one of shape ", shape(t));
}

/// The element type of an activation: float32 or bfloat16 on CPU, bfloat16 or float16 on CUDA.
inline DType check_activation(const char* op, const char* arg, const Tensor& t) {
  const ScalarType s = t.scalar_type();
#ifdef NV_CUDA
  check(s == ScalarType::BFloat16 || s == ScalarType::Half, op, arg,
        "expected dtype bfloat16 or float16 on CUDA, got ", name(s));
#else
  check(s == ScalarType::Float || s == ScalarType::BFloat16, op, arg,
        "expected dtype float32 or bfloat16 on CPU, got ", name(s));
#endif
  return s == ScalarType::Float      ? DType::kFloat32
         : s == ScalarType::BFloat16 ? DType::kBFloat16
                                     : DType::kFloat16;
}

/// Null for an absent tensor.
template <class T>
const T* data_or_null(const std::optional<Tensor>& t) {
  return t.has_value() ? static_cast<const T*>(t->data_ptr()) : nullptr;
}

}  // namespace nanovllm::ops
