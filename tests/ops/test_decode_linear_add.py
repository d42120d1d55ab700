import pytest
import reference
import torch
from torch import Tensor

from nanovllm import ops

EPS = 1e-5


def make(rows: int, n: int, k: int, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The arguments; scaled and squares are NaN."""
    if not ops.decode_linear_runs_on(torch.device(device)):
        pytest.skip("decode_linear_add is for Hopper")
    torch.manual_seed(0)
    shapes = {"residual": (rows, n), "x": (rows, k), "weight": (n, k), "bias": (n,), "norm_weight": (n,)}
    args = {name: torch.randn(shape, device=device).to(dtype) for name, shape in shapes.items()}
    args["scaled"] = torch.full_like(args["residual"], float("nan"))
    args["squares"] = torch.full(ops.decode_squares_shape(n, rows), float("nan"), device=device)
    return args


@pytest.mark.parametrize("rows", [1, 16, 40, 64, 70, 256])
@pytest.mark.parametrize("n, k", [(8, 8), (72, 200), (1024, 512)])
def test_results(device: str, dtype: torch.dtype, rows: int, n: int, k: int) -> None:
    args = make(rows, n, k, device, dtype)
    product = torch.empty_like(args["residual"])
    ops.decode_linear(product, args["x"], args["weight"], args["bias"])
    residual = args["residual"] + product
    ops.decode_linear_add(**args, weight_complete=True)
    reference.assert_same_bits(args["residual"], residual, "residual")
    reference.assert_same_bits(args["scaled"], residual * args["norm_weight"], "scaled")
    squares = torch.stack([part.double().square().sum(1) for part in residual.split(64, dim=1)])
    reference.assert_close(args["squares"], squares, atol=0, rtol=1e-5, what="squares")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 17, 64])
@pytest.mark.parametrize("n, k", [(5120, 4096), (1032, 16904)])
def test_large_weights(rows: int, n: int, k: int) -> None:
    args = make(rows, n, k, "cuda", torch.bfloat16)
    workspace = torch.full((ops.decode_linear_workspace_numel("cuda"),), -1, device="cuda", dtype=torch.int32)
    product = torch.empty_like(args["residual"])
    ops.decode_linear(product, args["x"], args["weight"], args["bias"], workspace=workspace)
    reference.assert_accurate(product, reference.linear, args["x"], args["weight"], args["bias"])
    residual = args["residual"] + product
    ops.decode_linear_add(**args, weight_complete=True, workspace=workspace)
    reference.assert_same_bits(args["residual"], residual, "residual")
    reference.assert_same_bits(args["scaled"], residual * args["norm_weight"], "scaled")
    squares = torch.stack([part.double().square().sum(1) for part in residual.split(64, dim=1)])
    reference.assert_close(args["squares"], squares, atol=0, rtol=1e-5, what="squares")


def test_with_its_reader(device: str, dtype: torch.dtype) -> None:
    """The two halves of a norm are the norm."""
    args = make(40, 576, 64, device, dtype)
    weight = torch.randn(72, 576, device=device).to(dtype)
    out = weight.new_full((40, 72), float("nan"))
    ops.decode_linear_add(**args | {"bias": None})
    ops.decode_linear(out, args["scaled"], weight, None, args["squares"], EPS)

    def normed_linear(residual: Tensor, norm_weight: Tensor, weight: Tensor) -> Tensor:
        return reference.linear(reference.rms_norm(residual, norm_weight, EPS), weight, None)

    reference.assert_accurate(out, normed_linear, args["residual"], args["norm_weight"], weight)


def test_strided_rows(device: str, dtype: torch.dtype) -> None:
    args = make(5, 104, 64, device, dtype)
    wide = {name: args[name].clone() for name in ("residual", "scaled")}
    before = {name: tensor.clone() for name, tensor in wide.items()}
    args |= {name: tensor[:, 16:80] for name, tensor in wide.items()}
    args |= {"weight": args["weight"][:64], "bias": None, "norm_weight": args["norm_weight"][:64]}
    product, squares = torch.empty_like(args["residual"]), args["squares"][:1]
    ops.decode_linear(product, args["x"], args["weight"])
    residual = args["residual"] + product
    ops.decode_linear_add(**args | {"squares": squares})
    reference.assert_same_bits(args["residual"], residual)
    reference.assert_same_bits(args["scaled"], residual * args["norm_weight"])
    for name, tensor in wide.items():
        reference.assert_same_bits(tensor[:, :16], before[name][:, :16], name)
        reference.assert_same_bits(tensor[:, 80:], before[name][:, 80:], name)


def test_no_tokens(device: str, dtype: torch.dtype) -> None:
    ops.decode_linear_add(**make(0, 8, 8, device, dtype))


def test_errors() -> None:
    args = make(3, 16, 8, "cpu", torch.float32)
    cases = [
        ({"residual": args["residual"][:2]}, "residual: expected num_rows = 3 (from x) in dimension 0, got 2"),
        ({"scaled": args["scaled"][:, 8:]}, "scaled: expected out_features = 16 (from weight) in dimension 1, got 8"),
        ({"scaled": args["scaled"].double()}, "scaled: expected dtype float32, got float64"),
        ({"squares": args["squares"][:, 1:]}, "squares: expected num_rows = 3 (from x) in dimension 1, got 2"),
        ({"squares": args["squares"].double()}, "squares: expected dtype float32, got float64"),
        ({"norm_weight": args["norm_weight"][8:]}, "norm_weight: expected out_features = 16 (from weight)"),
        ({"weight": args["weight"][1:], "bias": None}, "weight: expected out_features that 8 divides, got 15"),
    ]
    for changed, message in cases:
        with pytest.raises(RuntimeError) as error:
            ops.decode_linear_add(**args | changed)
        assert str(error.value).startswith("decode_linear_add: " + message)
