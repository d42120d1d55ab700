"""`nanovllm env`: versions, hardware, what was built, and what would run. Works when nothing is built."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import platform
from importlib import metadata
from pathlib import Path

from nanovllm import __version__

SUMMARY = "show versions, hardware, what was built and what would be chosen"

# What each x86-64 level adds, as /proc/cpuinfo names it.
_CPU_LEVELS = (
    ("x86-64-v2", {"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"}),
    ("x86-64-v3", {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}),
    ("x86-64-v4", {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser


def run(args: argparse.Namespace) -> int:
    del args
    rows = report()
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name.ljust(width)}  {value}")
    return 0


def report() -> dict[str, str]:
    """What to say, by topic."""
    return {
        "nanovllm": __version__,
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "torch": _torch(),
        "transformers": _version("transformers"),
        "gpu": _gpus(),
        "CPU operators (_C)": _cpu_module(),
        "CUDA operators (_C_cuda)": _cuda_module(),
        "device": _device(),
        "attention backend": "native",
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def cpu_level(flags: set[str]) -> str:
    """The highest x86-64 level whose flags, and those of the levels below, are all there."""
    best = "x86-64"
    for level, needed in _CPU_LEVELS:
        if not needed <= flags:
            break
        best = level
    return best


def _cpu() -> str:
    cores = f"{os.cpu_count()} cores"
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return f"{platform.machine()}, {cores}"
    fields = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    level = cpu_level(set(fields["flags"].split())) if "flags" in fields else platform.machine()
    return f"{fields.get('model name', 'unknown model')}, {level}, {cores}"


def _torch() -> str:
    if importlib.util.find_spec("torch") is None:
        return "not installed"
    import torch

    return f"{torch.__version__}, {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'CPU build'}"


def _gpus() -> str:
    if importlib.util.find_spec("torch") is None:
        return "unknown without torch"
    import torch

    if not torch.cuda.is_available():
        return "none that torch can use"
    names = []
    for i in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(i)
        names.append(f"{torch.cuda.get_device_name(i)} (compute capability {major}.{minor})")
    return ", ".join(names)


def _cpu_module() -> str:
    if importlib.util.find_spec("nanovllm._C") is None:
        return "not built: run `pip install -e .` in the repository"
    try:
        from nanovllm import ops
    except (ImportError, OSError) as e:
        return f"built, but cannot be loaded: {e}"
    return f"built, {len(ops.operator_names())} operators"


def _cuda_module() -> str:
    if importlib.util.find_spec("nanovllm._C_cuda") is None:
        return "not built"
    try:
        from nanovllm import ops
    except (ImportError, OSError) as e:
        return f"built, but cannot be loaded: {e}"
    if not ops.HAS_CUDA:
        return "built, but this torch is a CPU build"
    missing = ops.without_cuda_kernel()
    archs = importlib.import_module("nanovllm._C_cuda").cuda_archs
    lacks = f"no kernel yet for {', '.join(missing)}" if missing else "a kernel for every operator"
    return f"built for {archs}; {lacks}"


def _device() -> str:
    try:
        from nanovllm.engine.build import resolve_device

        return str(resolve_device("auto"))
    except ImportError:
        return "none: the operators are not built"
