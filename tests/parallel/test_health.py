"""Ranks that fail in every way: one error that says which and why, nothing left, and the next engine works."""

import asyncio
import gc
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.async_llm import AsyncLLM, EngineStopped
from nanovllm.parallel.faults import VARIABLE, WHATS, WHENS
from nanovllm.parallel.progress import WorkerError
from nanovllm.parallel.watcher import Watcher
from tests.tiny import save_tiny

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12]]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
TIMEOUTS = {"stop": 6, "hang": 3}  # seconds: distributed_timeout where it is what ends the engine
CAUSES = {
    "kill": "died of signal 9",
    "stop": r"gives no sign of life since 6\.\d+ s \(distributed_timeout=6\).*its process is stopped",
    "hang": r"is stuck since 3\.\d+ s \(distributed_timeout=3\), last seen in step \d+, while launching",
    "raise": "raised ValueError: fault injected",
    "allocate": "raised RuntimeError: .*allocate",
}
SMOKE = [("start", "raise"), ("start", "kill"), ("prefill", "kill"), ("prefill", "allocate"), ("prefill", "hang")]
SMOKE += [("decode", "stop"), ("decode", "raise")]
KINDS = [(when, what) for when in WHENS for what in WHATS if (when, what) != ("start", "hang")]  # loading has no limit
FULL = [(size, rank, *kind) for size in (2, 4) for rank in range(1, size) for kind in KINDS]
FULL += [(3, rank, "decode", what) for rank in (1, 2) for what in ("kill", "stop")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    heads = {"num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 8}
    return save_tiny(path, "LlamaForCausalLM", num_hidden_layers=2, **heads)


@pytest.fixture(scope="module")
def expected(checkpoint):
    with make_llm(checkpoint, tensor_parallel_size=1) as llm:
        return tokens(llm)


def make_llm(path, **options) -> LLM:
    defaults = {"device": "cpu", "dtype": "float32", "max_model_len": 64, "tensor_parallel_size": 2}
    return LLM(str(path), **defaults | options)


def tokens(llm) -> list[list[int]]:
    return [o.token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def children() -> set[int]:
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == os.getpid():
                found.add(int(entry.name))
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def fail(path, monkeypatch, size: int, rank: int, when: str, what: str) -> None:
    """The engine fails as asked: the error has rank and cause, and nothing is left."""
    processes, segments = children(), set(os.listdir("/dev/shm"))
    monkeypatch.setenv(VARIABLE, f"{rank}:{when}:{what}")
    with (
        pytest.raises(WorkerError, match=rf"rank {rank} {CAUSES[what]}"),
        make_llm(path, tensor_parallel_size=size, distributed_timeout=TIMEOUTS.get(what, 60)) as llm,
    ):
        try:
            tokens(llm)
        finally:
            with pytest.raises(WorkerError, match=rf"rank {rank} "):
                tokens(llm)  # the engine has ended, and still says why
    monkeypatch.delenv(VARIABLE)
    assert children() == processes
    assert set(os.listdir("/dev/shm")) <= segments


@pytest.mark.parametrize(("when", "what"), SMOKE)
def test_a_rank_fails(checkpoint, monkeypatch, when, what):
    fail(checkpoint, monkeypatch, 2, 1, when, what)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "rank", "when", "what"), FULL)
def test_any_rank_fails_in_any_way(checkpoint, expected, monkeypatch, size, rank, when, what):
    fail(checkpoint, monkeypatch, size, rank, when, what)
    if what == "kill":
        with make_llm(checkpoint, tensor_parallel_size=size) as llm:
            assert tokens(llm) == expected


def make_and_signal(path, number: int, **options) -> None:
    """An engine whose worker gets a signal as soon as there is one."""
    before = children()

    def send() -> None:
        while not children() - before:
            time.sleep(0.01)
        time.sleep(0.3)  # it is Python by now, and imports
        for pid in children() - before:
            os.kill(pid, number)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        make_llm(path, **options).exit()
    finally:
        thread.join()
        assert children() == before


def test_a_signal_without_a_name_while_a_rank_starts(checkpoint):
    with pytest.raises(WorkerError, match=r"rank 1 died of signal 40 \(SIGRTMIN\+6\)"):
        make_and_signal(checkpoint, 40)


def test_a_rank_stopped_while_it_starts_has_only_the_timeout(checkpoint):
    # Without the look at the process it would have a minute more.
    with pytest.raises(WorkerError, match=r"rank 1 gives no sign of life since [2-9](\.\d+)? s .*is stopped"):
        make_and_signal(checkpoint, signal.SIGSTOP, distributed_timeout=2)


def test_an_engine_that_cannot_be_finished_leaves_no_rank(checkpoint, tmp_path):
    before = children()
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    for name, text, error in (
        ("generation_config.json", '{"eos_token_id": "2"}', "eos_token_id: expected an integer"),
        ("generation_config.json", '{"top_p": 7}', "top_p"),
        ("tokenizer.json", '{"version": ', "could not be read"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=error):
            make_llm(tmp_path)
        assert children() == before
        (tmp_path / name).unlink()


def test_a_forked_process_is_told_that_the_ranks_are_not_its_own(checkpoint, expected):
    with make_llm(checkpoint) as llm:
        pid = os.fork()
        if pid == 0:
            try:
                tokens(llm)
            except WorkerError as e:
                os._exit(7 if "make another one after a fork" in str(e) else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert tokens(llm) == expected


def test_ranks_end_with_an_engine_that_nobody_holds(checkpoint):
    before = children()
    llm = make_llm(checkpoint)
    tokens(llm)
    assert len(children() - before) == 1
    del llm
    gc.collect()
    assert children() == before


def test_ctrl_c_in_a_stream_leaves_the_ranks(checkpoint, expected, monkeypatch):
    with make_llm(checkpoint) as llm:
        launch = llm.engine.runner.launch

        def interrupted(batch):
            os.kill(os.getpid(), signal.SIGINT)
            return launch(batch)

        monkeypatch.setattr(llm.engine.runner, "launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(llm.stream([5, 6]))
        monkeypatch.undo()
        assert tokens(llm) == expected


def test_a_watcher_that_fails_ends_the_engine(checkpoint, monkeypatch):
    monkeypatch.setattr(Watcher, "_reach", lambda *_: 1 / 0)
    with pytest.raises(WorkerError, match="its watcher raised ZeroDivisionError"):
        make_llm(checkpoint)


def test_engines_after_failures_and_beside_each_other(checkpoint, expected, monkeypatch):
    monkeypatch.setenv(VARIABLE, "1:start:raise")
    with pytest.raises(WorkerError) as caught:
        make_llm(checkpoint)
    assert "in run_rank" in str(caught.value.__cause__), "the traceback of the worker"
    monkeypatch.delenv(VARIABLE)
    processes = children()
    with make_llm(checkpoint) as one, make_llm(checkpoint, distributed_init_method="tcp://127.0.0.1:0") as other:
        assert len(children() - processes) == 2
        assert tokens(one) == tokens(other) == expected
        assert tokens(one) == expected
        one.exit()
        one.exit()
        assert tokens(other) == expected
    assert children() == processes


def test_an_idle_rank_that_dies_is_named(checkpoint):
    with make_llm(checkpoint) as llm:
        before = children()
        tokens(llm)
        (worker,) = [p.pid for p in llm.engine.runner._team.watcher._processes.values()]
        os.kill(worker, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while worker in children() and time.monotonic() < deadline:
            time.sleep(0.05)
        with pytest.raises(WorkerError, match=r"rank 1 died of signal 9 \(SIGKILL\) in step \d+"):
            tokens(llm)
        assert children() < before


def test_an_idle_async_engine_tells_that_a_rank_died(checkpoint):
    before = children()
    llm = AsyncLLM(str(checkpoint), device="cpu", dtype="float32", max_model_len=64, tensor_parallel_size=2)
    try:
        assert llm.is_running
        (worker,) = children() - before
        os.kill(worker, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while llm.is_running and time.monotonic() < deadline:
            time.sleep(0.05)
        with pytest.raises(EngineStopped, match=r"cannot go on: WorkerError\('rank 1 died of signal 9 \(SIGKILL\)"):
            llm.check_health()
        with pytest.raises(EngineStopped, match=r"cannot go on: .*rank 1 died"):
            asyncio.run(anext(llm.generate([5, 6])))
    finally:
        llm.shutdown()
    assert children() == before
    with pytest.raises(EngineStopped, match="was shut down"):
        llm.check_health()


def test_rank_0_that_fails_ends_the_others(checkpoint, monkeypatch):
    before = children()
    with make_llm(checkpoint) as llm:
        monkeypatch.setattr(llm.engine.runner.runner, "run_model", None)
        with pytest.raises(TypeError):
            tokens(llm)
        assert children() == before
        with pytest.raises(WorkerError, match="rank 0 raised TypeError"):
            tokens(llm)


def test_bad_weights_are_one_error(checkpoint, tmp_path):
    before = children()
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(
        (checkpoint / "config.json").read_text().replace('"vocab_size": 199', '"vocab_size": 190')
    )
    with pytest.raises(ValueError, match="misshapen"):
        make_llm(tmp_path)
    assert children() == before


SCRIPT = """
    import os, signal, sys, time
    from nanovllm import LLM, SamplingParams
    llm = LLM(sys.argv[1], device="cpu", dtype="float32", max_model_len=64, tensor_parallel_size=2)
    print(*[p.pid for p in llm.engine.runner._team.watcher._processes.values()], flush=True)
    llm.generate([[1, 2, 3]] * 4, SamplingParams(temperature=0, max_tokens=50, ignore_eos=True), use_tqdm=False)
    {then}
"""


def run_script(path, then: str) -> tuple[subprocess.Popen, list[int]]:
    """A program with an engine of two ranks and no main guard, that does `then` at its end; and its workers."""
    code = textwrap.dedent(SCRIPT).format(then=then)
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    return process, [int(pid) for pid in process.stdout.readline().split()]


@pytest.mark.parametrize(
    ("then", "status", "errors"),
    [
        ("", 0, ""),  # no exit(): the interpreter's end does it
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("os.killpg(0, signal.SIGINT); time.sleep(5)", -signal.SIGINT, "KeyboardInterrupt"),
    ],
    ids=["end", "kill", "interrupt"],
)
def test_workers_end_with_their_parent(checkpoint, then, status, errors):
    segments = set(os.listdir("/dev/shm"))
    # Whoever runs the tests in the background may have left SIGINT ignored, which is inherited.
    listen = "signal.signal(signal.SIGINT, signal.default_int_handler); "
    guard = f"os.setpgid(0, 0); {listen}" if "killpg" in then else ""
    process, workers = run_script(checkpoint, guard + then)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == status and errors in stderr and stderr.count("Traceback") <= 1
    deadline = time.monotonic() + 2  # the limit that is promised
    while any(map(is_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(workers) == 1 and not any(map(is_alive, workers))
    assert set(os.listdir("/dev/shm")) <= segments


def test_one_rank_starts_nothing(checkpoint, monkeypatch):
    monkeypatch.setattr("subprocess.Popen", None)
    files = set(os.listdir("/proc/self/fd"))
    with make_llm(checkpoint, tensor_parallel_size=1) as llm:
        tokens(llm)
        assert not any(
            "socket" in os.readlink(f"/proc/self/fd/{fd}")
            for fd in set(os.listdir("/proc/self/fd")) - files
            if os.path.exists(f"/proc/self/fd/{fd}")
        )
