"""Random load, and what must be back after it; the long run is `python -m tests.engine.soak --minutes 6`."""

import os
import subprocess
import sys

import pytest
import torch

from tests.engine.soak import OPTIONS, Soak
from tests.engine.test_end_to_end import make_llm
from tests.tiny import save_tiny


@pytest.mark.parametrize("overlap", [False, True])
def test_random_load_leaves_nothing(tmp_path, overlap):
    with make_llm(save_tiny(tmp_path, "Qwen3ForCausalLM"), overlap=overlap, **OPTIONS) as llm:
        soak = Soak(llm)
        soak.run(lambda s: s.counts["steps"] < 250)
    assert soak.counts["preemptions"] and soak.counts["aborts"], soak.counts


def start_soak(steps: int, **environment: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.engine.soak", "--device", "cuda", "--steps", str(steps)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=os.environ | environment, **pipes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_blocking_launches_give_the_same_tokens():
    """1,000 mixed steps with every launch waiting for its end: no token depends on what happens to overlap."""
    runs = [start_soak(1000), start_soak(1000, CUDA_LAUNCH_BLOCKING="1")]
    texts = [run.communicate(timeout=600)[0] for run in runs]
    assert all(run.returncode == 0 for run in runs), texts
    digests = [[line for line in text.splitlines() if line.startswith("tokens ")] for text in texts]
    assert digests[0] == digests[1] and len(digests[0]) == 1
