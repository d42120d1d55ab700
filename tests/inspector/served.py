"""A server with the inspector over an engine of fakes, in a thread, and a browser to look at it."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from engine.fakes import by_hash, greedy, make_engine

PATIENCE = 30  # seconds until a test that hangs fails
# Chromium as root, without looking for its vendor's hosts.
_BROWSER_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def fake_llm(monkeypatch: pytest.MonkeyPatch, num_blocks: int = 64, **options: Any) -> Any:
    """AsyncLLM over fakes.make_engine(num_blocks, **options)."""
    module = pytest.importorskip("nanovllm.async_llm", reason="needs torch and the model configs")
    engine = make_engine(num_blocks, by_hash(300), **{"vocab_size": 300, "eos": (0,)} | options)
    monkeypatch.setattr(module, "build_engine", lambda config: (engine, greedy(5)))
    return module.AsyncLLM("fake")


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """The app behind uvicorn on a free port of this machine; its address."""
    uvicorn = pytest.importorskip("uvicorn", reason="needs the extra `server`")
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        for _ in range(PATIENCE * 100):
            if server.started:
                break
            thread.join(0.01)
        assert server.started, "uvicorn did not start"
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive(), "uvicorn did not stop"


@pytest.fixture(scope="module")  # Playwright's event loop is in the way of other tests' own
def browser() -> Iterator[Any]:
    """Headless Chromium: of this machine, or Playwright's own where it is installed; skips where neither is."""
    api = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    path = path or shutil.which("google-chrome")
    with api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=path, args=_BROWSER_FLAGS)
        except api.Error as e:
            pytest.skip(f"no Chromium that Playwright can start: {str(e).splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A fresh page; the test fails if anything was said on its console or raised in it."""
    context = browser.new_context(viewport={"width": 1400, "height": 900}, reduced_motion="reduce")
    page = context.new_page()
    page.set_default_timeout(PATIENCE * 1000)
    problems: list[str] = []
    page.on("console", lambda m: problems.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: problems.append(str(e)))
    page.problems = problems
    yield page
    context.close()
    assert not problems
