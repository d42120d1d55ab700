"""What every operator must compute, in plain torch, and how results are compared.

A reference works in the dtype of its inputs. Called with inputs raised to float64 it is the truth; called
with the operator's own inputs it is the naive version, which rounds after every step. An operator may be at
most twice as far from the truth as the naive version is, plus one unit in the last place (`assert_accurate`).
Data movement is held to equal bits (`assert_same_bits`).
"""

import itertools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# ---- normalisation, activation, rotary ----


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def add_rms_norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    residual = residual + x
    return rms_norm(residual, weight, eps), residual


def silu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def rotary_embedding(x: Tensor, cos_sin: Tensor, positions: Tensor) -> Tensor:
    """x [T, H, D]: feature i of the first half of rotary_dim pairs with feature i of the second (NeoX)."""
    rotary_dim = cos_sin.size(1)
    cos, sin = cos_sin[positions].to(x.dtype)[:, None].chunk(2, dim=-1)
    first, second = x[..., :rotary_dim].chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, x[..., rotary_dim:]], dim=-1)


def cos_sin_table(max_pos: int, rotary_dim: int, base: float = 10000.0, device: str = "cpu") -> Tensor:
    """[max_pos, rotary_dim] fp32: cos half, then sin half."""
    inv_freq = base ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angles = torch.arange(max_pos, dtype=torch.float64)[:, None] * inv_freq
    return torch.cat([angles.cos(), angles.sin()], dim=-1).float().to(device)


def qk_norm_rope(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos_sin: Tensor,
    positions: Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    eps: float,
) -> Tensor:
    """qkv with q and k normalised per head (where there is a weight), then rotated; v as it was."""
    heads = qkv.unflatten(1, (num_q_heads + 2 * num_kv_heads, -1))
    q, k, v = heads.split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)
    q = q if q_weight is None else rms_norm(q, q_weight, eps)
    k = k if k_weight is None else rms_norm(k, k_weight, eps)
    rotated = [rotary_embedding(x, cos_sin, positions) for x in (q, k)]
    return torch.cat([*rotated, v], dim=1).flatten(1)


# ---- paged cache ----


