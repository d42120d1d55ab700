import torch
from torch import Tensor

from nanovllm import ops
from nanovllm.engine.context import Context, get_context
from nanovllm.layers.attention_backends import AttentionBackend, NativeAttention
from nanovllm.layers.layer import Layer
from nanovllm.layers.rotary import RotaryEmbedding


class Attention(Layer):
    """Rotary embedding, cache store and causal attention of one layer, for the rows of the current Context.

    `k_cache` and `v_cache` [num_blocks, block_size, num_kv_heads, head_dim] are views of the engine's pool,
    set by the model runner; until then they have no blocks, and only prefill without cached context can run. An fp8
    cache holds keys / k_scale and values / v_scale, [1] float32 from the checkpoint; None: 1.
    """

    def __init__(
        self,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        rotary_emb: RotaryEmbedding,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.num_q_heads = num_q_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.eps = eps  # of the norms of q and k
        self.scale = head_dim**-0.5
        self.rotary_emb = rotary_emb
        self.k_cache = torch.empty(0, 1, num_kv_heads, head_dim, dtype=dtype)
        self.v_cache = torch.empty_like(self.k_cache)
        self.k_scale: Tensor | None = None
        self.v_scale: Tensor | None = None
        self.backend: AttentionBackend = NativeAttention()

    @property
    def cache_scales(self) -> tuple[Tensor | None, Tensor | None]:
        """k_scale and v_scale where the cache is fp8; a cache of the model's dtype has none."""
        return (self.k_scale, self.v_scale) if self.k_cache.dtype == torch.float8_e4m3fn else (None, None)

    @property
    def decodes_by_rope_attention(self) -> bool:
        """Whether a step of decodes alone is one operator here, which needs no positions and slots.

        Not for an fp8 cache: with half the bytes to read, what the operator does beside reading shows
        (docs/kernels/paged_attention_decode.md).
        """
        rotary_dim, device = self.rotary_emb.cos_sin.shape[1], self.k_cache.device
        return (
            isinstance(self.backend, NativeAttention)
            and self.k_cache.dtype != torch.float8_e4m3fn
            and ops.rope_attention_decode_takes(self.head_dim, rotary_dim, device)
        )

    def forward(
        self, qkv: Tensor, positions: Tensor, q_weight: Tensor | None = None, k_weight: Tensor | None = None
    ) -> Tensor:
        """Attention output of every row.

        Args:
            qkv: [T, (num_q_heads + 2 num_kv_heads) * head_dim] projections; q and k may be normed and rotated in
                place.
            positions: [T] int64, each row's position in its sequence.
            q_weight, k_weight: [head_dim] weights of the RMS norm over each head of q and k; None: no norm.
        Returns:
            [T, num_q_heads * head_dim].
        """
        context = get_context()
        if context.max_seqlen_q == 0 and self.decodes_by_rope_attention:
            return self._decode(qkv, q_weight, k_weight, context)
        ops.qk_norm_rope_store(
            qkv,
            q_weight,
            k_weight,
            self.rotary_emb.cos_sin,
            positions,
            self.k_cache,
            self.v_cache,
            context.slot_mapping,
            *self.cache_scales,
            self.num_q_heads,
            self.num_kv_heads,
            self.eps,
        )
        heads = qkv.unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split([self.num_q_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        num_decode = context.num_decode
        if num_decode > 0:
            self.backend.decode(self, out[:num_decode], q[:num_decode], context)
        if context.max_seqlen_q > 0:
            first = num_decode if context.first_prefill_row is None else context.first_prefill_row
            self.backend.prefill(self, *(x[first:] for x in (out, q, k, v)), context)
        return out.flatten(1)

    def _decode(self, qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, context: Context) -> Tensor:
        out = qkv.new_empty(qkv.shape[0], self.num_q_heads, self.head_dim)
        ops.rope_attention_decode(
            out,
            qkv,
            q_weight,
            k_weight,
            self.rotary_emb.cos_sin,
            self.k_cache,
            self.v_cache,
            context.decode_block_tables,
            context.decode_context_lens,
            context.plan,
            context.workspace,
            *self.cache_scales,
            self.eps,
            self.scale,
            past_complete=True,  # since the step's plan, nothing but this stored anything
        )
        return out.flatten(1)
