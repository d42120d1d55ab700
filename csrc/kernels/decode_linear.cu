// out = x @ weight^T + bias, or silu_and_mul of it, for the rows of a decode step: decode_linear.cuh, for a
// large weight decode_linear_stream.cuh, or for a very long one decode_linear_tall.cuh.
#include "kernels/decode_linear_stream.cuh"
#include "kernels/decode_linear_tall.cuh"

namespace nanovllm::kernels {
namespace decode_linear {

struct Out {
  void* data;
  int64_t stride_row;
  bool aligned;  // to quads
};

template <class T>
__device__ void store_quad(const KernelParams& p, const Out& out, const Item& item, const Pack<T, kQuad>& y) {
  T* to = static_cast<T*>(out.data) + item.m * out.stride_row + item.n;
  if (out.aligned) {
    y.store(to);
    return;
  }
#pragma unroll
  for (int j = 0; j < kQuad; ++j)
    if (item.n + j < p.n) to[j] = y.data[j];
}

template <class T>
struct Nothing {
  template <class... Args>
  __device__ void load(Args const&...) {}
};

struct Plain {
  static constexpr int kParts = 1;
  static constexpr bool kMayBeWide = true;
  using Params = Out;
  template <class T>
  using Early = Nothing<T>;
  template <class T>
  static __device__ void finish(const KernelParams& p, const Params& out, const Item& item, const Nothing<T>&,
                                const Pack<T, kQuad> (&y)[1]) {
    if (item.valid) store_quad(p, out, item, y[0]);
  }
};

/// Takes gate and up rounded, as if it were an operator of its own.
struct SiluAndMul {
  static constexpr int kParts = 2;
  static constexpr bool kMayBeWide = true;
  using Params = Out;
  template <class T>
  using Early = Nothing<T>;
  template <class T>
  static __device__ void finish(const KernelParams& p, const Params& out, const Item& item, const Nothing<T>&,
                                const Pack<T, kQuad> (&y)[2]) {
    float z[kQuad];
#pragma unroll
    for (int j = 0; j < kQuad; ++j) {
      const float gate = to_float(y[0].data[j]);
      z[j] = __fdividef(gate, 1.0f + __expf(-gate)) * to_float(y[1].data[j]);
    }
    if (item.valid) store_quad(p, out, item, rounded<T>(z));
  }
};

}  // namespace decode_linear

cudaError_t launch_decode_linear(const DecodeLinearParams& p, cudaStream_t stream) {
  using namespace decode_linear;
  const int num_sms = num_hopper_sms();
  if (num_sms == 0) return cudaErrorNotSupported;
  if (tall_takes(p, num_sms)) return launch_tall(p, num_sms, stream);
  const int64_t n = p.silu_and_mul ? p.n / 2 : p.n;
  const Out out{p.out, p.out_stride_row,
                n % kQuad == 0 && is_aligned(p.out, {p.out_stride_row}, 2, 2 * kQuad)};
  if (stream_takes(p))
    return p.silu_and_mul ? launch_stream<SiluAndMul>(p, out, num_sms, stream)
                          : launch_stream<Plain>(p, out, num_sms, stream);
  return p.silu_and_mul ? launch<SiluAndMul>(p, out, num_sms, stream)
                        : launch<Plain>(p, out, num_sms, stream);
}

int64_t decode_linear_workspace_numel(int device) {
  int num_sms = 0;
  cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  return decode_linear::stream_workspace_bytes(num_sms) / 4;
}

}  // namespace nanovllm::kernels