def slot_mapping(
    block_tables: Tensor, cu_seqlens_q: Tensor, start_pos: Tensor, block_size: int, num_tokens: int
) -> tuple[Tensor, Tensor]:
    """positions, slots: [num_tokens] i64; rows past the last sequence are padding (0, -1)."""
    positions, slots = [0] * num_tokens, [-1] * num_tokens
    for b, (begin, end) in enumerate(zip(cu_seqlens_q.tolist(), cu_seqlens_q.tolist()[1:])):
        for t in range(begin, end):
            pos = int(start_pos[b]) + t - begin
            block = int(block_tables[b, pos // block_size])
            positions[t] = pos
            slots[t] = block * block_size + pos % block_size if block >= 0 else -1
    i64 = {"dtype": torch.int64, "device": block_tables.device}
    return torch.tensor(positions, **i64), torch.tensor(slots, **i64)


def store_kv_cache(x: Tensor, cache: Tensor, slots: Tensor, scale: Tensor | None = None) -> Tensor:
    """A copy of cache [N, block, Hkv, D] with x [T, Hkv, D] (over its scale, for float8) in its slots."""
    kept = slots >= 0
    block, offset = slots[kept] // cache.size(1), slots[kept] % cache.size(1)
    if cache.dtype == torch.float8_e4m3fn:
        limit = torch.finfo(cache.dtype).max
        x = (x.float() / (1.0 if scale is None else scale)).clamp(-limit, limit).to(cache.dtype)
    out = cache.clone()
    out.view(torch.uint8)[block, offset] = x[kept].contiguous().view(torch.uint8)
    return out


def paged_rows(cache: Tensor, block_table: Tensor, context_len: int) -> Tensor:
    """[context_len, Hkv, D]: what a sequence stored, in the order of its tokens."""
    num_blocks = -(-context_len // cache.size(1))
    return cache[block_table[:num_blocks].long()].flatten(0, 1)[:context_len]


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal, aligned to the end: query i of q [Tq, Hq, D] sees Tk - Tq + i + 1 keys of k, v [Tk, Hkv, D]."""
    group = q.size(1) // k.size(1)
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    num_q, num_k = q.size(0), k.size(0)
    visible = torch.ones(num_q, num_k, dtype=torch.bool, device=q.device).tril(num_k - num_q)
    probs = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", probs, v)


# ---- projections ----


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias)


# ---- sampling ----


def philox(counter: Tensor, key: tuple[int, int]) -> Tensor:
    """Philox4x32-10 of counters [..., 4] int64 (each 32 bits): words [..., 4]."""
    mask = 0xFFFFFFFF
    c0, c1, c2, c3 = counter.unbind(-1)
    for i in range(10):
        k0, k1 = (key[0] + i * 0x9E3779B9) & mask, (key[1] + i * 0xBB67AE85) & mask
        (high0, low0), (high1, low1) = mul_32(c0, 0xD2511F53), mul_32(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return torch.stack([c0, c1, c2, c3], dim=-1)


def mul_32(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a * b, both below 2^32, without leaving int64."""
    mask = 0xFFFF
    low = a * (b & mask)  # below 2^48
    middle = a * (b >> 16) + (low >> 16)  # below 2^49
    return middle >> 16, (middle & mask) << 16 | low & mask


def uniforms(first: int, count: int, seed: int, position: int, i: int) -> Tensor:
    """[count] float64: u(n, i) of csrc/common/philox.h, n from `first` on, which is a multiple of 4."""
    counter = torch.zeros(-(-count // 4), 4, dtype=torch.int64)
    counter[:, 0] = torch.arange(len(counter)) + first // 4
    counter[:, 1], counter[:, 2], counter[:, 3] = position & 0xFFFFFFFF, position >> 32 & 0xFFFFFFFF, i
    words = philox(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)).flatten()[:count]
    return (words.double() + 0.5) / 2**32


def race(x: Tensor, seed: int, position: int, number: int) -> tuple[int, float]:
    """The token of x [vocab] float64 (-inf: takes no part) that wins a race of `sample`, and by what share of its time:
    a kernel may differ where that is the size of its rounding."""
    weights = torch.nn.functional.pad((x - x.max()).exp(), (0, -len(x) % 8)).view(-1, 8)
    group, lead = _first(-uniforms(0, len(weights), seed, position, 2 * number).log() / weights.sum(1))
    place, in_group = _first(-uniforms(8 * group, 8, seed, position, 2 * number + 1).log() / weights[group])
    return 8 * group + place, min(lead, in_group)


def _first(times: Tensor) -> tuple[int, float]:
    best = times.topk(min(2, len(times)), largest=False).values
    return int(times.argmin()), float(best[-1] / best[0] - 1) if len(best) == 2 else 1.0


def drawn_token(x: Tensor, top_k: int, top_p: float, min_p: float, seed: int, position: int) -> tuple[int, float]:
    """The token that `sample` draws from x [vocab] float64, and the smallest of the leads that decided it."""
    kept = kept_tokens(x, top_k, top_p, min_p)
    before_top_p = kept_tokens(x, top_k, 1.0, min_p)
    taking_part = before_top_p if 0 < top_k < len(x) else torch.ones_like(kept)
    lead = 1.0
    for number in itertools.count():
        token, own = race(x.masked_fill(~taking_part, float("-inf")), seed, position, number)
        lead = min(lead, own)
        if kept[token]:
            return token, lead
        taking_part = before_top_p & (x > x[token])
    raise AssertionError("unreachable")


def kept_tokens(x: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """[vocab] bool: what min-p, then top-k, then top-p leave of x [vocab] float64."""
    probs = x.softmax(-1)
    kept = probs >= min_p * probs.max()
    if 0 < top_k < int(kept.sum()):
        kept &= x >= x[kept].topk(top_k).values[-1]
    if top_p < 1:
        values = x[kept].sort(descending=True).values
        mass = values.softmax(-1).cumsum(-1)
        kept &= x >= values[int((mass < top_p).sum().clamp(max=len(values) - 1))]
    return kept


# ---- comparison ----


def raised(args: tuple[Any, ...]) -> list[Any]:
    """The arguments with floating point tensors in float64."""
    return [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]


def assert_accurate(
    got: Tensor | tuple[Tensor, ...], reference: Callable[..., Any], *args: Any, times: float = 2
) -> None:
    """`got` is at most `times` as far from the truth in float64 as `reference(*args)` in the operator's dtype.

    NANOVLLM_REFERENCE_ON_CPU=1 computes both on the CPU: under racecheck cuBLAS's products die.
    """
    if os.environ.get("NANOVLLM_REFERENCE_ON_CPU"):
        got = got.cpu() if isinstance(got, Tensor) else tuple(g.cpu() for g in got)
        args = tuple(a.cpu() if isinstance(a, Tensor) else a for a in args)
    want, naive = reference(*raised(args)), reference(*args)
    if isinstance(got, Tensor):
        got, want, naive = (got,), (want,), (naive,)
    for i, (g, w, n) in enumerate(zip(got, want, naive, strict=True)):
        error = (n.double() - w).abs().max().item() if w.numel() else 0.0
        assert_close(g, w, atol=times * error, rtol=torch.finfo(g.dtype).eps, what=f"result {i}")


def assert_close(got: Tensor, want: Tensor, *, atol: float, rtol: float, what: str = "result") -> None:
    """|got - want| <= atol + rtol * |want| everywhere, NaN and infinities in the same places."""
    assert got.shape == want.shape, f"{what}: expected shape {list(want.shape)}, got {list(got.shape)}"
    got, want = got.double(), want.double()
    for kind, mask in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        differs = mask(got) != mask(want)
        assert not differs.any(), f"{what}: {kind} differs in {int(differs.sum())}, first {first(differs)}"
    finite = torch.isfinite(want)
    excess = torch.where(finite, (got - want).abs() - (atol + rtol * want.abs()), -1.0)
    if excess.numel() and excess.max() > 0:
        worst = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
        passed = (excess <= 0).double().mean().item()
        raise AssertionError(
            f"{what}: worst at {worst}: got {got[worst].item():.9g}, expected {want[worst].item():.9g} "
            f"+- {atol + rtol * want[worst].abs().item():.3g}; {passed:.2%} within the limit"
        )


def assert_same_bits(got: Tensor, want: Tensor, what: str = "result") -> None:
    """Equal shape, dtype and bits: NaN equals itself, 0.0 is not -0.0."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype), (
        f"{what}: expected {list(want.shape)} {want.dtype}, got {list(got.shape)} {got.dtype}"
    )
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    differs = got.contiguous().view(raw) != want.contiguous().view(raw)
    if differs.any():
        at = first(differs)
        count = int(differs.sum())
        raise AssertionError(
            f"{what}: {count} of {got.numel()} differ, first at {at}: got {got[at]}, expected {want[at]}"
        )


def first(mask: Tensor) -> tuple[int, ...]:
    """The index of the first True."""
    return tuple(mask.nonzero()[0].tolist())
