"""Ranks that a launcher started, as torchrun does on several hosts; and replicas behind Ray Serve."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from engine.tokenizer import byte_tokenizer

from nanovllm import LLM, SamplingParams
from nanovllm.parallel import rendezvous, team
from nanovllm.parallel.progress import WorkerError
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
    path = tmp_path_factory.mktemp("model")
    byte_tokenizer().save_pretrained(path)
    return save_tiny(path, "Qwen3ForCausalLM", num_hidden_layers=2, vocab_size=300)


@pytest.fixture(scope="module")
def expected(checkpoint):
    with LLM(str(checkpoint), **OPTIONS) as llm:
        return [o.token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start(*arguments: str, hosts: int = 2) -> list[subprocess.Popen]:
    """Python with `arguments` as two ranks, each as if on a host of its own, or both on one."""
    port = free_port()
    ranks = []
    for rank in range(2):
        env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(rank)}
        env |= {"LOCAL_RANK": str(rank % (2 // hosts)), "LOCAL_WORLD_SIZE": str(2 // hosts), "GLOO_SOCKET_IFNAME": "lo"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        ranks.append(subprocess.Popen([sys.executable, *arguments], cwd=ROOT, env=env, **pipes))
    return ranks


@pytest.mark.parametrize("then", ["", "import os; os._exit(7)"], ids=["end", "death"])
def test_ranks_of_a_launcher(checkpoint, expected, then):
    first, second = start("-c", SCRIPT.format(then=then), str(checkpoint))
    try:
        out, err = first.communicate(timeout=120)
        assert out.strip() == str(expected), err
        second.wait(timeout=5)
        assert second.stdout.read() == "", "ranks above 0 run no user code after LLM()"
        assert (first.returncode, second.returncode) == ((7, 1) if then else (0, 0))
    finally:
        first.kill()
        second.kill()


def test_a_server_of_two_ranks_ends_its_requests_after_ctrl_c(checkpoint):
    pytest.importorskip("uvicorn", reason="pip install -e '.[server]'")
    httpx = pytest.importorskip("httpx", reason="pip install -e '.[server]'")
    options, params = OPTIONS | {"max_model_len": 512}, SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
    with LLM(str(checkpoint), **options) as llm:
        expected = llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0].text
    port = free_port()  # the same for both, as on several hosts
    flags = f"--tensor-parallel-size 2 --port {port} --device cpu --dtype float32 --max-model-len 512".split()
    first, second = start("-m", "nanovllm", "serve", str(checkpoint), *flags, hosts=1)
    try:
        assert any("startup complete" in line for line in first.stderr)
        fields = {"max_tokens": 300, "temperature": 0, "ignore_eos": True}
        body = {"prompt": PROMPTS[0], "stream": True, **fields}
        with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60) as response:
            lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
            text = json.loads(next(lines))["choices"][0]["text"]
            for rank in (first, second):
                rank.send_signal(signal.SIGINT)  # a launcher passes Ctrl-C on to all
            *chunks, end = lines
        assert text + "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks) == expected
        assert end == "[DONE]"
        assert (first.wait(10), second.wait(10)) == (0, 0)
        assert "Traceback" not in first.stderr.read() + second.stderr.read()
    finally:
        first.kill()
        second.kill()


@pytest.fixture
def launcher_store(monkeypatch):
    """A launcher's store, which is there before any rank is; and its variables."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30))
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        rendezvous,
        "external_store",
        lambda seconds: dist.TCPStore("127.0.0.1", store.port, None, False, timedelta(seconds=seconds)),
    )
    monkeypatch.setattr(team, "_LATE_SECONDS", 0.5)
    return store


@pytest.mark.parametrize("words", [b"GET / HTTP/1.1\r\n\r\n", b""])
def test_a_rank_that_does_not_come(checkpoint, launcher_store, monkeypatch, words):
    """And strangers, one of whom says nothing and stays."""
    strangers = []

    def visit() -> None:
        host, port, _ = launcher_store.get("nanovllm-address").decode().split()
        strangers.append(socket.create_connection((host, int(port))))
        strangers[0].sendall(words)

    thread = threading.Thread(target=visit)
    thread.start()
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(WorkerError, match=r"^rank 1 did not come to 127\.0\.0\.1:\d+ within 1\.5 s$"):
        LLM(str(checkpoint), tensor_parallel_size=2, distributed_timeout=1, **OPTIONS)
    thread.join()
    strangers[0].close()


def test_rank_0_that_does_not_come(checkpoint, launcher_store, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(WorkerError, match=r"^rank 0 did not come within 1\.5 s$"):
        LLM(str(checkpoint), tensor_parallel_size=2, distributed_timeout=1, **OPTIONS)


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
    import httpx
    import ray
    from ray import serve

    from nanovllm.parallel.ray_replicas import replicas

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        port = free_port()
        serve.start(http_options={"port": port})
        handle = serve.run(replicas(str(checkpoint), 2, **OPTIONS))
        answers = [handle.generate.remote(PROMPTS[i % 2], GREEDY) for i in range(8)]
        assert [a.result(timeout_s=60).token_ids for a in answers] == [expected[i % 2] for i in range(8)]
        with pytest.raises(Exception, match="prompt is empty"):
            handle.generate.remote([], GREEDY).result(timeout_s=60)
        assert serve.status().applications["default"].deployments["nanovllm"].replica_states == {"RUNNING": 2}

        def post(**body) -> httpx.Response:
            return httpx.post(f"http://127.0.0.1:{port}", json=body, timeout=60)

        fields = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
        assert post(prompt=PROMPTS[0], **fields).json()["token_ids"] == [expected[0]]
        refused = post(prompt=PROMPTS[0], max_tokens=-1)
        assert refused.status_code == 400 and "max_tokens" in refused.json()["error"]
        assert post().status_code == 400
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="ray is there")
def test_replicas_without_ray_say_what_to_install():
    with pytest.raises(ImportError, match="pip install 'ray"):
        importlib.import_module("nanovllm.parallel.ray_replicas")
