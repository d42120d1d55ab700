#include "kernels/sample.h"

#include "common/run.h"

namespace nanovllm::ops {

void sample(Tensor token_ids, Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p,
            Tensor seeds, Tensor positions, std::optional<Tensor> copies, std::optional<Tensor> copy) {
  constexpr auto kOp = "sample";
  Dim batch{"batch"}, vocab{"vocab"}, num_copies{"num_copies"};
  check_shape(kOp, "logits", logits, {batch, vocab});
  const auto check_row = [&](const char* arg, const Tensor& t, ScalarType dtype) {
    check_shape(kOp, arg, t, {batch});
    check_dtype(kOp, arg, t, dtype);
    check_contiguous(kOp, arg, t);
  };
  check_row("token_ids", token_ids, ScalarType::Long);
  check_row("temperature", temperature, ScalarType::Float);
  check_row("top_k", top_k, ScalarType::Int);
  check_row("top_p", top_p, ScalarType::Float);
  check_row("min_p", min_p, ScalarType::Float);
  check_row("seeds", seeds, ScalarType::Long);
  check_row("positions", positions, ScalarType::Long);
  check(copies.has_value() == copy.has_value(), kOp, "copy", "expected ",
        copies.has_value() ? "a tensor" : "None", " as copies is, got ",
        copy.has_value() ? "a tensor" : "None");
  if (copies.has_value()) {
    check_shape(kOp, "copies", *copies, {num_copies, batch});
    check_dtype(kOp, "copies", *copies, ScalarType::Long);
    check_last_contiguous(kOp, "copies", *copies);
    check_shape(kOp, "copy", *copy, {1});
    check_dtype(kOp, "copy", *copy, ScalarType::Int);
  }
  const bool is_f32 = logits.scalar_type() == ScalarType::Float;
  check(is_f32 || logits.scalar_type() == ScalarType::BFloat16, kOp, "logits",
        "expected dtype float32 or bfloat16, got ", name(logits.scalar_type()));
  check_last_contiguous(kOp, "logits", logits);
  check(vocab.value > 0 && vocab.value <= INT32_MAX, kOp, "logits", "expected a vocab of 1 to ", INT32_MAX,
        ", got ", vocab.value);
  if (batch.value == 0) return;
  const SampleParams p{.token_ids = static_cast<int64_t*>(token_ids.data_ptr()),
                       .copies = copies.has_value() ? static_cast<int64_t*>(copies->data_ptr()) : nullptr,
                       .copy = data_or_null<int32_t>(copy),
                       .logits = logits.data_ptr(),
                       .temperature = static_cast<const float*>(temperature.data_ptr()),
                       .top_k = static_cast<const int32_t*>(top_k.data_ptr()),
                       .top_p = static_cast<const float*>(top_p.data_ptr()),
                       .min_p = static_cast<const float*>(min_p.data_ptr()),
                       .seeds = static_cast<const int64_t*>(seeds.data_ptr()),
                       .positions = static_cast<const int64_t*>(positions.data_ptr()),
                       .batch = batch.value,
                       .vocab = vocab.value,
                       .num_copies = num_copies.value,
                       .logits_stride_row = logits.stride(0),
                       .copies_stride_row = copies.has_value() ? copies->stride(0) : 0,
                       .dtype = is_f32 ? DType::kFloat32 : DType::kBFloat16};
  NV_RUN(sample, p, logits);
}

STABLE_TORCH_LIBRARY_IMPL(nanovllm, NV_DISPATCH_KEY, m) { m.impl("sample", TORCH_BOX(&sample)); }

}  // namespace nanovllm::ops
