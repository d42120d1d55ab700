"""`nanovllm serve` as a process: it says where it listens, serves, and ends in order."""

from __future__ import annotations

import logging
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from engine.tokenizer import byte_tokenizer
from server.served import PATIENCE

from nanovllm.cli import main, make_parser
from nanovllm.server.config import ServerConfig
from tests.tiny import save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_tiny(tmp_path_factory.mktemp("tiny"), "Qwen3ForCausalLM", vocab_size=300, eos_token_id=0)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def process(model: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "nanovllm", "serve", str(model), "--port", "0", "--device", "cpu"]
    command += ["--max-model-len", "200", "--shutdown-timeout", "20"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def url_of(process: subprocess.Popen[str]) -> str:
    """Where it listens, once it does."""
    url, lines = "", ""
    while "Application startup complete" not in lines:
        line = process.stderr.readline()  # type: ignore[union-attr]
        assert line, f"the server ended: {lines}"
        lines += line
        url = found[0] if (found := re.findall(r"http://\S+", line)) else url
    return url


def test_the_limit_of_open_files_is_raised() -> None:
    code = """
import resource
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, most))
from nanovllm.server.run import raise_file_limit
raise_file_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE), most)
"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    limit, kept, most = map(int, output.split())
    assert kept == most and limit == (65536 if most == -1 else min(65536, most))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serves_until_a_signal(process: subprocess.Popen[str], number: int) -> None:
    url = url_of(process)
    body = {"prompt": "the cat", "max_tokens": 150, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as response:
        lines = response.iter_lines()
        next(lines)
        process.send_signal(number)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"  # what runs may end
    assert process.wait(PATIENCE) == 0
    assert "Traceback" not in process.stderr.read()  # type: ignore[union-attr]


def test_says_what_it_loads_before_it_loads(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A large model takes minutes; meanwhile the terminal says which it is, and where it will run."""

    def load(*_: object) -> None:
        raise RuntimeError("no weights today")

    monkeypatch.setattr("nanovllm.loader.weights.load_weights", load)
    caplog.set_level(logging.INFO, "nanovllm")
    assert main(["generate", str(model), "--prompt", "x", "--device", "cpu"]) == 1
    assert caplog.messages == [f"nanovllm: loading Qwen3ForCausalLM in float32 on cpu from {model}"]


def test_a_second_ctrl_c_ends_streams_in_order(process: subprocess.Popen[str]) -> None:
    url = url_of(process)
    body = {"prompt": "the cat", "max_tokens": 150, "ignore_eos": True, "stream": True, "n": 32}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as response:
        lines = response.iter_lines()
        next(lines)
        process.send_signal(signal.SIGINT)
        errors = ""
        while "Waiting for connections to close" not in errors:
            errors += process.stderr.readline()  # type: ignore[union-attr]
        process.send_signal(signal.SIGINT)
        last = [line for line in lines if line][-1]
    assert "the server is shutting down" in last
    errors += process.stderr.read()  # type: ignore[union-attr]
    assert process.wait(PATIENCE) == 0 and "Traceback" not in errors


def test_an_address_in_use_is_told_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "no/such-model", "--port", str(port)]) == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line, text",
    [
        (["--port", "70000"], "port: expected a number in [0, 65535], got 70000"),
        (["--tool-call-parser", "magic"], "tool_call_parser: expected one of auto, none, hermes, llama3_json"),
        (["--reasoning-parser", "x"], "reasoning_parser: expected one of auto, none, think, got 'x'"),
        (["--max-queue", "-1"], "max_queue: expected a number >= 0, got -1"),
        (["--max-body-bytes", "0"], "max_body_bytes: expected a number >= 1, got 0"),
        (["--api-key", ""], "api_key: expected non-empty text"),
        (["--ssl-keyfile", "x"], "ssl_keyfile, ssl_certfile: expected both or neither"),
        (["--chat-template", "/no/file"], "chat_template: expected a file, got '/no/file'"),
        (["--keep-alive-timeout", "inf"], "keep_alive_timeout: expected a number in [0, 1000000000], got inf"),
        (["--root-path", "x"], "root_path: expected a path that starts with /, got 'x'"),
    ],
)
def test_bad_flags(line: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "no/such-model", *line]) == 1
    assert text in capsys.readouterr().err


def make_key(folder: Path, name: str) -> tuple[str, str]:
    """A certificate and its key."""
    cert, key = str(folder / f"{name}.pem"), str(folder / f"{name}.key")
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-noenc",
        "-days",
        "1",
    ]
    subprocess.run([*command, "-subj", "/CN=localhost", "-out", cert, "-keyout", key], check=True, capture_output=True)
    return cert, key


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes keys with the openssl program")
def test_tls_files_are_read_before_the_model_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cert, key = make_key(tmp_path, "one")
    _, other_key = make_key(tmp_path, "two")
    locked, text = str(tmp_path / "locked.key"), tmp_path / "text"
    lock = ["openssl", "pkcs8", "-topk8", "-in", key, "-out", locked, "-passout", "pass:secret"]
    subprocess.run(lock, check=True, capture_output=True)
    text.write_text("no key")
    wrong = {(cert, other_key): "key values mismatch", (cert, str(text)): "PEM", (str(text), key): "PEM"}
    wrong[cert, locked] = "the key has a password"
    for (certfile, keyfile), reason in wrong.items():
        assert main(["serve", "no/such-model", "--ssl-certfile", certfile, "--ssl-keyfile", keyfile]) == 1
        err = capsys.readouterr().err
        assert f"expected a PEM certificate and its key without a password, got {certfile!r} and {keyfile!r}" in err
        assert reason.lower() in err.lower().replace("_", " ")
    assert ServerConfig(ssl_certfile=cert, ssl_keyfile=key).ssl_keyfile == key


@pytest.mark.parametrize(
    "content, text",
    [
        (b"{% for m in messages %}\n{{ m.content }", "chat_template: expected a Jinja template, got"),
        (b"{{ messages }}\n{% if %}", "line 2: Expected an expression, got 'end of statement block'"),
        (b"\xff{{ messages }}", "chat_template: expected UTF-8, got byte 0xff in"),
    ],
)
def test_a_template_is_read_before_the_model_is_loaded(
    content: bytes, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "template.jinja"
    path.write_bytes(content)
    assert main(["serve", "no/such-model", "--chat-template", str(path)]) == 1
    assert text in capsys.readouterr().err


def test_templates_of_transformers_pass(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("{% for m in messages %}{% generation %}{{ m }}{% endgeneration %}{% break %}{% endfor %}")
    assert ServerConfig(chat_template=str(path)).chat_template == str(path)


def test_flags_become_the_configuration() -> None:
    from nanovllm.cli.flags import config_from

    line = ["serve", "m", "--api-key", "a", "--api-key", "b", "--no-access-log", "--request-timeout", "2.5"]
    config = config_from(make_parser().parse_args(line), ServerConfig)
    assert config == ServerConfig(api_key=("a", "b"), access_log=False, request_timeout=2.5)
