#include "kernels/all_reduce.h"

#include "common/run.h"

// There is no CPU kernel: ranks on the CPU use gloo.
#ifdef NV_CUDA
namespace nanovllm::ops {

void all_reduce(Tensor out, std::optional<Tensor> residual, Tensor x, std::optional<Tensor> weight,
                double eps, Tensor peers, Tensor state, int64_t rank, int64_t slot_bytes,
                int64_t shared_bytes, bool two_shot) {
  constexpr auto kOp = "all_reduce";
  Dim rows{"num_rows"}, hidden{"hidden"}, addresses{"num_ranks + 1"};
  check_shape(kOp, "x", x, {rows, hidden});
  check_shape(kOp, "out", out, {rows, hidden});
  check_shape(kOp, "peers", peers, {addresses});
  check_shape(kOp, "state", state, {5});
  check_dtype(kOp, "peers", peers, ScalarType::Long);
  check_dtype(kOp, "state", state, ScalarType::Int);
  const DType dtype = check_activation(kOp, "x", x);
  const auto check_like_x = [&](const char* arg, const Tensor& t) {
    check_dtype(kOp, arg, t, x.scalar_type());
    check_contiguous(kOp, arg, t);
    check(reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0, kOp, arg,
          "expected an address aligned to 16 bytes");
  };
  check_like_x("x", x);
  check_like_x("out", out);
  check(residual.has_value() == weight.has_value(), kOp, "weight",
        "expected one with a residual and none without");
  if (residual.has_value()) {
    check_shape(kOp, "residual", *residual, {rows, hidden});
    check_shape(kOp, "weight", *weight, {hidden});
    check_like_x("residual", *residual);
    check_like_x("weight", *weight);
  }
  const int64_t ranks = addresses.value - 1, bytes = rows.value * hidden.value * 2;
  check((ranks >= 1 && ranks <= 4) || ranks == 6 || ranks == 8, kOp, "peers",
        "expected 1, 2, 3, 4, 6 or 8 ranks, got ", ranks);
  check(rank >= 0 && rank < ranks, kOp, "rank", "expected 0 to ", ranks - 1, ", got ", rank);
  check(hidden.value % 8 == 0 && hidden.value <= 8192, kOp, "x",
        "expected hidden a multiple of 8, at most 8192, got ", hidden.value);
  check(slot_bytes >= 0 && slot_bytes % 16 == 0, kOp, "slot_bytes", "expected a multiple of 16, got ",
        slot_bytes);
  check(shared_bytes >= 0 && shared_bytes % (16 * ranks) == 0, kOp, "shared_bytes", "expected a multiple of ",
        16 * ranks, ", got ", shared_bytes);
  const int64_t owned_bytes = (rows.value + ranks - 1) / ranks * hidden.value * 2;
  if (two_shot)
    check(owned_bytes <= shared_bytes / ranks, kOp, "x", "expected at most ", shared_bytes, " bytes, got ",
          bytes);
  else
    check(ranks == 1 || bytes <= slot_bytes, kOp, "x", "expected at most ", slot_bytes, " bytes, got ",
          bytes);
  if (bytes == 0) return;
  const AllReduceParams p{.out = out.data_ptr(),
                          .residual = residual.has_value() ? residual->data_ptr() : nullptr,
                          .x = x.data_ptr(),
                          .weight = weight.has_value() ? weight->data_ptr() : nullptr,
                          .peers = static_cast<const int64_t*>(peers.data_ptr()),
                          .state = static_cast<int32_t*>(state.data_ptr()),
                          .num_rows = rows.value,
                          .hidden = hidden.value,
                          .slot_bytes = slot_bytes,
                          .shared_bytes = shared_bytes,
                          .num_ranks = static_cast<int>(ranks),
                          .rank = static_cast<int>(rank),
                          .two_shot = two_shot,
                          .eps = static_cast<float>(eps),
                          .dtype = dtype};
  NV_RUN(all_reduce, p, x);
}

STABLE_TORCH_LIBRARY_IMPL(nanovllm, CUDA, m) { m.impl("all_reduce", TORCH_BOX(&all_reduce)); }

}  // namespace nanovllm::ops
#endif
