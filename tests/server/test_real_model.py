"""The official client against SmolLM2: every answer against the engine's own, streamed ones against plain ones."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from server.served import PATIENCE, Served, serving, wait_idle

from nanovllm import AsyncLLM, SamplingParams
from nanovllm.outputs import RequestOutput
from tests.real_model import REAL_MODEL, needs_real_model

pytestmark = pytest.mark.model
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
STORY = [{"role": "user", "content": "Tell me a story about a fox in two sentences."}]
GREEDY: dict[str, Any] = {"temperature": 0, "model": "smol"}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    if not REAL_MODEL.exists():
        pytest.skip(f"no {REAL_MODEL}: run scripts/fetch_model.py")
    llm = AsyncLLM(str(REAL_MODEL), max_model_len=512, max_num_seqs=16, device="cpu", dtype="float32")
    with serving(llm, served_model_name=("smol", "SmolLM2")) as served:
        yield served
        wait_idle(llm.engine)
    llm.shutdown()


def engine_output(served: Served, prompt: Any, params: SamplingParams) -> RequestOutput:
    """What AsyncLLM itself gives, which makes text in another way than the server."""

    async def last() -> RequestOutput:
        return [output async for output in served.llm.generate(prompt, params)][-1]

    return asyncio.run(asyncio.wait_for(last(), PATIENCE))


def prompt_ids(served: Served, messages: list[dict[str, str]]) -> list[int]:
    return served.llm.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def chat(served: Served, messages: Any = QUESTION, **options: Any) -> tuple[Any, list[Any]]:
    """The plain answer, and the chunks of the same request streamed, whose text is checked to be the same."""
    client = served.client()
    request = GREEDY | {"messages": messages} | options
    plain = client.chat.completions.create(**request)
    chunks = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    for choice in plain.choices:
        deltas = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == choice.index]
        assert deltas[0].delta.role == "assistant"
        assert "".join(d.delta.content or "" for d in deltas) == (choice.message.content or "")
        assert [d.finish_reason for d in deltas if d.finish_reason] == [choice.finish_reason]
    assert chunks[-1].choices == [] and all(c.usage is None for c in chunks[:-1])
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(chunks[-1].usage, name) == getattr(plain.usage, name)
    return plain, chunks


def test_chat_equals_the_engine(served: Served) -> None:
    plain, chunks = chat(served, max_completion_tokens=20)
    ids = prompt_ids(served, QUESTION)
    expected = engine_output(served, ids, SamplingParams(temperature=0, max_tokens=20))
    assert plain.choices[0].message.content == expected.text and "Paris" in expected.text
    assert plain.choices[0].finish_reason == expected.finish_reason == "stop"
    usage = plain.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(ids), len(expected.token_ids))
    assert plain.object == "chat.completion" and plain.id.startswith("chatcmpl-") and plain.model == "smol"
    assert len({c.id for c in chunks}) == 1 and chunks[0].object == "chat.completion.chunk"
    again = served.client().chat.completions.create(**GREEDY, messages=QUESTION, max_tokens=4)
    assert again.usage.prompt_tokens_details.cached_tokens == (len(ids) - 1) // 16 * 16
    assert again.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stop", ["apit", " of Fra", ["xyz", "ance is"], "The"])
def test_stop_strings_over_chunk_borders(served: Served, stop: Any) -> None:
    plain, _ = chat(served, stop=stop, max_tokens=20)
    params = SamplingParams(temperature=0, max_tokens=20, stop=stop)
    expected = engine_output(served, prompt_ids(served, QUESTION), params)
    choice = plain.choices[0]
    assert choice.message.content == expected.text and expected.finish_reason == choice.finish_reason == "stop"
    assert choice.stop_reason == expected.outputs[0].stop_reason
    assert plain.usage.completion_tokens == len(expected.token_ids)


@pytest.mark.parametrize("text", ["日本語 🎉 naïve café", "👩‍👩‍👧 x"])
def test_multi_byte_characters_arrive_whole(served: Served, text: str) -> None:
    plain, chunks = chat(served, max_tokens=60, extra_body={"structured_outputs": {"choice": [text]}})
    assert plain.choices[0].message.content == text
    pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert not any("�" in piece for piece in pieces) and len([p for p in pieces if p]) > 2
    stopped, _ = chat(served, max_tokens=60, stop=text[-3:], extra_body={"structured_outputs": {"choice": [text]}})
    assert stopped.choices[0].message.content == text[:-3]


def test_sampling_fields_reach_the_engine(served: Served) -> None:
    options = {"top_k": 20, "min_p": 0.01, "min_tokens": 3, "repetition_penalty": 1.1}
    params = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=12, seed=7, n=3, **options)
    body = options | {"ignore_eos": False, "stop_token_ids": [7]}
    plain, _ = chat(served, STORY, temperature=0.9, top_p=0.95, seed=7, n=3, max_tokens=12, extra_body=body)
    expected = engine_output(served, prompt_ids(served, STORY), params)
    assert [c.message.content for c in plain.choices] == [o.text for o in expected.outputs]
    assert len({c.message.content for c in plain.choices}) > 1
    assert plain.usage.completion_tokens == sum(len(o.token_ids) for o in expected.outputs)
    forced, _ = chat(served, max_tokens=3, logit_bias={"35": 1000}, extra_body={"ignore_eos": True})
    assert forced.choices[0].message.content == served.llm.tokenizer.decode([35] * 3)
    ended, _ = chat(served, max_tokens=9, logit_bias={"35": 1000}, extra_body={"stop_token_ids": [35]})
    assert (ended.choices[0].finish_reason, ended.choices[0].stop_reason) == ("stop", 35)


def test_logprobs_equal_the_engine(served: Served) -> None:
    plain, chunks = chat(served, max_tokens=5, logprobs=True, top_logprobs=2)
    expected = engine_output(
        served, prompt_ids(served, QUESTION), SamplingParams(temperature=0, max_tokens=5, logprobs=2)
    )
    entries = plain.choices[0].logprobs.content
    assert [e.logprob for e in entries] == [lp[t].logprob for t, lp in zip(expected.token_ids, expected.logprobs)]
    assert b"".join(bytes(e.bytes) for e in entries).decode() == expected.text
    assert all(len(e.top_logprobs) == 2 and e.top_logprobs[0].token == e.token for e in entries)  # greedy
    streamed = [e for c in chunks if c.choices and c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert streamed == entries


def test_completions(served: Served) -> None:
    client = served.client()
    prompts: list[Any] = ["The capital of France is", "2 + 2 ="]
    expected = [engine_output(served, p, SamplingParams(temperature=0, max_tokens=6)) for p in prompts]
    request = GREEDY | {"prompt": prompts, "max_tokens": 6}
    plain = client.completions.create(**request)
    assert [c.text for c in plain.choices] == [e.text for e in expected]
    assert plain.usage.completion_tokens == sum(len(e.token_ids) for e in expected)
    assert plain.usage.prompt_tokens == sum(len(e.prompt_token_ids) for e in expected)
    texts = ["", ""]
    for chunk in client.completions.create(**request, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [e.text for e in expected]
    ids = [e.prompt_token_ids for e in expected]
    assert [c.text for c in client.completions.create(**request | {"prompt": ids}).choices] == texts
    echoed = client.completions.create(**request | {"prompt": ids[0]}, echo=True, logprobs=1)
    (choice,) = echoed.choices
    assert choice.text == prompts[0] + texts[0]
    offsets = choice.logprobs.text_offset
    assert [choice.text[a:b] for a, b in zip(offsets, [*offsets[1:], None])] == choice.logprobs.tokens
    parts = [c.choices[0] for c in client.completions.create(**request | {"prompt": ids[0]}, echo=True, stream=True)]
    assert "".join(p.text for p in parts) == choice.text
    assert client.completions.create(**GREEDY, prompt="a b c d", stop=None).usage.completion_tokens <= 16


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_response_formats(served: Served) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    plain, _ = chat(served, STORY, max_tokens=60, response_format=schema)
    assert sorted(json.loads(plain.choices[0].message.content)) == ["age", "name"]
    warm, _ = chat(served, STORY, max_tokens=60, response_format=schema, temperature=1.0, seed=1, n=2)
    assert all(sorted(json.loads(c.message.content)) == ["age", "name"] for c in warm.choices)
    free, _ = chat(served, STORY, max_tokens=40, response_format={"type": "json_object"})
    assert free.choices[0].message.content.startswith("{")
    text, _ = chat(served, max_tokens=20, response_format={"type": "text"})
    assert "Paris" in text.choices[0].message.content
    for body in ({"guided_regex": r"[a-c]{4}"}, {"structured_outputs": {"regex": r"[a-c]{4}"}}):
        plain, _ = chat(served, max_tokens=20, extra_body=body)
        assert re.fullmatch(r"[a-c]{4}", plain.choices[0].message.content)
        assert plain.choices[0].finish_reason == "stop"
    listed, _ = chat(served, max_tokens=9, extra_body={"guided_choice": ["Berlin", "Rome"]})
    assert listed.choices[0].message.content in ("Berlin", "Rome")
    by_json, _ = chat(served, max_tokens=60, extra_body={"guided_json": SCHEMA})
    assert sorted(json.loads(by_json.choices[0].message.content)) == ["age", "name"]


TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}},
]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_forced_tool_calls(served: Served, choice: Any) -> None:
    options = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 80}
    plain, chunks = chat(served, STORY, **options)
    (call,) = plain.choices[0].message.tool_calls
    assert call.function.name in ("weather", "time") and call.type == "function" and call.id.startswith("call_")
    arguments = json.loads(call.function.arguments)
    assert sorted(arguments) == ["age", "name"] if call.function.name == "weather" else isinstance(arguments, dict)
    pieces = [p for c in chunks if c.choices for p in c.choices[0].delta.tool_calls or ()]
    assert pieces[0].function.name == call.function.name and {p.index for p in pieces} == {0}
    assert "".join(p.function.arguments or "" for p in pieces) == call.function.arguments
    assert plain.choices[0].finish_reason == ("tool_calls" if choice == "required" else "stop")
    answered = [
        *STORY,
        {"role": "assistant", "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    assert served.client().chat.completions.create(**GREEDY, messages=answered, max_tokens=4).choices


def test_many_async_requests_get_what_they_get_alone(served: Served) -> None:
    """In float32; in bfloat16 see below."""
    questions = [[{"role": "user", "content": f"Say {word} twice."}] for word in ("ant", "bee", "cat", "dog")]
    alone = [
        engine_output(served, prompt_ids(served, q), SamplingParams(temperature=0, max_tokens=12)).text
        for q in questions
    ]

    async def ask(client: Any, messages: Any, stream: bool) -> str:
        answer = await client.chat.completions.create(**GREEDY, messages=messages, max_tokens=12, stream=stream)
        if not stream:
            return answer.choices[0].message.content
        return "".join([c.choices[0].delta.content or "" async for c in answer])

    async def ask_all() -> list[str]:
        async with served.async_client() as client:
            return await asyncio.gather(*(ask(client, q, s) for q in questions for s in (False, True)))

    assert asyncio.run(ask_all()) == [text for text in alone for _ in range(2)]


TIE = 0.5  # logprobs that rounding to bfloat16 may bring into another order


@needs_real_model
def test_in_bfloat16_company_changes_rounding_only() -> None:
    """Logprobs stay close, and a token that differs was nearly as likely (docs/serving.md says so)."""
    llm = AsyncLLM(str(REAL_MODEL), max_model_len=256, max_num_seqs=16, device="cpu", dtype="bfloat16")
    bodies = [
        {"prompt": f"The {animal} is an animal that", "max_tokens": 12, "temperature": 0, "logprobs": 5}
        for animal in ("ant", "bee", "cat", "dog", "fox", "hen", "owl", "pig")
    ]

    def ask(body: dict[str, Any]) -> dict[str, Any]:
        return served.post("/v1/completions", body).json()["choices"][0]["logprobs"]

    with serving(llm) as served:
        alone = [ask(body) for body in bodies]
        with ThreadPoolExecutor(len(bodies)) as pool:
            among_others = list(pool.map(ask, bodies))
        wait_idle(llm.engine)
    llm.shutdown()
    for one, other in zip(alone, among_others):
        for i, (token, instead) in enumerate(zip(one["tokens"], other["tokens"])):
            likely, also_likely = one["top_logprobs"][i], other["top_logprobs"][i]
            assert all(abs(likely[t] - also_likely[t]) < TIE for t in likely.keys() & also_likely.keys())
            if token != instead:
                assert likely[token] - likely[instead] < TIE
                break  # from here on they tell different stories


def test_models_and_tokens(served: Served) -> None:
    client = served.client()
    assert [m.id for m in client.models.list()] == ["smol", "SmolLM2"]
    assert client.models.retrieve("SmolLM2").id == "SmolLM2"
    text = "Hello 日本 <|im_end|>"
    tokens = served.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert tokens["tokens"] == served.llm.tokenizer.encode(text) and tokens["count"] == len(tokens["tokens"])
    assert len(tokens["token_strs"]) == tokens["count"]
    assert served.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": text}
    chat_tokens = served.post("/tokenize", {"messages": QUESTION}).json()
    assert chat_tokens["tokens"] == prompt_ids(served, QUESTION)


def test_litellm(served: Served) -> None:
    litellm = pytest.importorskip("litellm", reason="litellm is not installed")
    options = {"api_base": f"{served.url}/v1", "api_key": "none", "temperature": 0, "max_tokens": 20}
    plain = litellm.completion("openai/smol", messages=QUESTION, **options)
    assert "Paris" in plain.choices[0].message.content
    chunks = litellm.completion("openai/smol", messages=QUESTION, stream=True, **options)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == plain.choices[0].message.content
