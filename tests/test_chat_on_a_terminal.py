"""`nanovllm chat` on a real pseudo-terminal: what a person types, and sees."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine.tokenizer import byte_tokenizer

from tests.real_model import REAL_MODEL, needs_real_model
from tests.tiny import save_tiny

PATIENCE = 180  # seconds until a test that hangs fails
CTRL_C, CTRL_D, UP = "\x03", "\x04", "\x1b[A"
RATE = r"\d+ tokens, [\d.]+ tokens/s, first after [\d.]+ s\)"


class Terminal:
    """`nanovllm chat` with these arguments, as the foreground process of a terminal of 80 x 24."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        code = (
            "import fcntl, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
            "signal.signal(signal.SIGINT, signal.default_int_handler); "  # may have been left ignored
            f"from nanovllm.cli import main; sys.exit(main({['chat', *arguments]!r}))"
        )
        environment = os.environ | {"TERM": "xterm", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=environment,
            cwd=Path(__file__).parent.parent,
        )
        os.close(slave)
        self._seen = ""

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def expect(self, pattern: str) -> str:
        """Waits for the pattern in what came since the last one; all that came up to its end."""
        deadline = time.monotonic() + PATIENCE
        while not (found := re.search(pattern, self._seen)):
            ready = select.select([self._master], [], [], max(0, deadline - time.monotonic()))[0]
            assert ready, f"no {pattern!r} in {self._seen[-500:]!r}"
            try:
                data = os.read(self._master, 65536)
            except OSError:  # the other side is closed
                raise AssertionError(f"it ended; no {pattern!r} in {self._seen[-500:]!r}") from None
            self._seen += data.decode(errors="replace")
        text, self._seen = self._seen[: found.end()], self._seen[found.end() :]
        return text

    def end(self) -> int:
        """The exit status, once it has ended."""
        try:
            while select.select([self._master], [], [], PATIENCE)[0] and os.read(self._master, 65536):
                pass
        except OSError:  # the other side is closed
            pass
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that never ends by itself, with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder, "LlamaForCausalLM", vocab_size=300, max_position_embeddings=8192, eos_token_id=299)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def terminal(model: Path) -> Iterator[Terminal]:
    size = ("--max-model-len", "8192", "--max-tokens", "6000", "--ignore-eos", "--temperature", "1")
    terminal = Terminal(str(model), *size)
    yield terminal
    terminal.close()


def test_a_conversation(terminal: Terminal) -> None:
    assert "/help lists the commands" in terminal.expect(r"\n[^\n]*> ")
    terminal.type("hello there\r")
    terminal.expect("hello there\r\n")
    time.sleep(1)  # some tokens
    terminal.type(CTRL_C)
    terminal.expect(r"\(interrupted, " + RATE)  # the answer, not the program
    terminal.expect("> ")

    terminal.type("/help\r")
    terminal.expect("this list")
    terminal.expect("> ")
    terminal.type("/sys\tBe brief.\r")  # completed
    terminal.expect("/system Be brief")
    terminal.expect("> ")
    terminal.type("/system\r")
    terminal.expect("Be brief.\r\n")
    terminal.expect("> ")

    terminal.type(UP * 4)
    terminal.expect("hello there")  # the first question
    terminal.type("\r")
    time.sleep(1)
    terminal.type(CTRL_C)
    terminal.expect(r"\(interrupted, ")
    terminal.expect("> ")

    terminal.type('"""one\r')
    terminal.expect(r"\. ")
    terminal.type('two"""\r')
    time.sleep(1)
    terminal.type(CTRL_C)
    terminal.expect(r"\(interrupted, ")
    terminal.expect("> ")

    terminal.type("half a line")
    terminal.expect("half a line")
    time.sleep(0.2)  # until it waits for the next key
    terminal.type(CTRL_C)
    terminal.expect(r"\(Ctrl-D or /quit ends\)")
    terminal.expect("> ")
    terminal.type("/reset\r")
    terminal.expect("> ")
    terminal.type(CTRL_D)
    assert terminal.end() == 0


def test_quit(terminal: Terminal) -> None:
    terminal.expect("> ")
    terminal.type("/quit\r")
    assert terminal.end() == 0


def test_pipe_gets_plain_answers(model: Path) -> None:
    line = [sys.executable, "-m", "nanovllm", "chat", str(model), "--max-tokens", "5", "--temperature", "0"]
    result = subprocess.run(
        [*line, "--ignore-eos"], input="the cat\n/reset\nthe cat\n", capture_output=True, text=True, timeout=PATIENCE
    )
    assert result.returncode == 0 and "\x1b" not in result.stdout and "tokens/s" not in result.stdout
    half = len(result.stdout) // 2
    assert result.stdout[:half] == result.stdout[half:] and result.stdout.endswith("\n")


def test_reader_that_leaves_ends_the_chat_quietly(model: Path) -> None:
    chat = f'"{sys.executable}" -m nanovllm chat "{model}" --max-tokens 5 --ignore-eos'
    command = f'(echo a; echo b) | {chat} | true; exit "${{PIPESTATUS[1]}}"'
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 0 and "Traceback" not in result.stderr and "Exception" not in result.stderr


@needs_real_model
def test_the_real_model_answers_with_a_rate() -> None:
    terminal = Terminal(str(REAL_MODEL), "--max-model-len", "512", "--temperature", "0", "--max-tokens", "40")
    try:
        terminal.expect("> ")
        terminal.type("What is the capital of France?\r")
        assert "Paris" in terminal.expect(r"\(" + RATE)
        terminal.expect("> ")
        terminal.type(CTRL_D)
        assert terminal.end() == 0
    finally:
        terminal.close()
