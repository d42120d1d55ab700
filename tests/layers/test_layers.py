"""Layers against their torch.nn counterparts, and what they leave untouched."""

import pytest
import torch
import torch.nn.functional as F

from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear

DTYPE = torch.float32


def filled(layer: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(0)
    for param in layer.parameters():
        param.normal_()
    return layer


@pytest.mark.parametrize("rows", [0, 1, 16, 17])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(rows, bias):
    layer = filled(RowParallelLinear(48, 40, bias, DTYPE))
    x = torch.randn(rows, 48)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias), atol=1e-4, rtol=1e-5)


def test_fused_projections_are_filled_shard_by_shard():
    qkv = QKVParallelLinear(16, 8, 4, 2, True, DTYPE)
    gate_up = MergedColumnParallelLinear(16, [24, 24], False, DTYPE)
    for layer, shards in ((qkv, {"v": 16, "q": 32, "k": 16}), (gate_up, {1: 24, 0: 24})):
        parts = {shard: torch.randn(rows, 16) for shard, rows in shards.items()}
        for shard, part in parts.items():
            layer.weight.weight_loader(layer.weight, part, shard)
        order = ("q", "k", "v") if layer is qkv else (0, 1)
        assert torch.equal(layer.weight, torch.cat([parts[shard] for shard in order]))
    qkv.bias.weight_loader(qkv.bias, torch.full((16,), 3.0), "k")
    assert torch.equal(qkv.bias[32:48], torch.full((16,), 3.0))


def test_rms_norm_leaves_its_input():
    norm = filled(RMSNorm(32, 1e-5, DTYPE))
    x, residual = torch.randn(5, 32), torch.randn(5, 32)
    x_before, residual_before = x.clone(), residual.clone()
    torch.testing.assert_close(norm(x), F.rms_norm(x, (32,), norm.weight, 1e-5))
    assert torch.equal(x, x_before)
    out, total = norm(x, residual)
    assert torch.equal(x, x_before)
    assert total.data_ptr() == residual.data_ptr() and torch.equal(total, residual_before + x_before)
    torch.testing.assert_close(out, F.rms_norm(total, (32,), norm.weight, 1e-5))


def test_silu_and_mul():
    gate_up = torch.randn(5, 64)
    expected = F.silu(gate_up[:, :32]) * gate_up[:, 32:]
    torch.testing.assert_close(SiluAndMul()(gate_up), expected)


def test_embedding_and_head():
    embedding = filled(VocabParallelEmbedding(50, 32, DTYPE))
    head = ParallelLMHead(50, 32, DTYPE, tied_to=embedding)
    assert head.weight is embedding.weight
    hidden = embedding(torch.tensor([3, 49, 0]))
    assert torch.equal(hidden, embedding.weight[[3, 49, 0]])
    torch.testing.assert_close(head(hidden), hidden @ embedding.weight.T, atol=1e-4, rtol=1e-5)
    assert ParallelLMHead(50, 32, DTYPE, tied_to=None).weight.shape == (50, 32)
