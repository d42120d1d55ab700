"""Streams a checkpoint's tensors into a model, one at a time, once all names and shapes agree."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn

from nanovllm.layers.parameter import shard_shape
from nanovllm.loader.gguf import GgufCheckpoint
from nanovllm.loader.readable import readable
from nanovllm.loader.source import ModelSource
from nanovllm.models.config import ModelConfig
from nanovllm.parallel.shards import Slice, whole

_NAMES_SHOWN = 5
_DTYPES = ("F64", "F32", "F16", "BF16")  # integers and fp8 are quantised: they mean nothing without a scale


class Checkpoint(Protocol):
    """Named tensors on disk, by their Hugging Face names."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor; reads no tensor."""

    def tensors(self, dtype: torch.dtype, parts: Mapping[str, Slice] | None = None) -> Iterator[tuple[str, Tensor]]:
        """The wanted part of every tensor in `parts` (None: all, whole), on the CPU, in any floating dtype (`dtype` is
        the one it will be copied to).

        A tensor may be dropped as soon as the next is asked for: that is what keeps loading within the memory
        of the model and its largest tensor.
        """


class SafetensorsCheckpoint:
    """model.safetensors, or the shards that model.safetensors.index.json lists."""

    def __init__(self, path: Path) -> None:
        self.files = _safetensors_files(path)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {}
        for file in self.files:
            with readable(file), safe_open(file, framework="pt") as tensors:
                slices = {name: tensors.get_slice(name) for name in tensors.offset_keys()}
                dtypes = {name: entry.get_dtype() for name, entry in slices.items()}
                shapes |= {name: tuple(entry.get_shape()) for name, entry in slices.items()}
            for name, dtype in dtypes.items():
                if dtype not in _DTYPES and not _may_be_extra(name):
                    raise ValueError(f"{file}: {name}: expected a dtype of {', '.join(_DTYPES)}, got {dtype}")
        return shapes

    def tensors(self, dtype: torch.dtype, parts: Mapping[str, Slice] | None = None) -> Iterator[tuple[str, Tensor]]:
        for file in self.files:
            with safe_open(file, framework="pt") as tensors:
                names = [name for name in tensors.offset_keys() if parts is None or name in parts]
            for name in names:
                # A mapped file keeps every page that was read; closing it after each tensor lets them go.
                with safe_open(file, framework="pt") as tensors:
                    part = parts[name] if parts is not None else None
                    if part is None or part.count == part.full:
                        yield name, tensors.get_tensor(name)
                    else:
                        places = slice(part.start, part.start + part.count)
                        rows = tensors.get_slice(name)
                        yield name, rows[places] if part.dim == 0 else rows[:, places]


def _safetensors_files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        with readable(index):
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            files = [path / name for name in names]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ValueError(f"{path}: expected every shard of {index.name}, missing {_listed(missing)}")
        return files
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    found = sorted(file.name for file in path.glob("*.bin"))
    raise ValueError(
        f"{path}: expected model.safetensors or model.safetensors.index.json, got "
        + (f"{_listed(found)}, whose pickle format is not supported" if found else "neither")
    )


@dataclass(frozen=True, slots=True)
class _Target:
    """The parameter, or the shard of a fused one, that a checkpoint tensor fills."""

    param: nn.Parameter
    shard: str | int | None
    shape: tuple[int, ...]


def _checkpoint(source: ModelSource) -> GgufCheckpoint | SafetensorsCheckpoint:
    return GgufCheckpoint(source.path) if source.kind == "gguf" else SafetensorsCheckpoint(source.path)


def check_sizes(config: ModelConfig, source: ModelSource) -> None:
    """Refuses a config that is larger than its checkpoint can be, before a model of those sizes takes memory.

    Raises:
        ValueError: more layers than tensors, or a size above the largest dimension of all tensors.
    """
    shapes = _checkpoint(source).shapes()
    largest = max((size for shape in shapes.values() for size in shape), default=0)
    limits = {
        "num_layers": (len(shapes), "tensors"),
        "hidden_size": (largest, "rows or columns"),
        "intermediate_size": (largest, "rows or columns"),
        "vocab_size": (largest, "rows or columns"),
    }
    for name, (limit, unit) in limits.items():
        if getattr(config, name) > limit:
            raise ValueError(
                f"{source.path}: {name}: expected at most {limit}, the {unit} of the checkpoint, "
                f"got {getattr(config, name)}"
            )


