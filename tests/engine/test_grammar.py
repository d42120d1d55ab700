"""Outputs of a given form: what may follow, errors, and engines that run such requests beside others."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from engine.fakes import by_hash, make_engine, run_all
from engine.tokenizer import byte_tokenizer

from nanovllm import LLM, SamplingParams, StructuredOutputsParams
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.logits import needs_processing, process_row

pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'nanovllm[server]'")
from nanovllm.engine.grammar import Grammars, _shortened

EOS = 0
VOCAB = 320  # more than the tokenizer has: the rest can never follow
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "é"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORMS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "json": ({"json": SCHEMA}, ['{"a": -12, "b": "é"}']),
    "json text": ({"json": json.dumps(SCHEMA)}, ['{"a": 0, "b": "x"}']),
    "object": ({"json_object": True}, ['{"k": [1, {"z": null}]}', "{}"]),
    "regex": ({"regex": r"[a-c]+-\d{2}"}, ["abc-07"]),
    "choice": ({"choice": ["yes", 'no "really"', "日本"]}, ["yes", 'no "really"', "日本"]),
    "grammar": ({"grammar": 'start: "a"+ end\nend: "!" | "?"'}, ["aaa!", "a?"]),
}


def grammars(eos: tuple[int, ...] = (EOS,), vocab_size: int = VOCAB) -> Grammars:
    return Grammars(byte_tokenizer(), vocab_size, frozenset(eos))


@pytest.mark.parametrize("name", FORMS)
def test_texts_of_the_form_are_allowed_and_no_others(name: str) -> None:
    form, texts = FORMS[name]
    compiled = grammars()
    for text in texts:
        grammar = compiled.compile(StructuredOutputsParams(**form)).start()
        ids = byte_tokenizer().encode(text)
        for i, token_id in enumerate(ids):
            allowed = grammar.allowed(ids[:i], VOCAB)
            assert allowed.shape == (VOCAB,) and allowed[token_id], f"{text!r}: token {i}"
            assert not allowed[len(byte_tokenizer()) :].any()
        assert grammar.allowed(ids, VOCAB)[EOS]
    grammar = compiled.compile(StructuredOutputsParams(**form)).start()
    assert not grammar.allowed([], VOCAB)[byte_tokenizer().encode("#")[0]]


def test_only_eos_follows_a_complete_form_and_a_broken_one() -> None:
    compiled = grammars()
    grammar = compiled.compile(StructuredOutputsParams(choice=["ab"])).start()
    ids = byte_tokenizer().encode("ab")
    for tokens in (ids, [*ids, EOS], [*ids, EOS, EOS]):
        assert np.flatnonzero(grammar.allowed(tokens, VOCAB)).tolist() == [EOS]
    broken = compiled.compile(StructuredOutputsParams(choice=["ab"])).start()
    assert np.flatnonzero(broken.allowed(byte_tokenizer().encode("zz"), VOCAB)).tolist() == [EOS]


@pytest.mark.parametrize(
    "form, text",
    [
        ({"regex": "(a"}, "structured_outputs.regex: .*unclosed group"),
        ({"json": {"type": "nonsense"}}, "structured_outputs.json: .*nonsense"),
        ({"grammar": "start: missing"}, "structured_outputs.grammar: .*missing"),
        ({"regex": "(a{1000}){1000}"}, "structured_outputs.regex: .*too many expressions constructed$"),
        ({"regex": "b{5}(a{1000}){1000}"}, "structured_outputs.regex: .*too many expressions constructed$"),
    ],
)
def test_forms_that_make_no_sense(form: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        grammars().compile(StructuredOutputsParams(**form)).start()


def test_errors_leave_out_the_insides_of_the_compiler() -> None:
    panic = "panic: assertion failed: a < b\n<backtrace>\n   0: <unknown>\n   1: type_call\n"
    assert _shortened(panic) == "panic: assertion failed: a < b"
    assert _shortened("thread died\nstack backtrace:\n   0: std::panic") == "thread died"
    assert _shortened("regex parse error:\n    (a\n    ^\nerror: unclosed group") == (
        "regex parse error: (a ^ error: unclosed group"
    )
    assert len(_shortened("x" * 10**6)) < 1100


def test_a_slow_compile_is_in_the_way_of_its_own_form_only(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, began, go_on, count = grammars(), threading.Event(), threading.Event(), []
    compile_now = compiled._compile

    def slowly(kind: str, text: str) -> Any:
        count.append(text)
        if text == "slow":
            began.set()
            assert go_on.wait(60)
        return compile_now(kind, text)

    monkeypatch.setattr(compiled, "_compile", slowly)
    slow, fast = StructuredOutputsParams(regex="slow"), StructuredOutputsParams(regex="fast")
    with ThreadPoolExecutor(3) as pool:
        try:
            both = [pool.submit(compiled.compile, slow) for _ in range(2)]
            assert began.wait(60)
            pool.submit(compiled.compile, fast).result(timeout=60)
            assert not any(f.done() for f in both)
        finally:
            go_on.set()
        assert both[0].result() is both[1].result()
    assert sorted(count) == ["fast", "slow"]


def test_a_checked_request_brings_its_form_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever queues it compiles nothing, and takes no lock, even after other forms have pushed this one out."""
    engine = make_engine(16, by_hash(VOCAB), tokenizer=byte_tokenizer(), vocab_size=VOCAB, eos=(EOS,))
    params = SamplingParams(n=2, structured_outputs=StructuredOutputsParams(choice=["ab"]))
    checked = engine.check_request([5, 6], params)
    for i in range(64):
        engine.grammars.compile(StructuredOutputsParams(choice=[str(i)]))
    monkeypatch.setattr(engine, "grammars", None)
    request = engine.add_checked_request([5, 6], checked, params, None, stream=False)
    first = byte_tokenizer().encode("a")
    assert [np.flatnonzero(s.grammar.allowed([], VOCAB)).tolist() for s in request.sequences] == [first, first]
    with pytest.raises(ValueError, match="token_ids: expected those of check_request"):
        engine.add_checked_request([5, 6], [5, 6], params, None, stream=False)
    assert list(engine.requests) == [request.request_id]


