#include "kernels/store_kv_cache.h"

#include "common/run.h"
#include "ops/kv_cache.h"

namespace nanovllm::ops {

void store_kv_cache(Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, Tensor slots,
                    std::optional<Tensor> k_scale, std::optional<Tensor> v_scale) {
  constexpr auto kOp = "store_kv_cache";
  Dim tokens{"num_tokens"}, kv_heads{"num_kv_heads"}, head_dim{"head_dim"};
  check_shape(kOp, "k", k, {tokens, kv_heads, head_dim});
  check_shape(kOp, "v", v, {tokens, kv_heads, head_dim});
  const DType dtype = check_activation(kOp, "k", k);
  check_dtype(kOp, "v", v, k.scalar_type());
  check_last_contiguous(kOp, "k", k);
  check_last_contiguous(kOp, "v", v);
  const KvCache cache = check_kv_cache(kOp, k_cache, v_cache, slots, k_scale, v_scale, dtype, k.scalar_type(),
                                       tokens, kv_heads, head_dim);
  if (k.numel() == 0) return;
  const StoreKvCacheParams p{.k = k.data_ptr(),
                             .v = v.data_ptr(),
                             .num_tokens = tokens.value,
                             .k_stride_row = k.stride(0),
                             .k_stride_head = k.stride(1),
                             .v_stride_row = v.stride(0),
                             .v_stride_head = v.stride(1),
                             .dtype = dtype,
                             .cache = cache};
  NV_RUN(store_kv_cache, p, k);
}

STABLE_TORCH_LIBRARY_IMPL(nanovllm, NV_DISPATCH_KEY, m) {
  m.impl("store_kv_cache", TORCH_BOX(&store_kv_cache));
}

}  // namespace nanovllm::ops
