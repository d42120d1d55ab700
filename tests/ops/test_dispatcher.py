"""Every operator through the dispatcher's consumers: opcheck, compile, export, TorchScript, CUDA graphs.

An operator enters with one function in SAMPLES that makes valid arguments; one without it fails here.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from torch import Tensor

import nanovllm.ops
from nanovllm.ops.decoder_step import POINTERS

Args = tuple[Any, ...]
DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}


def rms_norm(device: str) -> Args:
    x = torch.randn(3, 64, device=device, dtype=DTYPE[device])
    return torch.zeros_like(x), x, torch.randn_like(x[0]), 1e-6


def paged_cache(device: str, num_blocks: int, block_size: int) -> list[Tensor]:
    """k_cache and v_cache for 2 heads of 64."""
    shape = (num_blocks, block_size, 2, 64)
    return [torch.randn(shape, device=device).to(DTYPE[device]) for _ in range(2)]


def some_slots(device: str, num_tokens: int, num_slots: int) -> Tensor:
    """Distinct slots, the last one -1."""
    slots = torch.randperm(num_slots, device=device)[:num_tokens]
    slots[-1] = -1
    return slots


def add_rms_norm(device: str) -> Args:
    out, x, weight, eps = rms_norm(device)
    return out, torch.randn_like(x), x, weight, eps


def embed_rms_norm(device: str) -> Args:
    out, table, weight, eps = rms_norm(device)
    return out, torch.zeros_like(out), torch.tensor([2, 0, 2], device=device), table, weight, eps


def all_reduce(device: str) -> Args:
    """One rank alone."""
    x, residual = torch.randn(2, 3, 64, device=device).to(torch.bfloat16)
    peers, state = torch.zeros(2, device=device, dtype=torch.int64), torch.zeros(5, device=device, dtype=torch.int32)
    return torch.zeros_like(x), residual, x, torch.ones_like(x[0]), 1e-6, peers, state, 0, 0, 0, False


def silu_and_mul(device: str) -> Args:
    gate_up = torch.randn(3, 128, device=device).to(DTYPE[device])
    return torch.zeros_like(gate_up[:, :64]), gate_up


def slot_mapping(device: str) -> Args:
    positions, slots = torch.full((2, 6), -7, device=device)
    block_tables = torch.randperm(12, device=device, dtype=torch.int32).view(2, 6)
    cu_seqlens_q = torch.tensor([0, 1, 5], device=device, dtype=torch.int32)
    start_pos = torch.randint(0, 80, (2,), device=device, dtype=torch.int32)
    return positions, slots, block_tables, cu_seqlens_q, start_pos, 16


def store_kv_cache(device: str) -> Args:
    k, v = torch.randn(2, 5, 2, 64, device=device).to(DTYPE[device])
    return k, v, *paged_cache(device, 3, 16), some_slots(device, 5, 48), None, None


def rotary_embedding(device: str) -> Args:
    q = torch.randn(5, 4, 64, device=device).to(DTYPE[device])
    k = torch.randn(5, 2, 64, device=device).to(DTYPE[device])
    return q, k, reference.cos_sin_table(32, 64, device=device), torch.randint(1, 32, (5,), device=device)


def qk_norm_rope_store(device: str) -> Args:
    qkv = torch.randn(5, (4 + 2 * 2) * 64, device=device).to(DTYPE[device])
    q_weight, k_weight = torch.randn(2, 64, device=device).to(DTYPE[device])
    cos_sin, positions = rotary_embedding(device)[2:]
    cache, slots = paged_cache(device, 3, 16), some_slots(device, 5, 48)
    return qkv, q_weight, k_weight, cos_sin, positions, *cache, slots, None, None, 4, 2, 1e-6


def skinny_linear(device: str) -> Args:
    x, weight, bias = (torch.randn(s, device=device).to(DTYPE[device]) for s in ((3, 64), (32, 64), (32,)))
    return x.new_zeros(3, 32), x, weight, bias


def decode_linear(device: str) -> Args:
    if not nanovllm.ops.decode_linear_runs_on(torch.device(device)):
        pytest.skip("decode_linear is for Hopper")
    return *skinny_linear(device), None, 0.0, False, False, None


def decode_linear_add(device: str) -> Args:
    out, x, weight, bias = decode_linear(device)[:4]
    squares = torch.zeros(nanovllm.ops.decode_squares_shape(32, 3), device=device)
    return out, torch.zeros_like(out), squares, x, weight, bias, torch.randn_like(bias), False, None


def skinny_linear_gguf(device: str) -> Args:
    """Two Q8_0 blocks a row, of scale 1."""
    out, x, _, bias = skinny_linear(device)
    blocks = torch.randint(0, 256, (32, 64 // 32, 34), dtype=torch.uint8)
    blocks[..., :2] = torch.tensor([0, 60])  # 1.0 in fp16
    return out, x, blocks.view(32, -1), 8, bias


def decode_plan(device: str) -> Args:
    plan = torch.full((nanovllm.ops.decode_plan_numel(2, device),), -7, device=device, dtype=torch.int32)
    return plan, torch.tensor([300, 2], device=device, dtype=torch.int32), 2, 16


def paged_attention_decode(device: str) -> Args:
    """One long context, so that it is split and the workspace written."""
    q = torch.randn(1, 4, 64, device=device).to(DTYPE[device])
    block_tables = torch.randperm(32, device=device, dtype=torch.int32).view(1, 32)
    context_lens = torch.tensor([500], device=device, dtype=torch.int32)
    plan = torch.zeros(nanovllm.ops.decode_plan_numel(1, device), device=device, dtype=torch.int32)
    nanovllm.ops.decode_plan(plan, context_lens, 2, 16)
    workspace = torch.zeros(nanovllm.ops.decode_workspace_numel(1, 512, 4, 2, 64, device), device=device)
    cache = paged_cache(device, 32, 16)
    return torch.zeros_like(q), q, *cache, block_tables, context_lens, plan, workspace, None, None, 0.125, False


def rope_attention_decode(device: str) -> Args:
    out, _, *rest = paged_attention_decode(device)
    *rest, scale, past_complete = rest
    qkv = torch.randn(1, (4 + 2 * 2) * 64, device=device).to(DTYPE[device])
    weights = torch.randn(2, 64, device=device).to(DTYPE[device])
    return out, qkv, *weights, reference.cos_sin_table(512, 64, device=device), *rest, 1e-6, scale, past_complete


_held: list[Tensor] = []  # weights that a sample names by address


def decoder_step(device: str) -> Args:
    """Two rows of a model of two layers; CUDA only."""
    hidden, intermediate, q_heads, kv_heads, dim, vocab = 64, 96, 4, 2, 64, 32
    shapes = {
        "input_norm": (hidden,),
        "qkv": ((q_heads + 2 * kv_heads) * dim, hidden),
        "o": (hidden, q_heads * dim),
        "post_norm": (hidden,),
        "gate_up": (2 * intermediate, hidden),
        "down": (hidden, intermediate),
    }
    layers = [{n: torch.randn(s, device=device).bfloat16() for n, s in shapes.items()} for _ in range(2)]
    _held.extend(t for layer in layers for t in layer.values())
    addresses = [[layer[n].data_ptr() if n in layer else 0 for n in POINTERS] for layer in layers]
    embedding = torch.randn(vocab, hidden, device=device).bfloat16()
    cache = torch.randn(2, 2, 8, 16, kv_heads, dim, device=device).bfloat16()
    numel = nanovllm.ops.decoder_step_workspace_numel(hidden, intermediate, q_heads, kv_heads, dim, device)
    return (
        torch.zeros(2, vocab, device=device, dtype=torch.bfloat16),
        torch.full((numel,), -1, device=device, dtype=torch.int32),
        cache,
        torch.randint(0, vocab, (2,), device=device),
        torch.randperm(8, device=device, dtype=torch.int32).view(2, 4),
        torch.tensor([40, 3], device=device, dtype=torch.int32),
        torch.tensor(addresses, device=device),
        embedding,
        embedding[0],
        embedding.flip(0),
        reference.cos_sin_table(64, dim, device=device),
        q_heads,
        intermediate,
        1e-6,
    )


def paged_attention_prefill(device: str) -> Args:
    q = torch.randn(5, 4, 64, device=device).to(DTYPE[device])
    block_tables = torch.randperm(4, device=device, dtype=torch.int32).view(2, 2)
    cu_seqlens_q = torch.tensor([0, 2, 5], device=device, dtype=torch.int32)
    context_lens = torch.tensor([20, 3], device=device, dtype=torch.int32)
    cache = paged_cache(device, 4, 16)
    return torch.zeros_like(q), q, *cache, cu_seqlens_q, context_lens, block_tables, 3, None, None, 0.125


def sample_tokens(device: str) -> Args:
    logits = torch.randn(3, 100, device=device)
    token_ids = torch.full((3,), -7, device=device)
    temperature = torch.tensor([0.0, 1.0, 0.7], device=device)
    top_k = torch.tensor([-1, 5, 0], device=device, dtype=torch.int32)
    top_p, min_p = torch.tensor([[1.0, 0.9, 0.5], [0.0, 0.0, 0.1]], device=device)
    seeds, positions = torch.arange(3, device=device), token_ids + 9
    copies, copy = torch.zeros(2, 3, dtype=torch.int64, device=device), torch.ones(1, dtype=torch.int32, device=device)
    return token_ids, logits, temperature, top_k, top_p, min_p, seeds, positions, copies, copy


# Arguments in the order of the schema; the same shapes at every call, other values after another seed.
SAMPLES: dict[str, Callable[[str], Args]] = {
    "add_rms_norm": add_rms_norm,
    "all_reduce": all_reduce,
    "decode_linear": decode_linear,
    "decode_linear_add": decode_linear_add,
    "decode_plan": decode_plan,
    "decoder_step": decoder_step,
    "embed_rms_norm": embed_rms_norm,
    "paged_attention_decode": paged_attention_decode,
    "paged_attention_prefill": paged_attention_prefill,
    "qk_norm_rope_store": qk_norm_rope_store,
    "rms_norm": rms_norm,
    "rope_attention_decode": rope_attention_decode,
    "rotary_embedding": rotary_embedding,
    "sample": sample_tokens,
    "silu_and_mul": silu_and_mul,
    "skinny_linear": skinny_linear,
    "skinny_linear_gguf": skinny_linear_gguf,
    "slot_mapping": slot_mapping,
    "store_kv_cache": store_kv_cache,
}


def registered(device: str) -> list[str]:
    names = {n.split("::")[1] for n in torch._C._dispatch_get_all_op_names() if n.startswith("nanovllm::")}
    key = device.upper()
    return sorted(n for n in names if torch._C._dispatch_has_kernel_for_dispatch_key(f"nanovllm::{n}", key))


def sample(op: str, device: str, seed: int = 0) -> Args:
    torch.manual_seed(seed)
    return SAMPLES[op](device)


def tensors(args: Args) -> list[Tensor]:
    return [a for a in args if isinstance(a, Tensor)]


def eager(op: str, args: Args) -> list[Tensor]:
    """The tensors after the call, the arguments kept."""
    after = tuple(a.clone() if isinstance(a, Tensor) else a for a in args)
    overload(op)(*after)
    return tensors(after)


def overload(op: str) -> torch._ops.OpOverload:
    return getattr(torch.ops.nanovllm, op).default


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        reference.assert_same_bits(g, w, f"tensor argument {i}")


@pytest.fixture(params=sorted(SAMPLES))
def op(request: pytest.FixtureRequest, device: str) -> str:
    if request.param not in registered(device):
        pytest.skip(f"{request.param} has no kernel on {device}")
    return request.param


def test_every_operator_has_a_sample(device: str) -> None:
    assert set(registered(device)) <= set(SAMPLES)
    assert set(SAMPLES) <= set(nanovllm.ops.__all__)


def test_a_sample_changes_what_the_schema_says(op: str, device: str) -> None:
    args = sample(op, device)
    want = eager(op, args)
    schema = overload(op)._schema
    written = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
    marks = [w for w, a in zip(written, args, strict=True) if isinstance(a, Tensor)]
    for before, after, mutable in zip(tensors(args), want, marks, strict=True):
        assert torch.equal(before, after) != mutable


def test_opcheck(op: str, device: str) -> None:
    torch.library.opcheck(overload(op), sample(op, device))


def test_compile_fullgraph(op: str, device: str) -> None:
    args = sample(op, device)
    want = eager(op, args)
    call = overload(op)
    torch.compiler.reset()  # the operators share one lambda: no limit on its recompilations
    torch.compile(lambda *a: call(*a), fullgraph=True)(*args)
    assert_same(tensors(args), want)


def test_export(op: str, device: str) -> None:
    call = overload(op)

    class Module(torch.nn.Module):
        def forward(self, *args: Any) -> None:
            call(*args)

    args = sample(op, device)
    want = eager(op, args)
    program = torch.export.export(Module(), sample(op, device))
    program.module()(*args)
    assert_same(tensors(args), want)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_torchscript(op: str, device: str, tmp_path: Path) -> None:
    """torch.jit.script reads source, so the caller of the op is written to a file first."""
    types = {"Tensor": "Tensor", "Optional[Tensor]": "Optional[Tensor]", "int": "int", "float": "float", "bool": "bool"}
    arguments = overload(op)._schema.arguments
    typed = ", ".join(f"{a.name}: {types[str(a.type)]}" for a in arguments)
    names = ", ".join(a.name for a in arguments)
    source = f"def run({typed}) -> None:\n    torch.ops.nanovllm.{op}({names})\n"
    path = tmp_path / f"script_{op}.py"
    path.write_text(f"from typing import Optional\n\nimport torch\nfrom torch import Tensor\n\n\n{source}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    args = sample(op, device)
    want = eager(op, args)
    torch.jit.script(module.run)(*args)
    assert_same(tensors(args), want)


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_cuda_graph_replay_after_inputs_changed(name: str) -> None:
    if name not in registered("cuda"):
        pytest.skip(f"{name} has no kernel on cuda")
    args, other = sample(name, "cuda"), sample(name, "cuda", seed=1)
    want = eager(name, other)
    eager(name, args)  # loads the kernel before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        overload(name)(*args)
    for held, new in zip(tensors(args), tensors(other), strict=True):
        held.copy_(new)
    graph.replay()
    assert_same(tensors(args), want)
