"""`nanovllm bench serve` against a server that is written down, and its arithmetic."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanovllm.bench import serving
from nanovllm.bench.http_stream import Endpoint
from nanovllm.bench.serving import Record
from nanovllm.cli import main

EVENT = 'data: {{"choices":[{{"index":0,"delta":{{"content":"{}"}}}}]}}\n\n'
ROLE = 'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
USAGE = 'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":%d,"total_tokens":0}}\n\n'


class Script:
    """A server that answers by the prompt: "bad" with 400, "cut" without an end, others with max_tokens events."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.num_open = self.max_open = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head.split("\r\n")[1:])}
        self.keys.append(headers.get("authorization"))
        if head.startswith("GET /v1/models "):
            self._whole(writer, 200, '{"data": [{"id": "first"}]}')
        else:
            body = json.loads(await reader.readexactly(int(headers["content-length"])))
            self.bodies.append(body)
            prompt = body.get("prompt") or body["messages"][-1]["content"]
            self.num_open += 1
            self.max_open = max(self.max_open, self.num_open)
            if prompt == "bad":
                self._whole(writer, 400, '{"error": {"message": "no"}}')
            else:
                await self._stream(writer, body["max_tokens"], prompt)
            self.num_open -= 1
        writer.close()

    def _whole(self, writer: asyncio.StreamWriter, status: int, text: str) -> None:
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())

    async def _stream(self, writer: asyncio.StreamWriter, count: int, prompt: str) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        events = [ROLE] + [EVENT.format(i) for i in range(count)] + [USAGE % count, "data: [DONE]\n\n"]
        if prompt == "cut":
            events = events[:3]
        for event in events:
            data = event.encode()
            half = len(data) // 2  # chunks and events have different borders
            for part in (data[:half], data[half:]):
                writer.write(b"%x\r\n%b\r\n" % (len(part), part))
            await writer.drain()
            await asyncio.sleep(0.001)
        writer.write(b"0\r\n\r\n")


@pytest.fixture
def script() -> Iterator[tuple[Script, str]]:
    script, loop, ready, urls = Script(), asyncio.new_event_loop(), threading.Event(), []

    async def serve() -> None:
        server = await asyncio.start_server(script.answer, "127.0.0.1", 0)
        urls.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
        ready.set()
        with contextlib.suppress(asyncio.CancelledError):
            await server.serve_forever()

    task = loop.create_task(serve())
    thread = threading.Thread(target=lambda: loop.run_until_complete(task))
    thread.start()
    assert ready.wait(30)
    yield script, urls[0]
    loop.call_soon_threadsafe(task.cancel)
    thread.join(30)
    loop.close()


def bench(capsys: pytest.CaptureFixture[str], *line: str) -> tuple[int, str, str]:
    status = main(["bench", "serve", *line])
    got = capsys.readouterr()
    return status, got.out, got.err


def test_every_request_is_measured(script: Any, capsys: Any, tmp_path: Path) -> None:
    server, url = script
    line = ["--base-url", url, "--num-prompts", "6", "--input-len", "2", "4", "--output-len", "3", "5"]
    out = tmp_path / "run.json"
    status, text, _ = bench(capsys, *line, "--json", "--output", str(out), "--api-key", "k", "--slo", "ttft=60000")
    result = json.loads(text)
    assert status == 0 and result["requests"] == 6 and result["failed"] == 0
    assert len(server.bodies) == 7 and set(server.keys) == {"Bearer k"}  # one to warm up
    sent = server.bodies[1:]
    assert all(b["stream"] and b["model"] == "first" and b["ignore_eos"] and b["messages"] for b in sent)
    assert result["output_tokens"] == sum(b["max_tokens"] for b in sent) and result["prompt_tokens"] == 6 * 7
    assert result["slo_attainment"] == 1 and result["goodput"] == pytest.approx(result["requests_per_second"])
    full = json.loads(out.read_text())
    assert [len(r["itl"]) + 1 for r in full["records"]] == [r["output_tokens"] for r in full["records"]]
    for record in full["records"]:
        assert 0 < record["ttft"] < record["e2e"] == pytest.approx(record["ttft"] + sum(record["itl"]))


def test_concurrency_and_completions(script: Any, capsys: Any) -> None:
    server, url = script
    line = ["--base-url", url, "--num-prompts", "8", "--output-len", "4", "4", "--endpoint", "completions"]
    status, text, _ = bench(capsys, *line, "--max-concurrency", "2", "--num-warmups", "0", "--model", "m")
    assert status == 0 and server.max_open <= 2 and all("prompt" in b for b in server.bodies)
    assert text.startswith("8 requests, 0 failed") and "time to first token" in text


@pytest.mark.parametrize("flag, value", [("--output", "no/run.json"), ("--plot", "no/run.svg"), ("--plot", "run.txt")])
def test_files_are_checked_before_a_request_is_sent(script: Any, capsys: Any, flag: str, value: str) -> None:
    server, url = script
    with pytest.raises(SystemExit):
        bench(capsys, "--base-url", url, "--num-prompts", "1", flag, value)
    assert f"argument {flag}: expected a " in capsys.readouterr().err and not server.bodies


