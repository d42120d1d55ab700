"""A server in a thread of the tests, over a real model or over an engine whose tokens are written down."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from engine.fakes import Choose, by_hash, check_idle, greedy, make_engine
from engine.tokenizer import byte_tokenizer

from nanovllm import async_llm
from nanovllm.async_llm import AsyncLLM
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.server.config import ServerConfig
from nanovllm.server.run import listening, make_server

PATIENCE = 60  # seconds until a test that hangs fails
VOCAB = 300
EOS = 0


@dataclass
class Served:
    """A running server."""

    url: str
    llm: AsyncLLM
    app: Any
    loop: asyncio.AbstractEventLoop

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=PATIENCE, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=PATIENCE, **options)

    def client(self, **options: Any) -> Any:
        import openai

        defaults = {"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, "timeout": PATIENCE}
        return openai.OpenAI(**(defaults | options))

    def async_client(self, **options: Any) -> Any:
        import openai

        defaults = {"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, "timeout": PATIENCE}
        return openai.AsyncOpenAI(**(defaults | options))

    @property
    def num_tasks(self) -> int:
        return len(asyncio.all_tasks(self.loop))


def wait_until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"waited {PATIENCE} s: {what}"
        time.sleep(0.005)


@contextmanager
def serving(llm: AsyncLLM, **options: Any) -> Iterator[Served]:
    """Serves llm on a free port; at the end the server has stopped, and llm is idle, not shut down."""
    config = ServerConfig(**({"port": 0, "access_log": False, "shutdown_timeout": 5} | options))
    with listening(config) as sock:
        server = make_server(llm, config)
        loops: list[asyncio.AbstractEventLoop] = []

        async def main() -> None:
            loops.append(asyncio.get_running_loop())
            await server.serve(sockets=[sock])

        thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
        thread.start()
        wait_until(lambda: server.started or not thread.is_alive(), "the server starts")
        try:
            yield Served(f"http://127.0.0.1:{sock.getsockname()[1]}", llm, server.config.app, loops[0])
        finally:
            server.should_exit = True
            thread.join(PATIENCE)
            assert not thread.is_alive(), "the server does not stop"


def fake_llm(
    monkeypatch: pytest.MonkeyPatch, choose: Choose | None = None, num_blocks: int = 256, **options: Any
) -> AsyncLLM:
    """AsyncLLM over a fake engine; choose gives its tokens."""
    options = {"tokenizer": byte_tokenizer(), "vocab_size": VOCAB, "eos": (EOS,)} | options
    engine = make_engine(num_blocks, choose or by_hash(VOCAB), **options)
    engine.runner.keep = False
    monkeypatch.setattr(async_llm, "build_engine", lambda config: (engine, greedy(16)))
    return AsyncLLM("fake")


def writes(text: str) -> Choose:
    """Every sequence is text, a token at a time, then EOS."""
    tokens = [*byte_tokenizer().encode(text), EOS]
    return lambda h, seq, position: (tokens + [EOS] * position)[position - seq.num_prompt_tokens]


def wait_idle(engine: LLMEngine) -> None:
    """Waits until nothing is left of any request, and checks that."""
    wait_until(lambda: not engine.has_work and not engine.requests, "the engine is idle")
    check_idle(engine)


@pytest.fixture
def serve_fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Served]]:
    """serve_fake(choose, engine={...}, **server_options): all are stopped, and checked to be idle, after the test."""
    from contextlib import ExitStack

    with ExitStack() as stack:

        def start(choose: Choose | None = None, engine: dict[str, Any] | None = None, **options: Any) -> Served:
            llm = fake_llm(monkeypatch, choose, **(engine or {}))
            stack.callback(llm.shutdown)
            served = stack.enter_context(serving(llm, **{"served_model_name": ("fake",)} | options))
            stack.callback(wait_idle, llm.engine)
            return served

        yield start
