"""Which part of a model each rank holds. Pure functions of the shapes, the rank and the number of ranks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from nanovllm.models.config import ModelConfig

_MULTIPLE = 8  # elements: every rank's part of a dimension starts at 16 bytes, which the kernels' packs need


@dataclass(frozen=True, slots=True)
class Slice:
    """What a parameter holds of a checkpoint tensor: `size` rows (dim 0) or columns (dim 1) from `first` on.

    What lies past the `full` rows or columns of the tensor is padding, and zero.
    """

    full: int
    first: int
    size: int
    dim: int = 0

    @property
    def count(self) -> int:
        """Rows or columns that come from the tensor."""
        return max(0, min(self.size, self.full - self.first))

    @property
    def start(self) -> int:
        """first, or the tensor's end where all of the part is padding."""
        return min(self.first, self.full)

    def along(self, dim: int) -> Slice:
        return dataclasses.replace(self, dim=dim)


def whole(size: int) -> Slice:
    return Slice(size, 0, size)


def even_slice(full: int, rank: int, num_ranks: int) -> Slice:
    """The rank's share of a dimension, the same size for all; the last ranks may hold padding."""
    if num_ranks == 1:
        return whole(full)
    size = -(-full // (num_ranks * _MULTIPLE)) * _MULTIPLE
    return Slice(full, rank * size, size)


@dataclass(frozen=True, slots=True)
class HeadShards:
    """The attention heads of one rank, in heads: `q` and `kv` are slices of the model's heads."""

    q: Slice
    kv: Slice


def head_shards(num_q_heads: int, num_kv_heads: int, rank: int, num_ranks: int) -> HeadShards:
    """The rank's heads: its share of the KV heads with their query heads or, with more ranks than KV heads, one KV
    head, which neighbouring ranks then hold alike, and a share of its query heads.

    Up to as many ranks as KV heads, the KV heads are padded to a multiple of the ranks as long as every rank has a
    real one: 3 heads on 2 ranks are 2 and 1.

    Raises:
        ValueError: the heads cannot be shared by that many ranks; the text has the numbers that can.
    """
    if not _can_share(num_q_heads, num_kv_heads, num_ranks):
        possible = [k for k in range(1, num_q_heads + 1) if _can_share(num_q_heads, num_kv_heads, k)]
        raise ValueError(
            f"tensor_parallel_size: {num_ranks} ranks cannot share {num_q_heads} attention heads with {num_kv_heads} "
            f"key-value heads, expected one of {', '.join(map(str, possible))}"
        )
    if num_ranks <= num_kv_heads:
        num_kv = -(-num_kv_heads // num_ranks)
        kv = Slice(num_kv_heads, rank * num_kv, num_kv)
        group = num_q_heads // num_kv_heads
        return HeadShards(Slice(num_q_heads, kv.first * group, num_kv * group), kv)
    num_q = num_q_heads // num_ranks
    kv = Slice(num_kv_heads, rank // (num_ranks // num_kv_heads), 1)
    return HeadShards(Slice(num_q_heads, rank * num_q, num_q), kv)


def _can_share(num_q_heads: int, num_kv_heads: int, num_ranks: int) -> bool:
    if num_ranks <= num_kv_heads:
        per_rank = -(-num_kv_heads // num_ranks)
        return (num_ranks - 1) * per_rank < num_kv_heads
    return num_ranks % num_kv_heads == 0 and num_q_heads % num_ranks == 0


def in_elements(heads: Slice, head_dim: int) -> Slice:
    """A slice of heads as one of their elements."""
    return Slice(heads.full * head_dim, heads.first * head_dim, heads.size * head_dim, heads.dim)


def check_shards(model: ModelConfig, num_ranks: int) -> None:
    """Refuses a number of ranks that cannot share the model, before any process starts."""
    head_shards(model.num_q_heads, model.num_kv_heads, 0, num_ranks)
    for name in ("intermediate_size", "vocab_size"):
        if even_slice(getattr(model, name), num_ranks - 1, num_ranks).count == 0:
            raise ValueError(
                f"tensor_parallel_size: {num_ranks} ranks cannot share {name}={getattr(model, name)}, expected at "
                f"least {_MULTIPLE} of it for each"
            )


def rank_config(model: ModelConfig, rank: int, num_ranks: int) -> ModelConfig:
    """The config with the head counts of one rank: what its KV cache and attention are made of."""
    heads = head_shards(model.num_q_heads, model.num_kv_heads, rank, num_ranks)
    return dataclasses.replace(model, num_q_heads=heads.q.size, num_kv_heads=heads.kv.size)
