"""Layers of two to four ranks against their torch.nn counterparts; and a rank's weights from a checkpoint."""

import pytest
import torch
import torch.nn.functional as F

from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from tests.parallel.ranks import run_ranks

DTYPE = torch.float32


def fill(param: torch.nn.Parameter, **shards: torch.Tensor) -> None:
    """Loads checkpoint tensors; the memory is poisoned before, so that padding must be written."""
    param.data.fill_(torch.nan)
    for shard, tensor in shards.items():
        name = None if shard == "all" else int(shard[1:]) if shard[1:].isdigit() else shard
        param.weight_loader(param, tensor, name)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_row_parallel_adds_its_bias_once(size, bias):
    weight, b, x = torch.randn(24, 40), torch.randn(24), torch.randn(5, 40)

    def work(group):
        layer = RowParallelLinear(40, 24, bias, DTYPE)
        fill(layer.weight, all=weight)
        if bias:
            fill(layer.bias, all=b)
        part = layer.weight.shards[None]
        mine = F.pad(x, (0, group.size * part.size - 40))[:, part.first : part.first + part.size]
        return layer(mine.contiguous())

    for out in run_ranks(size, work):
        torch.testing.assert_close(out, F.linear(x, weight, b if bias else None), atol=1e-4, rtol=1e-5)


def test_column_parallel_parts_side_by_side():
    gate, up, x = torch.randn(40, 16), torch.randn(40, 16), torch.randn(5, 16)

    def work(group):
        layer = MergedColumnParallelLinear(16, [40, 40], False, DTYPE)
        fill(layer.weight, s0=gate, s1=up)
        return layer(x)

    outs = run_ranks(3, work)  # 16, 16 and 8 with 8 of padding
    for which, weight in enumerate((gate, up)):
        joined = torch.cat([out.chunk(2, dim=1)[which] for out in outs], dim=1)
        torch.testing.assert_close(joined[:, :40], x @ weight.T, atol=1e-4, rtol=1e-5)
        assert torch.equal(joined[:, 40:], torch.zeros(5, 8))


@pytest.mark.parametrize(("q", "kv", "size"), [(4, 2, 2), (4, 2, 4), (4, 1, 2), (9, 3, 2), (9, 3, 3)])
def test_qkv_parallel_holds_its_heads(q, kv, size):
    wq, wk, wv = torch.randn(q * 8, 16), torch.randn(kv * 8, 16), torch.randn(kv * 8, 16)

    def work(group):
        layer = QKVParallelLinear(16, 8, q, kv, False, DTYPE)
        fill(layer.weight, q=wq, k=wk, v=wv)
        return layer

    for layer in run_ranks(size, work):
        parts = layer.weight.split([layer.num_q_heads * 8, layer.num_kv_heads * 8, layer.num_kv_heads * 8])
        for part, shard, whole in zip(parts, "qkv", (wq, wk, wv)):
            s = layer.weight.shards[shard]
            assert torch.equal(part[: s.count], whole[s.start : s.start + s.count])
            assert torch.equal(part[s.count :], torch.zeros_like(part[s.count :]))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("shape", [(0,), (7,), (2, 3)])
def test_embedding_takes_ids_of_any_shape(size, shape):
    weight, ids = torch.randn(50, 16), torch.randint(0, 50, shape)
    ids.view(-1)[:2] = torch.tensor([0, 49])[: ids.numel()]

    def work(group):
        layer = VocabParallelEmbedding(50, 16, DTYPE)
        fill(layer.weight, all=weight)
        return layer(ids)

    for out in run_ranks(size, work):
        assert torch.equal(out, F.embedding(ids, weight))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("rows", [0, 1, 3, 20])
def test_head_joins_the_vocabulary_in_order_and_without_padding(size, rows):
    weight, x = torch.randn(50, 16), torch.randn(rows, 16)

    def work(group):
        head = ParallelLMHead(50, 16, DTYPE, tied_to=None)
        fill(head.weight, all=weight)
        return head(x)

    logits = run_ranks(size, work)[0]
    assert logits.shape == (rows, 50)
    torch.testing.assert_close(logits, x @ weight.T, atol=1e-4, rtol=1e-5)


def test_norm_sums_the_ranks():
    parts, before, weight = torch.randn(3, 5, 32), torch.randn(5, 32), torch.rand(32)

    def work(group):
        norm = RMSNorm(32, 1e-5, DTYPE)
        fill(norm.weight, all=weight)
        return norm(parts[group.rank].clone(), before.clone())

    total = before + parts.sum(0)
    for out, residual in run_ranks(3, work):
        torch.testing.assert_close(residual, total)
        torch.testing.assert_close(out, F.rms_norm(total, (32,), weight, 1e-5))


def test_smallest_of_all_ranks():
    assert run_ranks(3, lambda group: group.min(7 - group.rank)) == [5, 5, 5]