def test_models_that_cannot_have_a_form() -> None:
    form = StructuredOutputsParams(regex="a")
    with pytest.raises(ValueError, match="expected a model with a fast tokenizer"):
        Grammars(None, VOCAB, frozenset({EOS})).compile(form)
    with pytest.raises(ValueError, match="expected a model with an end-of-sequence token"):
        grammars(eos=()).compile(form)
    with pytest.raises(ValueError, match="expected a tokenizer of at most 100 tokens, as the model has, got"):
        grammars(vocab_size=100).compile(form)


@pytest.mark.parametrize(
    "form, text",
    [
        ({}, "got none"),
        ({"regex": "a", "choice": ["b"]}, "got regex and choice"),
        ({"regex": 5}, "regex: expected a string, got 5"),
        ({"choice": []}, "choice: expected non-empty strings"),
        ({"choice": ["a", ""]}, "choice: expected non-empty strings"),
        ({"choice": ["a"] * 4097}, "choice: expected at most 4096 strings, got 4097"),
        ({"choice": ["a" * 262144]}, "choice: expected at most 262144 bytes, got 262148"),
        ({"regex": "é" * 140000}, "regex: expected at most 262144 bytes, got 280000"),
        ({"json": {"title": "a" * 262144}}, "json: expected at most 262144 bytes, got 262157"),
        ({"json": "{"}, "json: expected a JSON schema"),
        ({"json": "[1]"}, "json: expected a JSON schema"),
        ({"json": {"a": object()}}, "json: expected a JSON schema"),
    ],
)
def test_parameters_are_checked(form: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        StructuredOutputsParams(**form)
    with pytest.raises(ValueError, match="structured_outputs: expected StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]


@pytest.mark.parametrize("min_tokens, expected", [(0, EOS), (5, EOS)])
def test_a_complete_form_ends_whatever_min_tokens_says(min_tokens: int, expected: int) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["ab"]), min_tokens=min_tokens)
    grammar = grammars().compile(params.structured_outputs).start()
    ids = byte_tokenizer().encode("ab")
    seq = Sequence([5, 6, *ids], 4, params, frozenset({EOS}), grammar=grammar)
    seq.num_prompt_tokens = 2
    assert needs_processing(seq) and seq.waits_for_tokens
    logits = torch.zeros(VOCAB)
    process_row(logits, seq, len(ids))
    assert torch.isfinite(logits).nonzero().flatten().tolist() == [expected]


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_with_a_form_beside_others(tiny_with_tokenizer: Any, overlap: bool) -> None:
    """Through the whole engine, with preemption and chunked prefill: each has its form, the others their tokens."""
    options = {"max_num_seqs": 6, "num_kvcache_blocks": 14, "kvcache_block_size": 8, "max_num_batched_tokens": 16}
    with LLM(str(tiny_with_tokenizer), overlap=overlap, device="cpu", dtype="float32", **options) as llm:
        free = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        alone = llm.generate([[5, 6, 7]], free, use_tqdm=False)[0].token_ids
        formed = [
            SamplingParams(temperature=1, seed=i, max_tokens=40, structured_outputs=StructuredOutputsParams(**form))
            for i, form in enumerate(({"regex": r"[a-z]{4}\d{3}"}, {"json": SCHEMA}, {"choice": ["yes", "no"]}))
        ]
        outs = llm.generate([[5, 6, 7], [8, 9], [8, 9], [8, 9]], [free, *formed], use_tqdm=False)
        assert outs[0].token_ids == alone
        assert re.fullmatch(r"[a-z]{4}\d{3}", outs[1].text) and outs[2].text.startswith('{"a": ')
        assert outs[3].text in ("yes", "no") and outs[3].finish_reason == "stop"
        with pytest.raises(ValueError, match=r"prompts\[1\]: structured_outputs.regex"):
            bad = SamplingParams(structured_outputs=StructuredOutputsParams(regex="(a"))
            llm.generate([[5], [6]], [free, bad], use_tqdm=False)
        run_all(llm.engine)


@pytest.fixture(scope="module")
def tiny_with_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tests.tiny import save_tiny

    path = save_tiny(tmp_path_factory.mktemp("tiny"), "Qwen3ForCausalLM", vocab_size=VOCAB, eos_token_id=EOS)
    byte_tokenizer().save_pretrained(path)
    return path
