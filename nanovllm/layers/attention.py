import torch
from torch import Tensor

from nanovllm import ops
from nanovllm.engine.context import get_context
from nanovllm.layers.layer import Layer
from nanovllm.layers.rotary import RotaryEmbedding


class Attention(Layer):
    """Rotary embedding, cache store and causal attention of one layer, for the rows of the current Context.

    `k_cache` and `v_cache` [num_blocks, block_size, num_kv_heads, head_dim] are views of the engine's pool,
    set by the model runner; until then they have no blocks, and only prefill without cached context can run.
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

    def forward(
        self, qkv: Tensor, positions: Tensor, q_weight: Tensor | None = None, k_weight: Tensor | None = None
    ) -> Tensor:
        """Attention output of every row.

        Args:
            qkv: [T, (num_q_heads + 2 num_kv_heads) * head_dim] projections; q and k are normed and rotated in
                place.
            positions: [T] int64, each row's position in its sequence.
            q_weight, k_weight: [head_dim] weights of the RMS norm over each head of q and k; None: no norm.
        Returns:
            [T, num_q_heads * head_dim].
        """
        context = get_context()
        ops.qk_norm_rope_store(
            qkv,
            q_weight,
            k_weight,
            self.rotary_emb.cos_sin,
            positions,
            self.k_cache,
            self.v_cache,
            context.slot_mapping,
            None,
            None,
            self.num_q_heads,
            self.num_kv_heads,
            self.eps,
        )
        heads = qkv.unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split([self.num_q_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        num_decode = context.num_decode
        if num_decode > 0:
            self._decode(out[:num_decode], q[:num_decode])
        if context.max_seqlen_q > 0:
            first = num_decode if context.first_prefill_row is None else context.first_prefill_row
            self._prefill(out[first:], q[first:], k[first:], v[first:])
        return out.flatten(1)

    def _decode(self, out: Tensor, q: Tensor) -> None:
        context = get_context()
        ops.paged_attention_decode(
            out,
            q,
            self.k_cache,
            self.v_cache,
            context.decode_block_tables,
            context.decode_context_lens,
            context.plan,
            context.workspace,
            None,
            None,
            self.scale,
            past_complete=True,  # since the step's plan, qk_norm_rope_store stored one token of each row
        )

    def _prefill(self, out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Reads the packed k and v of this forward when nothing before them is cached, else the cache."""
        context = get_context()
        if context.block_tables is not None:
            k, v = self.k_cache, self.v_cache
        ops.paged_attention_prefill(
            out,
            q,
            k,
            v,
            context.cu_seqlens_q,
            context.context_lens,
            context.block_tables,
            context.max_seqlen_q,
            None,
            None,
            self.scale,
        )
