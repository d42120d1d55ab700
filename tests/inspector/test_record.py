"""Recordings: what --record writes, what `nanovllm inspect` says of it, and the worked example's file."""

import json
import re
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest
from engine.fakes import greedy, make_engine
from inspector.served import fake_llm

from nanovllm.cli import main, make_parser
from nanovllm.engine.observer import observe
from nanovllm.inspector import page, record, walkthrough
from nanovllm.inspector.view import View
from nanovllm.llm import LLM
from tests.real_model import REAL_MODEL, needs_real_model


def fake_offline_llm(**options: object) -> LLM:
    """LLM around an engine of fakes."""
    llm = LLM.__new__(LLM)
    llm.engine, llm.default_sampling_params, llm._lock = make_engine(**options), greedy(4), threading.RLock()
    return llm


def small_recording(path: Path) -> list[dict]:
    llm = fake_offline_llm()
    with record.recording(llm, path):
        llm.generate([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]], use_tqdm=False)
    return list(record.read(path))


def test_recording_replays_the_run(tmp_path: Path) -> None:
    header, *events = small_recording(tmp_path / "t.jsonl")
    assert (header["format"], header["version"]) == ("nanovllm-trace", 1)
    view = View()
    for event in events:
        view.apply(event)
    assert (view.num_ended, view.num_tokens, view.running, view.waiting, view.owners) == (2, 8, [], [], {})
    assert [e["kind"] for e in events[:3]] == ["snapshot", "change", "change"]


def test_recording_of_an_async_engine_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = fake_llm(monkeypatch)
    with record.recording(llm, tmp_path / "t.jsonl"):
        llm.call(lambda: llm.engine.add_request([1, 2, 3], greedy(3))).result()
        while llm.call(lambda: llm.engine.has_work).result():
            pass
    assert llm.engine.observer is None
    assert sum(e["kind"] == "step" for e in record.read(tmp_path / "t.jsonl")) == 3
    with record.recording(llm, tmp_path / "u.jsonl"):
        llm.shutdown()
    assert len(list(record.read(tmp_path / "u.jsonl"))) == 2


def test_no_path_records_nothing() -> None:
    llm = fake_offline_llm()
    with record.recording(llm, None):
        assert llm.engine.observer is None


def test_many_events_are_written_by_the_engine_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "_INTERVAL", 3600)
    monkeypatch.setattr(record, "_MAX_PENDING", 5)
    recorder = record.Recorder(tmp_path / "t.jsonl")
    engine = make_engine()
    observe(engine, recorder)
    engine.add_request([1, 2, 3], greedy(40))
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, len(recorder._pending))
    assert most < 5
    recorder.close()
    assert sum(e["kind"] == "step" for e in record.read(tmp_path / "t.jsonl")) == 40


def test_full_disk_ends_the_recording_and_not_the_run(tmp_path: Path) -> None:
    llm = fake_offline_llm()
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"), record.recording(llm, "/dev/full"):
        outputs = llm.generate([[1, 2, 3]] * 30, use_tqdm=False)
    assert all(len(o.token_ids) == 4 for o in outputs) and llm.engine.observer is None


