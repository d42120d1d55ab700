"""Ranks that a launcher started, as torchrun does on several hosts; and replicas behind Ray Serve."""

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from nanovllm import LLM, SamplingParams
from tests.tiny import save_tiny

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12]]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
OPTIONS = {"device": "cpu", "dtype": "float32", "max_model_len": 64}
SCRIPT = """
import sys
from nanovllm import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu", dtype="float32", max_model_len=64, tensor_parallel_size=2)
params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
print([o.token_ids for o in llm.generate([[5, 6, 7, 8, 9], [10, 11, 12]], params, use_tqdm=False)], flush=True)
{then}
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model"), "Qwen3ForCausalLM", num_hidden_layers=2)


@pytest.fixture(scope="module")
def expected(checkpoint):
    with LLM(str(checkpoint), **OPTIONS) as llm:
        return [o.token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def start(checkpoint, then: str) -> list[subprocess.Popen]:
    """Two ranks, each as if on a host of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(2):
        env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(rank)}
        env |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, "-c", SCRIPT.format(then=then), str(checkpoint)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        ranks.append(subprocess.Popen(command, cwd=ROOT, env=env, **pipes))
    return ranks


@pytest.mark.parametrize("then", ["", "import os; os._exit(7)"], ids=["end", "death"])
def test_ranks_of_a_launcher(checkpoint, expected, then):
    first, second = start(checkpoint, then)
    try:
        out, err = first.communicate(timeout=120)
        assert out.strip() == str(expected), err
        second.wait(timeout=5)
        assert second.stdout.read() == "", "ranks above 0 run no user code after LLM()"
        assert (first.returncode, second.returncode) == ((7, 1) if then else (0, 0))
    finally:
        first.kill()
        second.kill()


def test_launcher_with_another_number_of_ranks_is_refused(checkpoint, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="tensor_parallel_size: expected 3, the launcher's WORLD_SIZE, got 2"):
        LLM(str(checkpoint), tensor_parallel_size=2, **OPTIONS)


def test_env_method_needs_a_launcher(checkpoint):
    with pytest.raises(ValueError, match=r"env:// expects the variables RANK, .*, got no RANK"):
        LLM(str(checkpoint), tensor_parallel_size=2, distributed_init_method="env://", **OPTIONS)


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray[serve]")
def test_two_replicas_of_ray(checkpoint, expected):
    import ray
    from ray import serve

    from nanovllm.parallel.ray_replicas import replicas

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        handle = serve.run(replicas(str(checkpoint), 2, **OPTIONS), route_prefix=None)
        answers = [handle.generate.remote(PROMPTS[i % 2], GREEDY) for i in range(8)]
        assert [a.result(timeout_s=60).token_ids for a in answers] == [expected[i % 2] for i in range(8)]
        with pytest.raises(Exception, match="prompt is empty"):
            handle.generate.remote([], GREEDY).result(timeout_s=60)
        assert serve.status().applications["default"].deployments["nanovllm"].replica_states == {"RUNNING": 2}
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="ray is there")
def test_replicas_without_ray_say_what_to_install():
    with pytest.raises(ImportError, match="pip install 'ray"):
        importlib.import_module("nanovllm.parallel.ray_replicas")
