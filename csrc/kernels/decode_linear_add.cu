// residual += x @ weight^T + bias, scaled = residual * norm_weight, partial sums of squares of residual:
// decode_linear.cuh and decode_linear_stream.cuh. The product is rounded before it is added, as if it were an
// operator of its own.
#include "kernels/decode_linear_add.h"
#include "kernels/decode_linear_stream.cuh"

namespace nanovllm::kernels {
namespace decode_linear {

struct Add {
  static constexpr int kParts = 1;
  static constexpr bool kMayBeWide = false;
  struct Params {
    void *residual, *scaled;
    const void* norm_weight;
    float* squares;
    int64_t residual_stride_row, scaled_stride_row;
  };
  template <class T>
  struct Early {
    Pack<T, kQuad> residual, weight;
    __device__ void load(const KernelParams&, const Params& e, const Item& item) {
      residual =
          Pack<T, kQuad>::load(static_cast<const T*>(e.residual) + item.m * e.residual_stride_row + item.n);
      weight = Pack<T, kQuad>::load(static_cast<const T*>(e.norm_weight) + item.n);
    }
  };
  template <class T>
  static __device__ void finish(const KernelParams& p, const Params& e, const Item& item,
                                const Early<T>& early, const Pack<T, kQuad> (&y)[1]) {
    float sum[kQuad], scaled[kQuad], squares = 0;
#pragma unroll
    for (int j = 0; j < kQuad; ++j) sum[j] = to_float(early.residual.data[j]) + to_float(y[0].data[j]);
    const Pack<T, kQuad> residual = rounded<T>(sum);
#pragma unroll
    for (int j = 0; j < kQuad; ++j) {
      const float r = to_float(residual.data[j]);
      scaled[j] = r * to_float(early.weight.data[j]);
      squares += item.valid ? r * r : 0.0f;
    }
    squares = reduce_lanes(squares, Sum{}, kQuadsOfGroup);
    if (!item.valid) return;
    residual.store(static_cast<T*>(e.residual) + item.m * e.residual_stride_row + item.n);
    rounded<T>(scaled).store(static_cast<T*>(e.scaled) + item.m * e.scaled_stride_row + item.n);
    if (item.row % kSquaresWidth == 0) e.squares[item.n / kSquaresWidth * p.num_rows + item.m] = squares;
  }
};

}  // namespace decode_linear

cudaError_t launch_decode_linear_add(const DecodeLinearAddParams& p, cudaStream_t stream) {
  using namespace decode_linear;
  const Add::Params add{p.linear.out,       p.scaled, p.norm_weight, p.squares, p.linear.out_stride_row,
                        p.scaled_stride_row};
  const int num_sms = num_hopper_sms();
  if (num_sms == 0) return cudaErrorNotSupported;
  if (stream_takes(p.linear)) return launch_stream<Add>(p.linear, add, num_sms, stream);
  return launch<Add>(p.linear, add, num_sms, stream);
}

}  // namespace nanovllm::kernels
