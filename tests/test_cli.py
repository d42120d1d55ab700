"""The `nanovllm` command: flags, errors, output on terminals and in pipes."""

import argparse
import contextlib
import dataclasses
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from nanovllm import CompletionOutput, RequestOutput, SamplingParams, StructuredOutputsParams
from nanovllm.bench import engine as bench_engine
from nanovllm.bench import report
from nanovllm.cli import chat, env, flags, generate, main, make_parser, terminal
from nanovllm.config import EngineConfig
from nanovllm.inspector import record
from tests.bench.small import write_small_config
from tests.real_model import REAL_MODEL, needs_real_model

ENGINE_COMMANDS = ["generate", "chat", "serve", "bench throughput", "bench latency", "bench prefill"]
ENGINE_FIELDS = [f for f in dataclasses.fields(EngineConfig) if f.name != "model"]
# A value that differs from the default, where the generic ones below would be refused.
ENGINE_VALUES = {
    "device": "cpu",
    "dtype": "float32",
    "kv_cache_dtype": "auto",
    "tensor_parallel_size": 2,
    "distributed_init_method": "tcp://127.0.0.1:0",
    "check_agreement": True,
    "attention_backend": "native",
    "load_format": "dummy",
    "gpu_memory_utilization": 0.5,
    "kvcache_block_size": 8,
    "enable_prefix_caching": False,
    "enforce_eager": True,
    "overlap": True,
}
SAMPLING_VALUES = {
    "temperature": ("0.5", 0.5),
    "top_k": ("7", 7),
    "top_p": ("0.5", 0.5),
    "min_p": ("0.25", 0.25),
    "max_tokens": ("9", 9),
    "min_tokens": ("2", 2),
    "ignore_eos": (None, True),
    "stop": ("x", ["x"]),
    "stop_token_ids": ("3", [3]),
    "n": ("2", 2),
    "logprobs": ("1", 1),
    "repetition_penalty": ("1.5", 1.5),
    "presence_penalty": ("0.5", 0.5),
    "frequency_penalty": ("0.5", 0.5),
    "logit_bias": ('{"5": -1.5}', {5: -1.5}),
    "skip_special_tokens": (None, True),
    "structured_outputs": ('{"regex": "a+"}', StructuredOutputsParams(regex="a+")),
}


def parse(line: list[str]) -> argparse.Namespace:
    return make_parser().parse_args(line)


@pytest.mark.parametrize("command", ENGINE_COMMANDS)
@pytest.mark.parametrize("field", ENGINE_FIELDS, ids=lambda f: f.name)
def test_every_engine_option_is_a_flag(command: str, field: dataclasses.Field) -> None:
    value = ENGINE_VALUES.get(field.name, "x" if "str" in str(field.type) else 32)
    name = field.name.replace("_", "-")
    line = [*command.split(), "some-model"]
    given = [f"--{name}" if value else f"--no-{name}"] if isinstance(value, bool) else [f"--{name}", str(value)]
    config = flags.engine_config(parse([*line, *given]))
    assert config == EngineConfig(model="some-model", **{field.name: value})
    assert flags.engine_config(parse(line)) == EngineConfig(model="some-model")


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_every_sampling_parameter_is_a_flag(command: str) -> None:
    names = {f.name for f in dataclasses.fields(SamplingParams) if f.init}
    assert names - {"seed"} == SAMPLING_VALUES.keys()  # --seed is the engine's
    line = [command, "some-model"]
    for name, (text, _) in SAMPLING_VALUES.items():
        line += [f"--{name.replace('_', '-')}"] + ([text] if text is not None else [])
    assert flags.sampling_values(parse(line)) == {name: value for name, (_, value) in SAMPLING_VALUES.items()}


def test_flags_not_given_leave_the_defaults_to_the_model() -> None:
    assert flags.sampling_values(parse(["generate", "m"])) == {}
    assert flags.sampling_values(parse(["chat", "m"])) == {"max_tokens": 1024}