def load_weights(model: nn.Module, source: ModelSource) -> None:
    """Fill every parameter of `model` from its checkpoint, converted to the parameter's dtype and device.

    Of a model of several ranks, each loads its own slices only. On CPU, layers whose GGUF tensors are quantised get
    their blocks too, beside the dense weight (layer.packed). Peak memory grows by the model and about one tensor.
    Shapes are compared before the first tensor is read.

    Raises:
        ValueError: tensors that are missing, unexpected or misshapen (first names and counts, all in one
            text), a shard that is missing, or a format that is not supported.
    """
    checkpoint = _checkpoint(source)
    targets, scales = _targets(model), _cache_scales(model)
    _check_complete(checkpoint.shapes(), targets, scales, source.path)
    weight = next(model.parameters())
    parts = {name: target.param.shards[target.shard] for name, target in targets.items()}
    parts |= dict.fromkeys(scales, whole(1))
    for name, tensor in checkpoint.tensors(weight.dtype, parts):
        if name in targets:
            target = targets[name]
            target.param.weight_loader(target.param, tensor, target.shard)
        else:
            if not 0 < tensor.item() < math.inf:
                raise ValueError(f"{source.path}: {name}: expected a scale above 0, got {tensor.item()}")
            layer, attribute = scales[name]
            setattr(layer, attribute, tensor.reshape(1).to(weight.device, torch.float32))
    if isinstance(checkpoint, GgufCheckpoint):
        _pack(model, checkpoint, targets)


def _pack(model: nn.Module, checkpoint: GgufCheckpoint, targets: dict[str, _Target]) -> None:
    """Gives each linear layer on the CPU the blocks of its weight; a tied head has those of the embedding."""
    for layer in model.modules():
        if hasattr(layer, "packed") and layer.weight.is_cpu:
            names = [name for name, t in targets.items() if t.param is layer.weight]
            layer.packed = checkpoint.packed({name: layer.weight.shards[targets[name].shard] for name in names})


def _targets(model: nn.Module) -> dict[str, _Target]:
    """Checkpoint name -> target; a fused parameter has one a shard, named by packed_modules_mapping."""
    unpacked = {packed: name for name, packed in model.packed_modules_mapping.items()}
    targets = {}
    for name, param in model.named_parameters():
        *path, module, leaf = name.split(".")
        for shard in param.shards:
            source_module = module if shard is None else unpacked[module, shard]
            targets[".".join([*path, source_module, leaf])] = _Target(param, shard, shard_shape(param, shard))
    return targets


def _cache_scales(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Names under which a checkpoint may have the scales of an fp8 cache -> layer and attribute: beside the
    projections (llm-compressor), or of one of them (ModelOpt, AutoFP8)."""
    scales = {}
    for name, layer in model.named_modules():
        if hasattr(layer, "k_scale"):
            attention = name.rpartition(".")[0]
            for kind in "kv":
                for owner in (attention, f"{attention}.{kind}_proj", name):
                    scales[f"{owner}.{kind}_scale"] = (layer, f"{kind}_scale")
    return scales


def _check_complete(
    shapes: dict[str, tuple[int, ...]],
    targets: dict[str, _Target],
    scales: dict[str, tuple[nn.Module, str]],
    path: Path,
) -> None:
    missing = [name for name in targets if name not in shapes]
    unexpected = [name for name in shapes if not (name in targets or name in scales or _may_be_extra(name))]
    misshapen = [
        f"{name} (expected {list(target.shape)}, got {list(shapes[name])})"
        for name, target in targets.items()
        if name in shapes and shapes[name] != target.shape
    ]
    misshapen += [
        f"{name} (expected one scale for all heads, got {list(shapes[name])})"
        for name in scales
        if shapes.get(name, ()) not in ((), (1,))
    ]
    faults = {"missing": missing, "unexpected": unexpected, "misshapen": misshapen}
    if any(faults.values()):
        text = "; ".join(f"{len(names)} {fault}: {_listed(names)}" for fault, names in faults.items() if names)
        raise ValueError(f"{path}: expected exactly the model's tensors, got {text}")


def _may_be_extra(name: str) -> bool:
    """A tied head is the embedding again (an untied one has a target); rotary frequencies are computed."""
    return name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq")


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
