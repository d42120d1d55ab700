import pytest
import reference
import torch
from torch import Tensor

from nanovllm import ops

EPS = 1e-5


def make(rows: int, n: int, k: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out (NaN), x, weight, bias"""
    if not ops.decode_linear_runs_on(torch.device(device)):
        pytest.skip("decode_linear is for Hopper")
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(s, device=device).to(dtype) for s in ((rows, k), (n, k), (n,)))
    return x.new_full((rows, n), float("nan")), x, weight, bias


def linear_silu_and_mul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return reference.silu_and_mul(reference.linear(x, weight, bias))


@pytest.mark.parametrize("rows", [1, 3, 16, 17, 40, 64, 65, 131, 256])
@pytest.mark.parametrize("n, k", [(1, 8), (37, 64), (130, 200), (1024, 1024), (576, 1536)])
def test_accuracy(device: str, dtype: torch.dtype, rows: int, n: int, k: int) -> None:
    out, x, weight, bias = make(rows, n, k, device, dtype)
    ops.decode_linear(out, x, weight)
    reference.assert_accurate(out, reference.linear, x, weight, None)
    ops.decode_linear(out, x, weight, bias, weight_complete=True)
    reference.assert_accurate(out, reference.linear, x, weight, bias)


@pytest.mark.parametrize("rows", [1, 16, 40, 200])
@pytest.mark.parametrize("n, k", [(2, 8), (74, 200), (192, 64), (1152, 576)])
def test_silu_and_mul(device: str, dtype: torch.dtype, rows: int, n: int, k: int) -> None:
    out, x, weight, bias = make(rows, n, k, device, dtype)
    weight /= k**0.5
    out = out[:, : n // 2]
    ops.decode_linear(out, x, weight, silu_and_mul=True)
    reference.assert_accurate(out, linear_silu_and_mul, x, weight, None)
    ops.decode_linear(out, x, weight, bias, silu_and_mul=True, weight_complete=True)
    reference.assert_accurate(out, linear_silu_and_mul, x, weight, bias)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [16, 64, 256])
@pytest.mark.parametrize("n, k, silu_and_mul", [(4096, 1024, False), (1024, 3072, False), (6144, 1024, True)])
def test_products_of_a_model(rows: int, n: int, k: int, silu_and_mul: bool) -> None:
    out, x, weight, _ = make(rows, n, k, "cuda", torch.bfloat16)
    weight /= k**0.5
    out = out[:, : n // 2] if silu_and_mul else out
    for _ in range(3):  # back to back: their weights are read ahead
        ops.decode_linear(out, x, weight, silu_and_mul=silu_and_mul, weight_complete=True)
    reference.assert_accurate(out, linear_silu_and_mul if silu_and_mul else reference.linear, x, weight, None)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 16, 17, 33, 64])
@pytest.mark.parametrize(
    "n, k, kind",
    [(151936, 1024, torch.bfloat16), (34832, 200, torch.bfloat16), (50000, 576, torch.float16)],
)
def test_heads(rows: int, n: int, k: int, kind: torch.dtype) -> None:
    """Weights of so many rows have a kernel of their own."""
    out, x, weight, bias = make(rows, n, k, "cuda", kind)
    wide = torch.full((rows, n + 16), float("nan"), device="cuda", dtype=kind)
    for _ in range(3):
        ops.decode_linear(out, x, weight, weight_complete=True)
    ops.decode_linear(wide[:, 8:-8], x, weight, bias)
    for got, with_bias in ((out, None), (wide[:, 8:-8], bias)):
        reference.assert_accurate(got, reference.linear, x, weight, with_bias)
    assert wide[:, :8].isnan().all() and wide[:, -8:].isnan().all()


def make_workspace() -> Tensor:
    return torch.full((ops.decode_linear_workspace_numel("cuda"),), -1, device="cuda", dtype=torch.int32)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 16, 17, 33, 64])
@pytest.mark.parametrize(
    "n, k, kind, silu_and_mul",
    [
        (5120, 5120, torch.bfloat16, False),
        (24576, 4096, torch.bfloat16, True),
        (1000, 16904, torch.float16, False),
        (4106, 4168, torch.float16, True),
        (600064, 32, torch.bfloat16, True),
    ],
)
def test_large_weights(rows: int, n: int, k: int, kind: torch.dtype, silu_and_mul: bool) -> None:
    """Tiles are shared by blocks, which leave sums for each other in the workspace."""
    out, x, weight, bias = make(rows, n, k, "cuda", kind)
    weight /= k**0.5
    out = out[:, : n // 2] if silu_and_mul else out
    workspace, first = make_workspace(), None
    for with_bias in (None, bias, bias, bias):
        out.fill_(float("nan"))
        options = {"silu_and_mul": silu_and_mul, "weight_complete": True, "workspace": workspace}
        ops.decode_linear(out, x, weight, with_bias, **options)
        if with_bias is None:
            reference.assert_accurate(out, linear_silu_and_mul if silu_and_mul else reference.linear, x, weight, None)
        elif first is None:
            reference.assert_accurate(out, linear_silu_and_mul if silu_and_mul else reference.linear, x, weight, bias)
            first = out.clone()
        else:
            reference.assert_same_bits(out, first)
    assert (workspace == -1).all()


@pytest.mark.gpu
def test_large_weights_in_a_row() -> None:
    """In a graph, of several shapes and numbers of rows: the workspace is ready again for each, and no call overtakes
    another."""
    workspace, graph = make_workspace(), torch.cuda.CUDAGraph()
    calls = []  # out, x, weight; but the first of its rows, each reads what the one before wrote
    for rows in (1, 20, 64):
        for n, k in ((4096, 5120), (12800, 4096), (5120, 12800)):
            out, x, weight, _ = make(rows, n, k, "cuda", torch.bfloat16)
            calls.append((out, x if n == 4096 else calls[-1][0], weight))

    def run() -> None:
        for out, x, weight in calls:
            ops.decode_linear(out, x, weight, weight_complete=True, workspace=workspace)

    run()
    for out, x, weight in calls:
        reference.assert_accurate(out, reference.linear, x, weight, None)
    want = [out.clone() for out, _, _ in calls]
    with torch.cuda.graph(graph):
        run()
    for _ in range(20):
        for out, _, _ in calls:
            out.fill_(float("nan"))
        graph.replay()
        for (out, _, _), expected in zip(calls, want):
            reference.assert_same_bits(out, expected)


@pytest.mark.gpu
def test_large_weights_that_are_no_numbers() -> None:
    """A NaN of any bits is a sum that arrives."""
    out, x, weight, _ = make(3, 5120, 5120, "cuda", torch.bfloat16)
    inf = float("inf")
    weight[7] = torch.full((5120,), -1, dtype=torch.int16, device="cuda").view(torch.bfloat16)  # NaNs, all ones
    weight[300], weight[301, 17], weight[302, ::2], weight[302, 1::2] = float("nan"), inf, inf, -inf
    x[2] = weight[7]
    workspace = make_workspace()
    ops.decode_linear(out, x, weight, workspace=workspace)
    want = reference.linear(x.double(), weight.double(), None)
    reference.assert_accurate(out[:2, 303:], reference.linear, x[:2], weight[303:], None)
    assert (out.isnan() == want.isnan()).all() and (out.isinf() == want.isinf()).all()
    assert (workspace == -1).all()


@pytest.mark.gpu
def test_large_weights_in_strided_rows() -> None:
    make(1, 1, 8, "cuda", torch.bfloat16)
    wide_out, wide_x, wide_weight = (torch.randn(s, 5184, device="cuda").bfloat16() for s in (5, 5, 5120))
    before, out, x, weight = wide_out.clone(), wide_out[:, 7:5127], wide_x[:, 16:5136], wide_weight[:, 24:5144]
    ops.decode_linear(out, x, weight, workspace=make_workspace())
    reference.assert_accurate(out, reference.linear, x, weight, None)
    reference.assert_same_bits(wide_out[:, :7], before[:, :7])
    reference.assert_same_bits(wide_out[:, 5127:], before[:, 5127:])


@pytest.mark.gpu
@pytest.mark.parametrize("silu_and_mul", [False, True])
@pytest.mark.parametrize("rows", [3, 40])
def test_large_weights_take_the_rest_of_a_norm(rows: int, silu_and_mul: bool) -> None:
    n, k = 4096, 4168
    out, residual, weight, bias = make(rows, n, k, "cuda", torch.bfloat16)
    out, weight = out[:, : n // 2] if silu_and_mul else out, weight / k**0.5
    norm_weight = torch.rand(k, device="cuda").bfloat16()
    squares = torch.zeros(ops.decode_squares_shape(k, rows), device="cuda")
    for i, part in enumerate(residual.float().split(64, dim=1)):
        squares[i] = part.square().sum(1)
    options = {"silu_and_mul": silu_and_mul, "workspace": make_workspace()}
    ops.decode_linear(out, residual * norm_weight, weight, bias, squares, EPS, **options)

    def of_normed(residual: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        linear = linear_silu_and_mul if silu_and_mul else reference.linear
        return linear(reference.rms_norm(residual, norm_weight, EPS), weight, bias)

    reference.assert_accurate(out, of_normed, residual, norm_weight, weight, bias)


@pytest.mark.parametrize("rows", [3, 40, 70])
@pytest.mark.parametrize("k", [8, 200, 576])
def test_the_rest_of_a_norm(device: str, dtype: torch.dtype, rows: int, k: int) -> None:
    out, residual, weight, bias = make(rows, 130, k, device, dtype)
    norm_weight = torch.rand(k, device=device).to(dtype)
    squares = torch.zeros(ops.decode_squares_shape(k, rows), device=device)
    for i, part in enumerate(residual.float().split(64, dim=1)):
        squares[i] = part.square().sum(1)
    ops.decode_linear(out, residual * norm_weight, weight, bias, squares, EPS)

    def normed_linear(residual: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return reference.linear(reference.rms_norm(residual, norm_weight, EPS), weight, bias)

    reference.assert_accurate(out, normed_linear, residual, norm_weight, weight, bias)


def test_strided_rows(device: str, dtype: torch.dtype) -> None:
    make(1, 1, 8, device, dtype)
    wide_out, wide_x, wide_weight = (torch.randn(s, 104, device=device).to(dtype) for s in (5, 5, 32))
    before, out, x, weight = wide_out.clone(), wide_out[:, 7:39], wide_x[:, 16:80], wide_weight[:, 24:88]
    ops.decode_linear(out, x, weight)
    reference.assert_accurate(out, reference.linear, x, weight, None)
    reference.assert_same_bits(wide_out[:, :7], before[:, :7])
    reference.assert_same_bits(wide_out[:, 39:], before[:, 39:])


def test_empty_dimensions(device: str, dtype: torch.dtype) -> None:
    for rows, n in ((0, 4), (3, 0)):
        ops.decode_linear(*make(rows, n, 8, device, dtype))


def test_errors() -> None:
    out, x, weight, bias = make(3, 6, 16, "cpu", torch.float32)
    cases = [
        (make(257, 6, 16, "cpu", torch.float32), "x: expected at most 256 rows, got 257"),
        ((out, x[:, 1:], weight[:, 1:]), "x: expected in_features that 8 divides, got 15"),
        ((out, x[:, :0], weight[:, :0]), "x: expected in_features that 8 divides, got 0"),
        ((out, x, weight[:, 8:]), "weight: expected in_features = 16 (from x) in dimension 1, got 8 of shape [6, 8]"),
        ((out[:, 1:], x, weight), "out: expected out_features = 6 (from weight) in dimension 1, got 5"),
        ((out, x, weight, bias[1:]), "bias: expected out_features = 6 (from weight) in dimension 0, got 5"),
        ((out, x, weight, None, out), "squares: expected size 1 in dimension 0, got 3 of shape [3, 6]"),
        ((out, x.double(), weight), "x: expected dtype float32 or bfloat16 on CPU, got float64"),
        ((out, x, weight.bfloat16()), "weight: expected dtype float32, got bfloat16"),
        ((out, x, weight.T.contiguous().T), "weight: expected stride 1 in the last dimension, got 6"),
    ]
    for args, message in cases:
        with pytest.raises(RuntimeError) as error:
            ops.decode_linear(*args)
        assert str(error.value).startswith("decode_linear: " + message)
    for args, message in [
        ((out, x, weight), "out: expected size 3 in dimension 1, got 6 of shape [3, 6]"),
        ((out, x, weight[1:]), "weight: expected as many gate rows as up rows, got 5 rows"),
    ]:
        with pytest.raises(RuntimeError) as error:
            ops.decode_linear(*args, silu_and_mul=True)
        assert str(error.value).startswith("decode_linear: " + message)


@pytest.mark.gpu
def test_errors_of_alignment() -> None:
    out, x, weight, _ = make(3, 6, 24, "cuda", torch.bfloat16)
    with pytest.raises(RuntimeError, match="decode_linear: x: expected an address that 16 divides"):
        ops.decode_linear(out, x[:, 1:17], weight[:, :16])
    wide = weight.new_empty(6, 25)
    with pytest.raises(RuntimeError, match="weight: expected a row stride that 8 divides, got 25"):
        ops.decode_linear(out, x, wide[:, :24])


@pytest.mark.gpu
def test_errors_of_the_workspace() -> None:
    out, x, weight, _ = make(3, 6, 24, "cuda", torch.bfloat16)
    workspace = make_workspace()
    for wrong, message in (
        (workspace[1:], "workspace: expected at least"),
        (workspace.float(), "workspace: expected dtype int32, got float32"),
        (torch.zeros(workspace.numel() + 1, device="cuda", dtype=torch.int32)[1:], "expected an address that 16"),
    ):
        with pytest.raises(RuntimeError, match=message):
            ops.decode_linear(out, x, weight, workspace=wrong)
