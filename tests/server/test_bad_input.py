"""Input that once broke the server or held it up: it gets a 400 that names the field, and at once."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any

import pydantic
import pytest
from server.served import Served, fake_llm, serving, wait_idle

from nanovllm.engine.chat import _RESERVED
from nanovllm.sampling_params import StructuredOutputsParams
from nanovllm.server import chat, completions
from nanovllm.server.config import ServerConfig
from nanovllm.server.errors import ApiError
from nanovllm.server.prompts import check_prompts
from nanovllm.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest
from nanovllm.server.run import listening

HI = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        llm = fake_llm(monkeypatch, num_blocks=64)
        with serving(llm, served_model_name=("fake",)) as served:
            yield served
            wait_idle(llm.engine)
        llm.shutdown()


def refusal(served: Served, path: str, body: dict[str, Any]) -> tuple[str, str | None]:
    """Message and param of the 400."""
    content = json.dumps(body)  # with escapes: httpx would not write a lone surrogate
    response = served.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert len(error["message"]) < 400
    return error["message"], error["param"]


@pytest.mark.parametrize(
    "prompt, text, param",
    [
        ([None] * 100_000, "expected a string, a token id or a list of token ids, got null", "prompt[0]"),
        (["a"] * 5 + [None] * 100_000, "expected a string of at least 1 character, got null", "prompt[5]"),
        ([1] * 5 + ["a"] * 100_000, 'expected a token id, an integer >= 0, got "a"', "prompt[5]"),
        ([1, True], "expected a token id, an integer >= 0, got true", "prompt[1]"),
        ([1, 2.5], "got 2.5", "prompt[1]"),
        ([[1], [1, -1]], "got -1", "prompt[1][1]"),
        ([[1], "a"], "expected a list of token ids", "prompt[1]"),
        ([[1], []], "at least 1 item", "prompt[1]"),
        (5, "expected a string, token ids, or a list of either, got 5", "prompt"),
    ],
    ids=lambda value: "" if isinstance(value, list) else None,
)
def test_the_first_bad_item_of_a_prompt_is_named(served: Served, prompt: Any, text: str, param: str) -> None:
    message, where = refusal(served, "/v1/completions", {"prompt": prompt})
    assert message.startswith(f"{param}: ") and text in message and where == param


@pytest.mark.parametrize(
    "path, body, message",
    [
        ("/v1/chat/completions", {"messages": "hi"}, 'messages: expected a list, got "hi"'),
        ("/v1/chat/completions", {"messages": ["hi"]}, 'messages[0]: expected an object, got "hi"'),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": 5}]},
            "messages[0].content: expected a string or a list, got 5",
        ),
        ("/v1/chat/completions", {"messages": HI, "stop": 5}, "stop: expected a string or a list, got 5"),
        ("/v1/chat/completions", {"messages": HI, "stop": ["a"] * 65}, "stop: expected at most 64 items, got 65"),
        ("/v1/chat/completions", {"messages": HI, "stream": 1}, "stream: expected true or false, got 1"),
        (
            "/v1/chat/completions",
            {"messages": HI, "guided_json": 5},
            "guided_json: expected an object or a string, got 5",
        ),
        (
            "/v1/chat/completions",
            {"messages": HI, "n": int("9" * 4000)},
            f"n: expected a number <= 128, got {'9' * 60}...",
        ),
        (
            "/v1/chat/completions",
            {"messages": HI, "tool_choice": "maybe"},
            "tool_choice: expected 'none', 'auto' or 'required' or an object, got \"maybe\"",
        ),
        (
            "/v1/chat/completions",
            {"messages": HI, "tool_choice": {"function": {}}},
            "tool_choice.function.name: expected this field, got none",
        ),
        # of the two kinds of body, the one that was meant
        ("/tokenize", {"messages": []}, "messages: expected at least 1 item, got none"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": 5}, "add_special_tokens: expected true or false, got 5"),
    ],
    ids=lambda value: list(value)[-1] if isinstance(value, dict) else "",
)
def test_a_bad_field_is_named_with_its_value_and_what_it_takes(
    served: Served, path: str, body: dict[str, Any], message: str
) -> None:
    got, param = refusal(served, path, body)
    assert got == message and message.startswith(f"{param}: ")


def test_prompts_are_taken_as_they_are_meant() -> None:
    for prompt in ("a", ["a", "b"], [1, 2], [[1], [2, 3]]):
        assert check_prompts(prompt) == prompt
    assert repr(CompletionRequest(prompt=[5.0, 6]).prompt) == "[5, 6]"
    with pytest.raises(ApiError, match=r"prompt\[0\]"):
        check_prompts([float("nan")])


MANY = [None] * 1000


@pytest.mark.parametrize(
    "model, body",
    [
        (ChatRequest, {"messages": MANY}),
        (ChatRequest, {"messages": [{"role": "user", "content": MANY}]}),
        (ChatRequest, {"messages": [{"role": "user", "content": "x", "tool_calls": MANY}]}),
        (ChatRequest, {"messages": HI, "stop": MANY}),
        (ChatRequest, {"messages": HI, "tools": MANY}),
        (ChatRequest, {"messages": HI, "stop_token_ids": MANY}),
        (ChatRequest, {"messages": HI, "guided_choice": MANY}),
        (ChatRequest, {"messages": HI, "logit_bias": {str(i): "x" for i in range(1000)}}),
        (ChatRequest, {"messages": HI, "structured_outputs": {"choice": MANY}}),
        (ChatRequest, {"messages": HI, "structured_outputs": {str(i): 1 for i in range(1000)}}),
        (DetokenizeRequest, {"tokens": MANY}),
    ],
    ids=lambda value: list(value)[-1] if isinstance(value, dict) else None,
)
def test_few_errors_are_written_for_many_bad_items(model: type[pydantic.BaseModel], body: dict[str, Any]) -> None:
    with pytest.raises(pydantic.ValidationError) as caught:
        model.model_validate(body)
    assert caught.value.error_count() <= 4  # one for each kind of value


def test_a_port_is_taken_before_its_server_runs() -> None:
    with listening(ServerConfig(port=0)) as first:
        port = first.getsockname()[1]
        text = f"cannot listen on 127.0.0.1:{port}: Address already in use"
        with pytest.raises(OSError, match=text), listening(ServerConfig(port=port)):
            pass


DEEP = "[" * 100_000
REQUIRED = {"tool_choice": "required", "tools": [{"function": {"name": "f", "parameters": {"$ref": "#/$defs/X"}}}]}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": DEEP}}]}


@pytest.mark.parametrize(
    "body, text, param",
    [
        (REQUIRED, "structured_outputs.json: Pointer", "structured_outputs"),
        ({"structured_outputs": {"json": DEEP}}, "nested too deeply", "structured_outputs"),
        ({"structured_outputs": {"regex": r"[^\s\S]"}}, "structured_outputs.regex: nothing can", "structured_outputs"),
        ({"logit_bias": {"9999": 1}}, "logit_bias: expected token ids in [0, 300), got 9999", "logit_bias"),
        ({"stop_token_ids": [300]}, "stop_token_ids: expected token ids in [0, 300), got 300", "stop_token_ids"),
        ({"request_id": "\ud800"}, 'request_id: expected text without lone surrogates, got "\\ud800"', "request_id"),
        ({"request_id": "x" * 257}, "request_id: expected at most 256 characters, got 257", "request_id"),
        ({"guided_json": DEEP}, "nested too deeply", "structured_outputs"),
        ({"messages": [*HI, CALL]}, "arguments of a tool call are nested too deeply", "messages"),
        ({"logit_bias": {"1" * 5000: 1}}, "logit_bias: expected token ids as keys", "logit_bias"),
    ],
    ids=["ref", "json", "regex", "bias", "stop_ids", "surrogate", "long_id", "guided_json", "arguments", "logit_bias"],
)
def test_bad_chats(served: Served, body: dict[str, Any], text: str, param: str | None) -> None:
    message, where = refusal(served, "/v1/chat/completions", {"messages": HI} | body)
    assert text in message and where == param


def test_deep_json_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="expected a JSON schema, got one nested too deeply"):
        StructuredOutputsParams(json=DEEP)


def test_a_bad_parameter_is_not_blamed_on_the_prompt(served: Served) -> None:
    for body in ({"stop_token_ids": [300]}, {"logit_bias": {"9999": 1}}):
        message, where = refusal(served, "/v1/completions", {"prompt": ["x", "y"]} | body)
        assert message.startswith(f"{next(iter(body))}: ") and where == next(iter(body))
    message, where = refusal(served, "/v1/completions", {"prompt": ["x", "y" * 400]})
    assert message.startswith("prompt[1]: of 400 tokens") and where == "prompt"


@pytest.mark.parametrize(
    "name",
    ["messages", "tools", "tokenize", "chat_template", "add_generation_prompt", "conversation", "self", "padding"],
)
def test_reserved_names_are_no_variables_of_a_template(served: Served, name: str) -> None:
    for path in ("/v1/chat/completions", "/tokenize"):
        message, _ = refusal(served, path, {"messages": HI, "chat_template_kwargs": {name: None}})
        assert message == f"chat_template_kwargs: expected variables of the template, got the reserved name {name}"


def test_reserved_names_are_all_arguments_of_the_template() -> None:
    from transformers import PreTrainedTokenizerBase

    arguments = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    assert set(arguments) - {"kwargs"} <= set(_RESERVED)


def test_a_lone_surrogate_is_named(served: Served) -> None:
    for path, body in (("/v1/completions", {"prompt": "a\ud800"}), ("/tokenize", {"prompt": "a\ud800"})):
        message, where = refusal(served, path, body)
        assert message == "prompt: expected valid text, got a lone surrogate at index 1" and where == "prompt"


def test_a_model_without_a_tokenizer_takes_token_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = fake_llm(monkeypatch, tokenizer=None)
    with serving(llm, served_model_name=("fake",)) as served:
        for field in ({"echo": True}, {"logprobs": 0}):
            message, where = refusal(served, "/v1/completions", {"prompt": [5, 6]} | field)
            assert message.startswith(f"{where}: the model has no tokenizer") and where in field
        body = {"prompt": [5, 6], "max_tokens": 3, "ignore_eos": True}
        answer = served.post("/v1/completions", body).json()
        assert answer["choices"][0]["text"] == "" and answer["usage"]["completion_tokens"] == 3
        assert served.post("/v1/completions", body | {"stream": True}).text.endswith("data: [DONE]\n\n")
        wait_idle(llm.engine)
    llm.shutdown()


def test_a_request_whose_answer_cannot_be_made_ends(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("no answer")

    for module, path, body in (
        (completions, "/v1/completions", {"prompt": "x"}),
        (chat, "/v1/chat/completions", {"messages": HI}),
    ):
        monkeypatch.setattr(module, "_Writer", fail)
        assert served.post(path, body).status_code == 500
        wait_idle(served.llm.engine)
        assert served.app.state.service.num_open == 0


def test_the_server_still_answers(served: Served) -> None:
    assert served.post("/v1/completions", {"prompt": [5, 6], "max_tokens": 2}).status_code == 200