def test_every_flag_has_a_help_text() -> None:
    def walk(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
        for action in parser._actions:
            yield action
            if isinstance(action, argparse._SubParsersAction):
                for child in action.choices.values():
                    yield from walk(child)
                    child.format_help()  # a stray % in a text would raise here

    assert not [a.dest for a in walk(make_parser()) if not a.help and not isinstance(a, argparse._SubParsersAction)]


def test_help_loads_nothing_heavy() -> None:
    code = "import sys, nanovllm.cli as c; c.make_parser(); print([m for m in ('torch', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


# Errors


@pytest.mark.parametrize(
    "line, status, message",
    [
        (["generate"], 2, "the following arguments are required: MODEL"),
        (["generate", "m", "--top-q", "1"], 2, "unrecognized arguments: --top-q 1 (try `nanovllm generate --help`)"),
        (["bench", "latency", "m", "--top-q"], 2, "--top-q (try `nanovllm bench latency --help`)"),
        (["frobnicate"], 2, "invalid choice: 'frobnicate'"),
        (["generate", "m", "--max-model-len", "x"], 2, "argument --max-model-len: invalid int value: 'x'"),
        (["generate", "m", "--device", "tpu"], 1, "device: expected one of auto, cuda, cpu, got 'tpu'"),
        (["generate", "m", "--top-p", "2"], 1, "SamplingParams.top_p: expected a number in (0, 1], got 2.0"),
        (["generate", "m", "--tensor-parallel-size", "0"], 1, "expected an integer >= 1, got 0"),
        (["generate", "m", "--logit-bias", "[1]"], 2, "argument --logit-bias: expected a JSON object of token ids and"),
        (["generate", "m", "--logit-bias", "{"], 2, "such as {\"5\": -1.5}, got '{'"),
        (["generate", "m", "--logit-bias", '{"5": null}'], 2, "numbers, such as"),
        (["generate", "m", "--structured-outputs", "[1]"], 2, "--structured-outputs: expected a JSON object, such as"),
        (["generate", "m", "--structured-outputs", '{"a": 1}'], 2, "argument --structured-outputs: "),
        (["chat", "m", "--n", "2"], 1, "chat: expected --n 1, got 2"),
        (["generate", "no/such.gguf", "-p", "x"], 1, "got 'no/such.gguf', which does not exist"),
    ],
)
def test_errors_are_one_line(line: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        got = main(line)
    except SystemExit as e:
        got = e.code
    captured = capsys.readouterr()
    assert got == status
    assert captured.out == ""
    assert captured.err.startswith("nanovllm: error: ") and captured.err.count("\n") == 1
    assert message in captured.err


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(ValueError, match="device: expected one of"):
        main(["generate", "m", "--device", "tpu", "--debug"])


def test_a_reader_that_leaves_is_no_error() -> None:
    code = (
        "import nanovllm.cli as cli; from nanovllm.cli import env; "
        "env.report = lambda: {str(i): 'x' * 999 for i in range(999)}; raise SystemExit(cli.main(['env']))"
    )
    command = f'"{sys.executable}" -c "{code}" | head -c 1; exit "${{PIPESTATUS[0]}}"'
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "0", "")


# generate and chat, on a stand-in for the model


class FakeLLM:
    """Answers every prompt with the same pieces; remembers what it was asked."""

    def __init__(self, pieces: list[str], interrupt_at: int | None = None) -> None:
        self.pieces, self.interrupt_at = pieces, interrupt_at
        self.default_sampling_params = SamplingParams(temperature=0.25)
        self.prompts: list[Any] = []
        self.params: SamplingParams | None = None
        self.refusal: str | None = None
        self.num_closed_early = 0
        self.tokenizer = self
        self.chat_template = "any"

    def __enter__(self) -> "FakeLLM":
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        return "|".join(f"{m['role']}:{m['content']}" for m in messages)

    def encode(self, text: str, **options: Any) -> list[str]:
        return [text]

    def _output(self, text: str) -> RequestOutput:
        return RequestOutput("0", None, [1], [CompletionOutput(0, text, [7], "stop")], True)

    def stream(self, prompt: Any, params: SamplingParams) -> Iterator[RequestOutput]:
        self.prompts.append(prompt)
        self.params = params
        if self.refusal:
            raise ValueError(self.refusal)
        try:
            for i, piece in enumerate(self.pieces):
                if i == self.interrupt_at:
                    os.kill(os.getpid(), signal.SIGINT)
                yield self._output(piece)
        except GeneratorExit:
            self.num_closed_early += 1

    def generate(self, prompts: list[str], params: SamplingParams, use_tqdm: bool) -> list[RequestOutput]:
        self.prompts += prompts
        self.params = params
        return [self._output("".join(self.pieces)) for _ in prompts]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    llm = FakeLLM(["Par", "is", "."])
    for module in (generate, chat):
        monkeypatch.setattr(module, "make_llm", lambda config: llm)
    return llm


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, answers: list[str | type[BaseException]]) -> None:
    """stdin and stdout say that they are terminals; input() gives these lines, or raises."""
    lines = iter(answers)

    def typed(prompt: str = "") -> str:
        line = next(lines)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)


