"""The OpenAPI description and the server agree: requests made from it break neither the server nor its word."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from engine.fakes import by_hash
from server.served import VOCAB, fake_llm, serving, wait_idle

pytest.importorskip("schemathesis", reason="schemathesis is not installed")
# All checks but one, on three paths: a description cannot say that a prompt fits the context, that a regular expression
# compiles or that tool_choice needs tools. Such requests get 400, which positive_data_acceptance takes for a fault.
CONFIG = """
[[operations]]
include-path-regex = "completions$|^/tokenize$"
checks.positive_data_acceptance.enabled = false
"""


def test_schemathesis_finds_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    llm = fake_llm(monkeypatch, by_hash(VOCAB), num_blocks=512)
    config = tmp_path / "schemathesis.toml"
    config.write_text(CONFIG)
    command = [str(Path(sys.executable).with_name("schemathesis")), "--no-color", "--config-file", str(config), "run"]
    with serving(llm, served_model_name=("fake",)) as served:
        command += [f"{served.url}/openapi.json", "--max-examples", "5", "--seed", "0"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert served.get("/health").status_code == 200
        wait_idle(llm.engine)
    llm.shutdown()
