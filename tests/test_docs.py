"""What README and docs name exists, and their examples run."""

import argparse
import dataclasses
import re
import shlex
from pathlib import Path

import pytest

from nanovllm.cli import make_parser
from nanovllm.config import EngineConfig
from nanovllm.server.config import ServerConfig
from tests.real_model import needs_real_model

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(p.relative_to(ROOT).as_posix() for p in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")))
TORCHRUN_FLAGS = {"--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-endpoint"}
# pip's, of tests/conftest.py, of nanovllm/parallel/ray_replicas.py, and ncu's
OTHER_FLAGS = {"--no-build-isolation", "--runslow", "--num-replicas", "--set"} | TORCHRUN_FLAGS
BENCHMARK_FLAGS = {
    flag for p in ROOT.glob("benchmarks/*.py") for flag in re.findall(r'add_argument\("(--[a-z-]+)"', p.read_text())
}
PATH = re.compile(r"(?<![\w./-])(?:nanovllm|csrc|tests|docs|benchmarks|scripts|\.ci)/[\w./<>-]*[\w>/]")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def blocks(page: str, language: str) -> list[str]:
    return [body for kind, body in BLOCK.findall(text_of(page)) if kind == language]


def all_flags(parser: argparse.ArgumentParser) -> set[str]:
    flags = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                flags |= all_flags(child)
    return flags


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page: str) -> None:
    missing = [p for p in PATH.findall(text_of(page)) if not list(ROOT.glob(p.replace("<op>", "*").rstrip("/")))]
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_links_exist(page: str) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", text_of(page))
    assert not [link for link in links if not (ROOT / page).parent.joinpath(link).exists()]


@pytest.mark.parametrize("page", PAGES)
def test_flags_exist(page: str) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text_of(page)))
    assert named <= all_flags(make_parser()) | BENCHMARK_FLAGS | OTHER_FLAGS


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_exist(page: str) -> None:
    targets = set(re.search(r"^\.PHONY: (.*)$", text_of("Makefile"), re.MULTILINE)[1].split())
    code = "\n".join([*blocks(page, "bash"), *re.findall(r"`([^`\n]+)`", text_of(page))])
    assert set(re.findall(r"\bmake ([a-z]+)", code)) <= targets


@pytest.mark.parametrize("page", PAGES)
def test_commands_parse(page: str) -> None:
    for line in "\n".join(blocks(page, "bash")).splitlines():
        if line.startswith("nanovllm "):
            make_parser().parse_args(shlex.split(line, comments=True)[1:])


def test_serving_page_has_every_flag_and_default() -> None:
    commands = make_parser()._subparsers._group_actions[0].choices
    kinds = commands["bench"]._subparsers._group_actions[0].choices
    page = text_of("docs/serving.md")
    for parser in (commands["serve"], kinds["serve"]):
        flags = {f for f in parser._option_string_actions if f.startswith("--")} - {"--help", "--debug"}
        assert not sorted(f for f in flags if f"`{f}`" not in page)
    rows = {m[1]: m[2] for m in re.finditer(r"^\| `(--[a-z-]+)`[^|]*\| ([^|]*?) ?\|", page, re.MULTILINE)}
    for field in (*dataclasses.fields(ServerConfig), *dataclasses.fields(EngineConfig)):
        if field.name not in ("model", "api_key", "seed"):  # the last two are flags of `bench serve` too
            shown = {"True": "on", "False": "off", "None": "", "()": "", "": ""}
            default = shown.get(str(field.default), f"`{field.default}`")
            assert rows[f"--{field.name.replace('_', '-')}"] == default, field.name


def test_build_variables_exist() -> None:
    named = set(re.findall(r"\b(?:NANOVLLM|TORCH)_[A-Z_]+", "".join(map(text_of, PAGES))))
    assert named == {"NANOVLLM_CUDA", "TORCH_CUDA_ARCH_LIST"}
    assert all(f'"{name}"' in text_of("setup.py") for name in named)


def test_structure_lists_every_module() -> None:
    listed = {p for named in PATH.findall(text_of("docs/structure.md")) for p in ROOT.glob(named.replace("<op>", "*"))}
    modules = {p for p in ROOT.glob("nanovllm/**/*.py") if p.stat().st_size}
    packages = {p for p in modules if p.name == "__init__.py" and p.read_text().count("\n") == 1}  # a docstring only
    assert not sorted(p.relative_to(ROOT).as_posix() for p in modules - packages - listed)


def test_linters_have_one_version() -> None:
    pinned = set(re.findall(r'"((?:ruff|clang-format)==[\d.]+)"', text_of("pyproject.toml")))
    assert len(pinned) == 2
    assert set(re.findall(r'"((?:ruff|clang-format)==[\d.]+)"', text_of(".pre-commit-config.yaml"))) == pinned


@needs_real_model
@pytest.mark.parametrize("block", blocks("README.md", "python"), ids=lambda b: f"{len(b.splitlines())}-lines")
def test_readme_examples_run(block: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out.strip()