def test_generate_in_a_pipe(fake: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "m", "-p", "one", "-p", "two", "--max-tokens", "3"]) == 0
    assert capsys.readouterr().out == "Paris.\n\nParis.\n"
    assert fake.prompts == ["one", "two"]
    assert fake.params == SamplingParams(temperature=0.25, max_tokens=3)  # the model's default, and the flag


def test_generate_reads_stdin(fake: FakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdin, "read", lambda: "two\nlines", raising=False)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    assert main(["generate", "m"]) == 0
    assert fake.prompts == ["two\nlines"]


def test_closed_stdin(fake: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["chat", "m"]) == 0 and not fake.prompts
    assert main(["generate", "m"]) == 1
    assert "expected --prompt TEXT, or the prompt on stdin, got neither" in capsys.readouterr().err


def test_bytes_that_are_no_text_reach_the_engine(fake: FakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), "utf-8"))
    assert main(["generate", "m"]) == 0
    assert fake.prompts == ["a\udcff"]  # which it refuses, with the place


def test_failed_recording_does_not_cost_the_text(
    fake: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextlib.contextmanager
    def recording(*_: object) -> Iterator[None]:
        yield
        raise OSError(28, "No space left on device", "/dev/full")

    monkeypatch.setattr(record, "recording", recording)
    assert main(["generate", "m", "-p", "x", "--record", "/dev/full"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "Paris.\n" and "'/dev/full'" in captured.err


def test_closed_stdout_and_stderr(fake: FakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["generate", "m", "-p", "one"]) == 0
    assert main(["generate", "m", "-p", "one", "--top-p", "7"]) == 1


def test_generate_json(fake: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "m", "-p", "one", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert (output["text"], output["token_ids"], output["finish_reason"]) == ("Paris.", [7], "stop")


def test_generate_streams_to_a_terminal(
    fake: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_terminal(monkeypatch, [])
    assert main(["generate", "m", "-p", "one"]) == 0
    assert capsys.readouterr().out == "Paris.\n"


def test_ctrl_c_stops_the_answer_not_the_program(fake: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    fake.interrupt_at = 1
    assert main(["generate", "m", "-p", "one"]) == 0  # in a pipe: not streamed
    capsys.readouterr()
    result = generate.stream(fake, "one", SamplingParams(), generate.show_plainly)
    assert (result.text, result.num_tokens, result.is_interrupted) == ("Paris", 2, True)
    assert capsys.readouterr().out == "Paris"
    assert fake.num_closed_early == 1


def test_chat_once(fake: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "m", "--once", "Capital?", "--system", "Be brief."]) == 0
    assert capsys.readouterr().out == "Paris.\n"
    assert fake.prompts == [["system:Be brief.|user:Capital?"]]
    assert fake.params == SamplingParams(temperature=0.25, max_tokens=1024)


def test_chat_keeps_the_conversation(
    fake: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["one", "", "two", KeyboardInterrupt, "/reset", "three", "/what", "/system  T", "four", "/quit", "five"]
    on_a_terminal(monkeypatch, lines)
    assert main(["chat", "m", "--system", "S", "--no-markdown"]) == 0
    assert fake.prompts == [
        ["system:S|user:one"],
        ["system:S|user:one|assistant:Paris.|user:two"],
        ["system:S|user:three"],
        ["system:T|user:three|assistant:Paris.|user:four"],
    ]
    captured = capsys.readouterr()
    assert captured.out.count("Paris.\n") == 4 and captured.out.count("(3 tokens, ") == 4
    assert "/what is not a command; /help lists them" in captured.err


def test_chat_goes_on_after_a_question_that_is_refused(
    fake: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_terminal(monkeypatch, ["long", EOFError])
    fake.refusal = "prompt of 9999 tokens leaves no room"
    conversation = chat.Conversation(fake, SamplingParams(), None, None)
    chat.talk(conversation)
    assert conversation.messages == []
    assert "prompt of 9999 tokens leaves no room (/reset starts over)" in capsys.readouterr().err


def test_chat_goes_on_after_bytes_that_are_no_text(
    fake: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_terminal(monkeypatch, ["a\udcff", "one", EOFError])
    conversation = chat.Conversation(fake, SamplingParams(), None, None)
    chat.talk(conversation)
    assert fake.prompts == [["user:one"]]
    assert "messages[0].content: expected valid text, got a lone surrogate at index 1" in capsys.readouterr().err


def test_chat_in_a_pipe_prints_answers_only(
    fake: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_terminal(monkeypatch, ["one", "/help", "/etc/hosts is what?", "/system", EOFError])
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    assert main(["chat", "m"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Paris.\nParis.\n"
    assert fake.prompts[1] == ["user:one|assistant:Paris.|user:/etc/hosts is what?"]
    assert "/help         this list" in captured.err and "(the chat template's own)" in captured.err


def test_chat_in_a_pipe_goes_on_after_a_question_that_is_refused(
    fake: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\n\xff\xfe\ntwo\n"), "utf-8"))
    assert main(["chat", "m"]) == 1  # so that a script notices
    assert fake.prompts == [["user:one"], ["user:one|assistant:Paris.|user:two"]]
    captured = capsys.readouterr()
    assert "error: question 2: " in captured.err and "expected valid text, got a lone surrogate" in captured.err
    assert captured.out == "Paris.\nParis.\n"


@pytest.mark.parametrize(
    "lines, message",
    [
        (["a \\", "b\\", "c"], "a \nb\nc"),
        (['"""one', "", "two", 'three"""'], "one\n\ntwo\nthree"),
        (['"""', "one", '"""'], "one"),
        (['"""one"""'], "one"),
        (['"""one', EOFError], "one"),
        (["one\\", EOFError], "one"),
    ],
)
def test_messages_of_several_lines(lines: list[Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_terminal(monkeypatch, lines)
    assert terminal.read_message("> ", ". ") == message


def test_interrupted_answers_stay_as_far_as_they_came(
    fake: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_terminal(monkeypatch, ["one", "two", EOFError])
    fake.interrupt_at = 0
    assert main(["chat", "m", "--no-markdown"]) == 0
    assert fake.prompts[1] == ["user:one|assistant:Par|user:two"]
    assert capsys.readouterr().out.count("(interrupted, 1 token, first after ") == 2


@pytest.mark.parametrize(
    "text, blocks, rest",
    [
        ("one\n\ntw", "one\n\n", "tw"),
        ("one\n\n", "", "one\n\n"),
        ("- a\n\n  more\n\n- b", "- a\n\n  more\n\n", "- b"),
        ("```\na\n\nb", "", "```\na\n\nb"),
        ("```py\na\n\nb\n```\n\nc", "```py\na\n\nb\n```\n\n", "c"),
        ("~~~~\n~~~\n\nb\n~~~~\n\nc", "~~~~\n~~~\n\nb\n~~~~\n\n", "c"),
        ("", "", ""),
    ],
)
def test_markdown_is_rendered_in_whole_blocks(text: str, blocks: str, rest: str) -> None:
    assert terminal.split_blocks(text) == (blocks, rest)


def test_markdown_printer_renders_what_came_in_pieces() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=60, height=10, color_system=None)
    text = "# Title\n\nSome **bold** text.\n\n```\n" + "line\n" * 30 + "```\n\nThe \x1b]0;title\x07end"
    with terminal.MarkdownPrinter(console) as printer:
        for piece in re.findall(r".{1,3}", text, re.DOTALL):
            printer.show(piece)
    shown = screen_of(out.getvalue(), 60)
    assert "Some bold text." in shown and sum("line" in row for row in shown) == 30
    assert (
        "Title" in "".join(shown) and "The ]0;titleend" in shown and not any("*" in row or "`" in row for row in shown)
    )


def screen_of(text: str, width: int) -> list[str]:
    """The rows of an endless terminal that got text, which may move the cursor up and erase lines."""
    rows, x, y = [""], 0, 0
    for part in re.findall(r"\x1b\[[?\d;]*[a-zA-Z]|\r|\n|[^\x1b\r\n]+", text):
        if part == "\n":
            x, y = 0, y + 1
            rows += [""] * (y + 1 - len(rows))
        elif part == "\r":
            x = 0
        elif part.startswith("\x1b"):
            count = int(part[2:-1]) if part[2:-1].isdigit() else 1
            y = max(0, y - count) if part.endswith("A") else y
            rows[y] = "" if part.endswith("K") else rows[y]
        else:
            rows[y] = rows[y][:x].ljust(x) + part + rows[y][x + len(part) :]
            x += len(part)
            assert x <= width
    return [row.rstrip() for row in rows]


# env and bench


def test_env_names_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert {"nanovllm", "python", "cpu", "torch", "transformers", "gpu", "device"} <= {name.strip() for name in lines}
    assert env.report()["CPU operators (_C)"].startswith("built, ")


def test_env_works_when_nothing_is_built(tmp_path: Path) -> None:
    package = Path(env.__file__).parent.parent
    shutil.copytree(package, tmp_path / "nanovllm", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    code = (  # an editable install of the package would still find its compiled modules
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'Editable' not in repr(f)]; "
        "from nanovllm.cli import main; raise SystemExit(main(['env']))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "not built: run `pip install -e .`" in result.stdout
    assert "none: the operators are not built" in result.stdout


def test_cpu_level() -> None:
    v2 = {"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"}
    v3 = v2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
    v4 = v3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
    assert [env.cpu_level(f) for f in (set(), v2, v3, v3 - {"fma"}, v4, v4 - {"avx2"})] == [
        "x86-64",
        "x86-64-v2",
        "x86-64-v3",
        "x86-64-v2",
        "x86-64-v4",
        "x86-64-v2",
    ]


def test_bench_table_is_aligned() -> None:
    heads, *values = report.table([{"requests": 16, "prompt_tokens": 123456, "seconds": 1.5}] * 2).splitlines()
    assert heads.split("  ") == ["requests", "prompt tokens", "seconds"]
    assert len(values) == 2 and values[0].split() == ["16", "123,456", "1.500"]
    assert len(heads) == len(values[0])


SMALL_BENCH = {
    "throughput": ["--num-requests", "3", "--input-len", "4", "9", "--output-len", "2", "5"],
    "latency": ["--num-requests", "1", "2", "--input-len", "8", "--output-len", "4", "--runs", "1"],
    "prefill": ["--input-len", "40", "120", "--runs", "1"],
}


def small_bench(kind: str, tmp_path: Path) -> list[str]:
    """A command line; rates that are given need no measurement."""
    config = ["--hf-config", str(write_small_config(tmp_path)), "--load-format", "dummy", "--device", "cpu"]
    return ["bench", kind, *config, "--bandwidth", "0.01", "--compute", "0.02"]


@pytest.mark.parametrize("kind", SMALL_BENCH)
def test_bench_of_a_config(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table, a breakdown and the roofline on stdout; the same and more in the file."""
    line = [*small_bench(kind, tmp_path), *SMALL_BENCH[kind], "--profile"]
    assert main([*line, "--json", str(tmp_path / "out.json")]) == 0
    out = capsys.readouterr().out
    assert "roofline: " in out and "at 0.01 TB/s" in out and "microseconds of a mean step" in out
    content = json.loads((tmp_path / "out.json").read_text())
    num_rows = {"throughput": 1, "latency": 2, "prefill": 4}[kind]
    assert len(content["rows"]) == len(content["profile_us"]) == num_rows
    assert content["bandwidth"] == 1e10 and content["options"]["load_format"] == "dummy"
    assert {"command", "date", "device", "torch", "nanovllm", "model", "dtype"} <= content.keys()
    for row in content["rows"]:
        assert row["roofline_seconds"] > 0 and row["roofline_share"] > 0


def test_bench_prints_a_row_when_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure, seen = bench_engine.latency, []

    def latency(*args: Any, **options: Any) -> Any:
        seen.append(capsys.readouterr().out)
        return measure(*args, **options)

    monkeypatch.setattr(bench_engine, "latency", latency)
    assert main([*small_bench("latency", tmp_path), *SMALL_BENCH["latency"]]) == 0
    title, head_and_row, rest = *seen, capsys.readouterr().out
    head, row = head_and_row.splitlines()
    assert title.startswith("Qwen3ForCausalLM in ") and title.count("\n") == 1
    assert head.split()[0] == "requests" and [row.split()[0], rest.split()[0]] == ["1", "2"]
    assert len(head) == len(row) == len(rest.splitlines()[0])


def test_bench_prints_only_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = [*small_bench("prefill", tmp_path), "--input-len", "50", "--runs", "1", "--prefix-hit", "0"]
    assert main([*line, "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(r["prompt_tokens"], r["cached_tokens"]) for r in rows] == [(50, 0)]


@pytest.mark.parametrize("kind", ["throughput", "prefill"])
def test_bench_draws(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="charts need matplotlib")
    line = [*small_bench(kind, tmp_path), *SMALL_BENCH[kind]]
    assert main([*line, "--plot", str(tmp_path / "chart.svg")]) == 0
    assert "roofline" in (tmp_path / "chart.svg").read_text() or (tmp_path / "chart.svg").stat().st_size > 1000


@pytest.mark.parametrize(
    "flag, value, message",
    [
        ("--plot", "chart.nonsense", "argument --plot: expected a name in .svg, .png or .pdf, got 'chart.nonsense'"),
        ("--plot", "no/chart.svg", "argument --plot: expected a file in a folder that exists, got 'no/chart.svg'"),
        ("--json", "no/rows.json", "argument --json: expected a file in a folder that exists, got 'no/rows.json'"),
        ("--prefix-hit", "1.5", "argument --prefix-hit: expected 0 or more, and less than 1, got 1.5"),
        ("--prefix-hit", "nan", "argument --prefix-hit: expected 0 or more, and less than 1, got nan"),
    ],
)
def test_bench_checks_its_flags_before_it_measures(
    flag: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "prefill", "m", flag, value])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "line, message",
    [
        (["latency"], "bench: expected MODEL or --hf-config NAME, got neither"),
        (["latency", "m", "--hf-config", "qwen3-8b"], "expected MODEL or --hf-config NAME, got m and qwen3-8b"),
        (["latency", "--hf-config", "qwen3-8b"], "--hf-config has no weights, it needs --load-format dummy"),
        (["latency", "--hf-config", "gpt-5", "--load-format", "dummy"], "expected one of qwen3-0.6b, qwen3-8b, "),
    ],
)
def test_bench_needs_a_model(line: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *line]) == 1
    assert message in capsys.readouterr().err


# The real model


@needs_real_model
def test_chat_of_the_real_model(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["chat", str(REAL_MODEL), "--max-model-len", "512", "--temperature", "0", "--max-tokens", "16"]
    assert main([*line, "--once", "What is the capital of France?"]) == 0
    assert "Paris" in capsys.readouterr().out


@needs_real_model
def test_json_of_the_real_model(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["generate", str(REAL_MODEL), "-p", "one", "--prompt", "two", "--json"]
    assert main([*line, "--max-model-len", "64", "--max-tokens", "3", "--ignore-eos"]) == 0
    first, second = (json.loads(text) for text in capsys.readouterr().out.splitlines())
    assert (first["prompt"], second["prompt"]) == ("one", "two")
    assert all(type(t) is int for t in first["prompt_token_ids"]) and len(second["outputs"][0]["token_ids"]) == 3


@needs_real_model
def test_bench_of_the_real_model(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is detokenised; quantised weights count as they are read."""
    rates = ["--bandwidth", "1", "--compute", "1000"]
    line = ["bench", "latency", str(REAL_MODEL), "--max-model-len", "256", "--json", "-", *rates]
    assert main([*line, "--input-len", "8", "--output-len", "4", "--runs", "1"]) == 0
    row = json.loads(capsys.readouterr().out)["rows"][0]
    assert (row["requests"], row["input_len"], row["output_len"]) == (1, 8, 4)
    assert 0 < row["time_to_first_token"] < row["seconds"]
    assert 4 * 60e6 < 1e12 * row["roofline_seconds"] < 4 * 140e6  # bytes of 4 steps
