"""Tests of the server need the packages of nanovllm[server] and the clients of the test group."""

import pytest

for package in ("fastapi", "uvicorn", "prometheus_client", "llguidance", "openai", "httpx"):
    pytest.importorskip(package, reason=f"{package} is not installed: pip install 'nanovllm[server]' --group test")

from server.served import serve_fake  # noqa: E402, F401 - a fixture