def test_path_that_cannot_be_written_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    for line in (["generate", "m"], ["bench", "latency", "m"], ["chat", "m"]):
        with pytest.raises(SystemExit):
            make_parser().parse_args([*line, "--record", "no/such/folder/t.jsonl"])
        assert "expected a file in a folder that exists, got 'no/such/folder/t.jsonl'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "expected a recording of --record, got an empty file"),
        ("hello\n", "line 1: expected a JSON object, got 'hello'"),
        ('{"a": 1}\n', "line 1: expected the header of a recording"),
        ('{"format": "nanovllm-trace", "version": 9}\n', "expected version 1 of the format, got 9"),
        ("HEADER[1]\n", "line 2: expected an event with a kind, got"),
        ("HEADERx\n{}\n", "line 2: expected a JSON object, got 'x'"),
        (f"HEADER{'[' * 100_000}\n", "line 2: expected a JSON object, got '[[["),
        ('HEADER{"kind": "step", "us": 5}\n', "line 2: this event does not fit"),
        ('HEADER{"kind": "step", "us": [1, "a"]}\n', "line 2: this event does not fit"),
        ('HEADER{"kind": "step", "time": null}\n', "line 2: this event does not fit"),
        (
            'HEADER{"kind": "snapshot", "model": "m", "next": [], "num_blocks": "x", "block_size": 4}\n',
            "line 2: this event does not fit",
        ),
        ('HEADER{"kind": "step", "step": 0, "ops": [["free", 3], ["gro", 1]]}\n', "line 2: this event does not fit"),
        ('HEADER{"kind": "step", "step": 0, "ops": [["grow", 1, [2]]]}\n', "line 2: this event does not fit"),
    ],
)
def test_bad_recordings(tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text.replace("HEADER", '{"kind": "header", "format": "nanovllm-trace", "version": 1}\n'))
    assert main(["inspect", str(path), "--summary"]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_recording(tmp_path / "t.jsonl")
    with open(tmp_path / "t.jsonl", "a") as file:
        file.write('{"kind": "st')  # cut off
    assert main(["inspect", str(tmp_path / "t.jsonl"), "--summary"]) == 0
    rows = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    rows = {name.strip(): value.strip() for name, value in rows.items()}
    assert rows["sequences"] == "2 ended, 0 running, 0 waiting"
    assert rows["tokens"].startswith("8 sampled; ")
    assert rows["blocks"] == "64 of 4 tokens, at most 4 used"
    assert rows["steps"].startswith("4 in ") and "schedule" in rows["steps"]


def test_names_do_not_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_recording(tmp_path / "t.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    lines[0]["created"] = "\x1b[2Jnow\n"
    next(event for event in lines if "model" in event)["model"] = "\x1b]0;title\x07model\r"
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert main(["inspect", str(tmp_path / "t.jsonl"), "--summary"]) == 0
    out = capsys.readouterr().out
    assert "[2Jnow" in out and "]0;titlemodel" in out
    assert not set(out) & set("\x1b\x07\r")


def test_inspect_serves_the_page(tmp_path: Path) -> None:
    small_recording(tmp_path / "t.jsonl")
    command = [sys.executable, "-m", "nanovllm", "inspect", str(tmp_path / "t.jsonl"), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = next(line for line in process.stdout if line.startswith("http://"))
            with urllib.request.urlopen(line.split()[0], timeout=30) as response:
                assert "script-src" in response.headers["Content-Security-Policy"]
                assert "nanovllm-trace" in response.read().decode()
        finally:
            process.terminate()


def test_inspect_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--port", "99999"]) == 1
    assert main(["inspect", "--summary"]) == 1
    assert main(["inspect", "no-such-file"]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3 and "--port: expected 0 to 65535, got 99999" in errors[0]


def test_inspect_loads_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; from nanovllm.cli import main; "
        f"main(['inspect', '--html', {str(tmp_path / 'p.html')!r}]); print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_page_is_self_contained() -> None:
    html = page.html()
    assert html.count("<script") == html.count("</script>") == 2
    for text in ("src=", 'rel="stylesheet', "@import", "url("):
        assert text not in html
    assert page.html('{"x": "</script>"}').count("</script>") == 3  # text of a recording cannot end its block


def test_walkthrough_file_is_what_the_module_makes() -> None:
    made = subprocess.run(
        [sys.executable, "-m", "nanovllm.inspector.walkthrough"], capture_output=True, text=True, check=True
    ).stdout
    kept = (Path(walkthrough.__file__).parent / "page" / "walkthrough.jsonl").read_text()
    assert made == kept, "run `python -m nanovllm.inspector.walkthrough > nanovllm/inspector/page/walkthrough.jsonl`"
    notes = [json.loads(line).get("note") for line in kept.splitlines()]
    assert all(note["title"] and note["text"] for note in notes[1:])


@needs_real_model
def test_example_of_the_docs_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    docs = Path(__file__).parent.parent.parent / "docs" / "inspector.md"
    block = re.search(r"^```python\n(.*?)^```$", docs.read_text(), re.DOTALL | re.MULTILINE)[1]
    monkeypatch.chdir(tmp_path)
    block = block.replace("models/SmolLM2-135M-Instruct.Q4_1.gguf", str(REAL_MODEL))
    exec(compile(block, "docs/inspector.md", "exec"), {"__name__": "example"})
    assert capsys.readouterr().out.startswith("8 8 {")
