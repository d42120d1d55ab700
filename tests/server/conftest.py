"""Tests of the server need the packages of nanovllm[server] and the clients of the test group, else they skip."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

PACKAGES = ("fastapi", "uvicorn", "prometheus_client", "llguidance", "openai", "httpx")
MISSING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]

if not MISSING:
    from server.served import serve_fake  # noqa: F401 - a fixture


class _Skipped(pytest.Module):
    def collect(self) -> list[pytest.Item]:
        text = f"{', '.join(MISSING)} not installed: pip install -e '.[server]' --group test"
        pytest.skip(text, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return _Skipped.from_parent(parent, path=module_path) if MISSING else None
