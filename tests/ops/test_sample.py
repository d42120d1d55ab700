from typing import Any

import pytest
import reference
import torch
from torch import Tensor

from nanovllm import ops
from nanovllm.engine.staging import device_view

DTYPES = {"temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32}
OFF = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0}
INF, NAN = float("inf"), float("nan")


def sample(logits: Tensor, seeds: Any = 0, positions: Any = 0, **params: Any) -> Tensor:
    """token ids; parameters are one value for all rows, or a list."""
    rows, device = len(logits), logits.device

    def column(value: Any, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(value, dtype=dtype).to(device).expand(rows).contiguous()

    assert params.keys() <= OFF.keys()
    values = [column(params.get(name, OFF[name]), dtype) for name, dtype in DTYPES.items()]
    token_ids = torch.full((rows,), -7, device=device)
    ops.sample(token_ids, logits, *values, column(seeds, torch.int64), column(positions, torch.int64))
    return token_ids


def test_reference_philox_against_the_known_answers_of_random123() -> None:
    ones = 0xFFFFFFFF
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0]
    answers = [
        ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([ones] * 4, (ones, ones), [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (pi[:4], (pi[4], pi[5]), [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
    ]
    for counter, key, words in answers:
        assert reference.philox(torch.tensor(counter), key).tolist() == words


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF])
@pytest.mark.parametrize("position", [0, 1, 2**31, 2**32 + 5, 2**62])
def test_randomness_is_that_of_the_definition(device: str, seed: int, position: int) -> None:
    """Flat logits, in every vocabulary that ends before the last token picked."""
    vocab = 1000
    while vocab > 0:
        want, lead = reference.race(torch.zeros(vocab).double(), seed, position, 0)
        assert lead > 1e-6
        assert sample(torch.zeros(1, vocab, device=device), seed, position).item() == want
        vocab = want


@pytest.mark.parametrize("vocab", [1, 3, 8, 9, 63, 64, 65, 1009, 20011])
@pytest.mark.parametrize("top_k, top_p, min_p", [(-1, 1, 0), (5, 1, 0), (-1, 0.7, 0), (-1, 1, 0.1), (40, 0.8, 0.02)])
def test_tokens_of_the_reference(device: str, vocab: int, top_k: int, top_p: float, min_p: float) -> None:
    torch.manual_seed(0)
    rows, temperature = 32, 0.7
    for dtype in (torch.float32, torch.bfloat16):
        logits = (3 * torch.randn(rows, vocab, device=device)).to(dtype)
        seeds = torch.arange(rows) * 7919
        got = sample(logits, seeds, 11, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        for b in range(rows):
            x = logits[b].double().cpu() / temperature
            want, lead = reference.drawn_token(x, top_k, top_p, min_p, int(seeds[b]), 11)
            assert int(got[b]) == want or lead < 1e-4, f"row {b}, {dtype}"  # smaller ones are decided by rounding


@pytest.mark.parametrize("params", [{}, {"top_p": 0.7}, {"min_p": 0.1}])
@pytest.mark.parametrize("case", ["rising", "falling", "masked", "mostly masked", "far", "cold"])
def test_rows_whose_first_tokens_mislead(device: str, case: str, params: dict[str, float]) -> None:
    """The CUDA operator draws before it knows the greatest logit."""
    torch.manual_seed(0)
    rows, vocab, temperature = 8, 20011, 1.0
    logits = 3 * torch.randn(rows, vocab)
    if case in ("rising", "falling"):
        logits += torch.linspace(-400, 400, vocab) * (1 if case == "rising" else -1)
    elif case == "masked":
        logits[:, :9000] = -INF
    elif case == "mostly masked":
        logits[:, torch.rand(vocab) < 0.999] = -INF
        logits[:, 7::1000] = NAN
    elif case == "far":
        logits[: rows // 2] += 5000
        logits[rows // 2 :] -= 5000
    elif case == "cold":
        logits, temperature = 10 + 1e-3 * logits, 5e-4
    got = sample(logits.to(device), torch.arange(rows), 3, temperature=temperature, **params)
    for b in range(rows):
        x = logits[b].double().nan_to_num(nan=-INF, neginf=-INF) / temperature
        want, lead = reference.drawn_token(x, -1, params.get("top_p", 1.0), params.get("min_p", 0.0), b, 3)
        assert int(got[b]) == want or lead < 1e-4, f"row {b}"


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [151936, 151937, 500003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_gives_the_tokens_of_cpu(vocab: int, dtype: torch.dtype) -> None:
    """Peaked, usual and flat rows; 500,003 tokens have an index entry for two steps."""
    torch.manual_seed(0)
    rows = 30
    logits = (torch.randn(rows, vocab) * torch.tensor([1e-3, 1.0, 3.0]).repeat(10)[:, None]).to(dtype)
    params = {
        "temperature": [1.0] * 6 + [0.0, 0.3, 1.7, 1e10, 0.6, 0.6] + [0.8] * 18,
        "top_k": [-1] * 12 + [1, 20, 50, 4096, 4097, 100000] * 2 + [vocab - 1, 50, 20, 3, 50, 50],
        "top_p": [1.0] * 3 + [0.9, 0.5, 0.01] + [1.0] * 12 + [0.95, 0.9, 0.3, 0.8, 0.0, 0.99] * 2,
        "min_p": [0.0] * 24 + [0.0, 0.0, 0.0, 0.3, 0.05, 0.01],
    }
    seeds, positions = torch.arange(rows) * 7919 - 3, torch.arange(rows) * 1000003
    want = sample(logits, seeds, positions, **params)
    got = sample(logits.cuda(), seeds, positions, **params)
    assert got.tolist() == want.tolist()


def test_greedy_is_argmax_with_the_lowest_id_on_ties(device: str) -> None:
    """Known failure F1."""
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randn(6, 70001, device=device).to(dtype)
        logits[2] = 1.0
        logits[3, [69999, 40, 41]] = 9.0
        logits[4, 0] = logits[4, 70000] = 9.0
        got = sample(logits, temperature=[0.0, 1.0, 0.0, 0.0, 0.0, 1e-45])
        want = logits.float().argmax(-1)
        assert got[[0, 5]].tolist() == want[[0, 5]].tolist()
        assert got[2:5].tolist() == [0, 40, 0]
        tiny = sample(logits, temperature=[1e-6, 1e-6, 1.0, 1.0, 1.0, 1e-30])
        assert tiny[[0, 1, 5]].tolist() == want[[0, 1, 5]].tolist()


def test_top_p_keeps_the_token_that_crosses(device: str) -> None:
    """Known failure F2."""
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4], device=device).log().expand(400, 4)
    seeds = torch.arange(400)
    for params, kept in (
        ({"top_p": 0.6}, {2, 3}),
        ({"top_p": 0.0}, {3}),
        ({"top_p": 0.95}, {0, 1, 2, 3}),
        ({"top_k": 1}, {3}),
        ({"top_k": 3}, {1, 2, 3}),
        ({"top_k": 3, "top_p": 0.75}, {2, 3}),  # of 0.9: 0.7 is less than 0.75 * 0.9
        ({"min_p": 0.6}, {2, 3}),
        ({"min_p": 1.0}, {3}),
        ({"min_p": 0.6, "top_p": 0.5}, {3}),  # of 0.7
    ):
        assert set(sample(logits, seeds, **params).tolist()) == kept, params


def test_ties_at_the_border_are_kept(device: str) -> None:
    logits = torch.zeros(400, 300, device=device)
    logits[:, 250:] = 2.0  # 50 of one value
    seeds = torch.arange(400)
    for params in ({"top_k": 1}, {"top_k": 49}, {"top_p": 0.1}, {"top_k": 7, "top_p": 0.01}, {"min_p": 0.9}):
        got = set(sample(logits, seeds, **params).tolist())
        assert min(got) >= 250 and len(got) > 40, params


@pytest.mark.parametrize("ties", [200, 400, 5000])
def test_many_ties_at_the_border_are_kept(device: str, ties: int) -> None:
    """Fewer and more than the 256 tokens that the CUDA operator gathers, spread over the vocabulary."""
    logits = torch.zeros(300, 70001, device=device)
    logits[:, 11 :: 70001 // ties] = 30.0
    logits[:, 5] = 30.5
    for params in ({"top_k": 2}, {"top_k": 150}, {"top_k": 7, "top_p": 0.5}):
        got = sample(logits, torch.arange(300), **params)
        assert (logits.gather(1, got[:, None]) >= 30).all(), params
        assert len(set(got.tolist())) > 150, params


@pytest.mark.parametrize("vocab", [100, 70001])
def test_filters_that_are_off_change_nothing(device: str, vocab: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(50, vocab, device=device)
    seeds = torch.arange(50)
    plain = sample(logits, seeds)
    for top_k in (0, -1, -5, vocab, vocab + 1, 2**31 - 1):
        for top_p in (1.0, 1.5):
            assert torch.equal(sample(logits, seeds, top_k=top_k, top_p=top_p, min_p=0.0), plain)


def test_a_row_does_not_depend_on_the_batch(device: str) -> None:
    """Known failure F9."""
    torch.manual_seed(0)
    logits = 3 * torch.randn(9, 70001, device=device)
    params = {
        "temperature": [0.0, 1.0, 0.5, 2.0, 1.0, 1.0, 1.0, 0.9, 1.0],
        "top_k": [-1, -1, 50, -1, 3000, -1, 50, -1, 0],
        "top_p": [1.0, 1.0, 1.0, 0.9, 1.0, 0.5, 0.9, 1.0, 1.0],
        "min_p": [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.02, 0.1, 0.0],
    }
    seeds, positions = torch.arange(9) - 4, torch.arange(9) * 3
    together = sample(logits, seeds, positions, **params)
    for b in range(9):
        alone = {name: values[b] for name, values in params.items()}
        assert sample(logits[b : b + 1], seeds[b], positions[b], **alone).item() == together[b].item()


@pytest.mark.parametrize("top_k, top_p, min_p", [(-1, 1, 0), (-1, 0.6, 0), (-1, 1, 0.1), (20, 0.5, 0.02), (30, 1, 0)])
def test_distribution(device: str, top_k: int, top_p: float, min_p: float) -> None:
    """Chi-square of fixed seeds against softmax, the likely tokens spread over the groups and together in two of them:
    99.9% of honest samplers' draws are below the limit."""
    draws, vocab = 20000, 50
    torch.manual_seed(0)
    scattered = torch.randn(vocab).double()
    for x in (scattered, scattered.sort().values):
        logits = (x * 0.8).float().to(device).expand(draws, vocab)
        params = {"temperature": 0.8, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        by_seed = sample(logits, torch.arange(draws), 5, **params)
        by_position = sample(logits, 5, torch.arange(draws), **params)
        kept = reference.kept_tokens(x, top_k, top_p, min_p)
        expected = x[kept].softmax(-1) * draws
        for got in (by_seed, by_position):
            counts = torch.bincount(got.cpu(), minlength=vocab)
            assert counts[~kept].sum() == 0
            chi_square = ((counts[kept] - expected) ** 2 / expected).sum().item()
            freedom = len(expected) - 1
            limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3  # Wilson, Hilferty
            assert chi_square < limit, f"{freedom} degrees of freedom"


def test_distribution_of_what_top_k_leaves(device: str) -> None:
    draws = 20000
    logits = torch.linspace(-3, 3, 5000, device=device).expand(draws, 5000)
    got = sample(logits, torch.arange(draws), top_k=10, temperature=0.01).cpu()
    expected = (torch.linspace(-3, 3, 5000, dtype=torch.float64)[-10:] / 0.01).softmax(-1) * draws
    counts = torch.bincount(got - 4990, minlength=10)
    assert ((counts - expected) ** 2 / expected).sum().item() < 27.88  # 9 degrees of freedom, 99.9%


def test_masked_and_broken_logits(device: str) -> None:
    logits = torch.full((7, 130), -INF, device=device)
    logits[1, 77] = -50.0
    logits[2] = NAN
    logits[3] = NAN
    logits[3, 129] = -3.0
    logits[4, [5, 9]] = INF
    logits[5, [64, 128]] = torch.tensor([1.0, NAN], device=device)
    logits[6, ::2] = 0.0
    for params in ({}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5, "top_k": 3, "top_p": 0.9}):
        for seed in range(20):
            got = sample(logits, seed, **params).tolist()
            assert got[:6] == [0, 77, 0, 129, 5, 64], params
            assert got[6] % 2 == 0, params


def test_a_nearly_certain_token_is_never_lost(device: str) -> None:
    """No wait is 0: a word near 2^32 must not round u to 1 and win against a lead of 60."""
    logits = torch.zeros(300, 70001, device=device)
    logits[:, 12345] = 60.0
    assert (sample(logits, torch.arange(300)) == 12345).all()


def test_extreme_logits_and_temperatures(device: str) -> None:
    logits = torch.tensor([[3e38, -3e38, 2.9e38, 0.0]], device=device).expand(8, 4)
    temperature = [1e-38, 1e-10, 1.0, 1e10, 0.0, 1e-6, 100.0, 2.0]
    assert sample(logits, torch.arange(8), temperature=temperature).tolist() == [0] * 8
    flat = sample(torch.randn(200, 4, device=device), torch.arange(200), temperature=1e10)
    assert set(flat.tolist()) == {0, 1, 2, 3}


def test_logits_that_hardly_differ(device: str) -> None:
    """Not even 1 / x of what is left is finite."""
    torch.manual_seed(0)
    logits = 3e-40 * torch.randn(3, 20000, device=device)
    got = sample(logits, torch.arange(3), top_k=16383, top_p=0.05)
    assert (logits.gather(1, got[:, None]) >= logits.quantile(0.9, dim=1, keepdim=True)).all()


def test_strided_rows_and_no_rows(device: str) -> None:
    torch.manual_seed(0)
    wide = torch.randn(5, 300, device=device)
    view = wide[:, 50:251]
    assert torch.equal(sample(view, torch.arange(5)), sample(view.contiguous(), torch.arange(5)))
    assert sample(wide[:0]).shape == (0,)


def test_rows_left_out_and_copies(device: str) -> None:
    """Rows with a negative position keep what they have, whatever their logits and parameters are."""
    torch.manual_seed(0)
    logits = torch.randn(5, 300, device=device)
    logits[[1, 4]] = NAN
    want = sample(logits, torch.arange(5), torch.arange(5))
    f32 = torch.ones(5, device=device)
    positions = torch.tensor([0, -1, 2, 3, -1], device=device)
    token_ids = torch.full((5,), -7, device=device)
    host = torch.full((3, 8), -9, pin_memory=device != "cpu")
    seen = device_view(host, torch.device(device))
    params = f32, (0 * f32).int(), f32, 0 * f32, torch.arange(5, device=device), positions
    copy = torch.tensor([2], dtype=torch.int32, device=device)
    ops.sample(token_ids, logits, *params, seen[:, 1:6], copy)
    if device != "cpu":
        torch.cuda.synchronize()
    kept = [want[0].item(), -7, want[2].item(), want[3].item(), -7]
    assert token_ids.tolist() == kept
    assert host[:2].eq(-9).all() and host[2].tolist() == [-9, *(-9 if t == -7 else t for t in kept), -9, -9]


def test_errors() -> None:
    def arguments() -> list[Tensor]:
        logits, ids, f32 = torch.zeros(3, 10), torch.zeros(3, dtype=torch.int64), torch.ones(3)
        return [ids, logits, f32, f32.int(), f32.clone(), f32.clone(), ids.clone(), ids.clone(), None, None]

    cases = [
        (0, torch.zeros(3), "token_ids: expected dtype int64, got float32"),
        (1, torch.zeros(3, 10).double(), "logits: expected dtype float32 or bfloat16, got float64"),
        (1, torch.zeros(3, 0), "logits: expected a vocab of 1 to 2147483647, got 0"),
        (1, torch.zeros(10, 3).T, "logits: expected stride 1 in the last dimension, got 3"),
        (2, torch.ones(2), "temperature: expected batch = 3 (from logits) in dimension 0, got 2"),
        (3, torch.ones(3), "top_k: expected dtype int32, got float32"),
        (6, torch.ones(6, dtype=torch.int64)[::2], "seeds: expected a contiguous tensor, got a strided one"),
        (8, torch.zeros(2, 3, dtype=torch.int64), "copy: expected a tensor as copies is, got None"),
        (9, torch.zeros(1, dtype=torch.int32), "copy: expected None as copies is, got a tensor"),
    ]
    for i, value, message in cases:
        args = arguments()
        args[i] = value
        with pytest.raises(RuntimeError) as error:
            ops.sample(*args)
        assert str(error.value).startswith("sample: " + message)
    args = [*arguments()[:8], torch.zeros(2, 3, dtype=torch.int64), torch.tensor([2], dtype=torch.int32)]
    with pytest.raises(RuntimeError, match="sample: copy: expected 0 to 1, got 2"):
        ops.sample(*args)
