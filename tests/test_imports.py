"""The control plane needs no compiled extension, and its import no GPU library."""

import subprocess
import sys

import pytest

CONTROL_PLANE = (
    "nanovllm",
    "nanovllm.config",
    "nanovllm.outputs",
    "nanovllm.sampling_params",
    "nanovllm.engine.sequence",
    "nanovllm.engine.block_manager",
    "nanovllm.engine.batch",
    "nanovllm.engine.scheduler",
    "nanovllm.engine.kv_cache",
    "nanovllm.engine.detokenizer",
    "nanovllm.engine.llm_engine",
)


@pytest.mark.parametrize("blocked", [("nanovllm._C", "nanovllm._C_cuda"), ("torch", "triton", "flash_attn")])
def test_control_plane_imports_without(blocked: tuple[str, ...]) -> None:
    code = "import sys, importlib\n"
    code += "".join(f"sys.modules[{name!r}] = None\n" for name in blocked)
    code += "".join(f"importlib.import_module({name!r})\n" for name in CONTROL_PLANE)
    code += "from nanovllm import SamplingParams, RequestOutput; SamplingParams()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_fronts_import_without_the_extension() -> None:
    code = "import sys; sys.modules['nanovllm._C'] = None; from nanovllm import LLM, AsyncLLM"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_unknown_name_is_an_attribute_error() -> None:
    import nanovllm

    with pytest.raises(AttributeError, match="no attribute 'LLMM'"):
        _ = nanovllm.LLMM