def test_failures_are_counted_and_told(script: Any, capsys: Any, tmp_path: Path) -> None:
    _, url = script
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        'good\nbad\n\n{"prompt": "cut"}\n{"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}\n'
    )
    line = ["--base-url", url, "--num-prompts", "8", "--prompts", str(prompts), "--num-warmups", "0"]
    status, text, _ = bench(capsys, *line, "--json", "--output-len", "1", "3")
    result = json.loads(text)
    assert status == 0 and result["failed"] == 4 and result["output_tokens"] == 2 * 3 + 2 * 2
    assert sorted(result["errors"].values()) == [2, 2] and any("status 400" in e for e in result["errors"])
    prompts.write_text("bad\n")
    status, _, err = bench(capsys, *line)
    assert status == 1 and "all 8 requests failed" in err


@pytest.mark.parametrize(
    "line, text",
    [
        (["--base-url", "ftp://x"], "base_url: expected http://"),
        (["--base-url", "http://127.0.0.1:9/v1"], "no server at http://127.0.0.1:9/v1"),
        (["--slo", "ttft"], "slo: expected ttft=MS"),
        (["--slo", "speed=5"], "slo: expected ttft=MS"),
        (["--request-rate", "0"], "request_rate: expected a positive number, got 0.0"),
        (["--max-concurrency", "0"], "max_concurrency: expected a positive number, got 0"),
        (["--input-len", "5", "4"], "input_len: expected 1 <= MIN <= MAX, got 5 4"),
        (["--num-prompts", "0"], "num_prompts: expected at least 1, got 0"),
    ],
)
def test_bad_options(line: list[str], text: str, capsys: Any) -> None:
    status, _, err = bench(capsys, *line)
    assert status == 1 and text in err


@pytest.mark.parametrize("model", [[], ["--model", "m"]], ids=["asked", "given"])
@pytest.mark.parametrize(
    "answer",
    [
        b"\0\xff garbage\r\n\r\n",
        b"HTTP/1.1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 2_000_000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n5",
        b'HTTP/1.1 200 OK\r\n\r\ndata: {"usage": {"x": 1}}\n\n',
        None,
    ],
    ids=["garbage", "no-status", "long-header", "bad-chunk", "no-object", "bad-usage", "silence"],
)
def test_a_server_of_another_kind_is_an_error_in_one_line(answer: bytes | None, model: list[str], capsys: Any) -> None:
    def serve(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                with listener.accept()[0] as connection, contextlib.suppress(ConnectionError):
                    connection.recv(1 << 16)
                    if answer is None:
                        connection.recv(1)  # until the client gives up
                    else:
                        connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        line = ["--base-url", url, "--num-prompts", "1", "--num-warmups", "0", "--timeout", "0.5", *model]
        status, _, err = bench(capsys, *line)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(30)
    assert status == 1 and "nanovllm: error: " in err and "Traceback" not in err


def test_arrivals_are_poisson_and_repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock of the test's own: gaps of 1/rate on average, the same for the same seed."""
    now = 0.0

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    async def measure(endpoint: Any, path: str, body: Any, record: Record) -> None:
        starts.append(record.start)

    monkeypatch.setattr(serving.time, "perf_counter", lambda: now)
    monkeypatch.setattr(serving.asyncio, "sleep", sleep)
    monkeypatch.setattr(serving, "_measure", measure)
    runs = []
    for seed in (1, 1, 2):
        starts: list[float] = []
        now = 0.0
        load = serving.Load(request_rate=4, seed=seed)
        bodies: list[dict[str, Any]] = [{}] * 2000
        _, seconds = asyncio.run(serving.run(Endpoint("x"), "/", bodies, load))
        runs.append(seconds)
    assert runs[0] == runs[1] != runs[2] and all(seconds == pytest.approx(500, rel=0.1) for seconds in runs)


def test_percentiles_and_goodput() -> None:
    assert [serving.percentile([1, 2, 3, 4, 5], p) for p in (0, 50, 90, 100)] == [1, 3, 4.6, 5]
    records = [Record(0, 1, 3, ttft=0.1 * i, e2e=0.1 * i + 0.2, itl=[0.1, 0.1]) for i in range(1, 5)]
    records.append(Record(0, error="x"))
    result = serving.summary(records, 2.0, {"ttft": 250.0, "tpot": 101.0})
    assert result["goodput"] == 1.0 and result["slo_attainment"] == 0.4 and result["failed"] == 1
    assert result["tpot_ms"]["p50"] == pytest.approx(100) and result["output_tokens_per_second"] == 6


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from nanovllm.bench.serving_plot import plot

    records = [Record(i, 1, 3, ttft=0.1, e2e=0.3, itl=[0.1, 0.1]) for i in range(5)] + [Record(9, error="x")]
    plot(records, str(tmp_path / "run.svg"), "title")
    assert "title" in (tmp_path / "run.svg").read_text() or (tmp_path / "run.svg").stat().st_size > 1000
