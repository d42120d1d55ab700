"""Peak memory of loading a model, measured in a process of its own."""

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

needs_proc = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc/self/clear_refs"
)

_MEASURE = """
import sys
from pathlib import Path
import torch
from nanovllm.loader.source import load_hf_config, resolve
from nanovllm.loader.weights import load_weights
from nanovllm.models.config import ModelConfig
from nanovllm.models.registry import model_class

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

Path("/proc/self/clear_refs").write_text("5")  # start the peak anew
before = status("VmRSS")
source = resolve(sys.argv[1])
config = ModelConfig.from_hf(load_hf_config(source))
model = model_class(config.architecture)(config)
load_weights(model, source)
sizes = [param.numel() * param.element_size() for param in model.parameters()]
packed = (getattr(module, "packed", None) for module in model.modules())
print(status("VmHWM") - before, sum(sizes) + sum(p.blocks.numel() for p in packed if p), max(sizes))
"""


class LoadMemory(NamedTuple):
    growth: int  # bytes, of the peak resident set
    model: int  # bytes of all parameters, and of their packed forms
    largest: int  # bytes of the largest parameter


def load_memory(path: Path) -> LoadMemory:
    command = [sys.executable, "-c", _MEASURE, str(path)]
    measured = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return LoadMemory(*map(int, measured.split()))
