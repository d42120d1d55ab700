"""The HTTP edge over an engine with a fake model: errors, limits, keys, clients that leave, shutdown."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from engine.fakes import by_hash
from engine.tokenizer import byte_tokenizer
from server.served import PATIENCE, VOCAB, Served, serving, wait_idle, wait_until, writes

from nanovllm.async_llm import EngineStopped

HI = [{"role": "user", "content": "hello"}]
LONG = {"messages": HI, "max_tokens": 200, "ignore_eos": True, "temperature": 0}
LONG_PROMPT = {"prompt": "hello", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
ServeFake = Callable[..., Served]


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object of a response, after its form and status were checked."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("application/json")
    (body,) = response.json().values()
    assert set(body) == {"message", "type", "param", "code"} and body["message"] and body["type"]
    return body


def events(response: httpx.Response) -> list[Any]:
    """The events of a stream, as they were sent; the last one is "[DONE]"."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == "" and all(b.startswith("data: ") for b in blocks)
    return [b[6:] if b == "data: [DONE]" else json.loads(b[6:]) for b in blocks]


def test_h1_plain_json_unless_a_stream_is_asked_for(serve_fake: ServeFake) -> None:
    served = serve_fake(writes("the cat"))
    for body in ({"messages": HI}, {"messages": HI, "stream": False}, {"messages": HI, "stream": None}):
        response = served.post("/v1/chat/completions", body)
        assert response.headers["content-type"] == "application/json"
        assert int(response.headers["content-length"]) == len(response.content)
        assert response.json()["choices"][0]["message"] == {"role": "assistant", "content": "the cat"}
    got = events(served.post("/v1/chat/completions", {"messages": HI, "stream": True}))
    assert got[-1] == "[DONE]" and got[-2]["choices"][0]["finish_reason"] == "stop"
    assert "usage" not in got[0]


def test_h5_two_servers_at_once(serve_fake: ServeFake) -> None:
    servers = [serve_fake(writes(text)) for text in ("one", "two")]
    texts = [s.post("/v1/completions", {"prompt": "x"}).json()["choices"][0]["text"] for s in servers]
    assert texts == ["one", "two"]


BAD_CHATS = [
    ({}, "messages", "messages: expected this field, got none"),
    ({"messages": []}, "messages", "at least 1 item"),
    (
        {"messages": [{"role": "robot", "content": "x"}]},
        "messages[0].role",
        "expected 'system', 'developer', 'user', 'assistant' or 'tool', got \"robot\"",
    ),
    (
        {"messages": [{"role": "user", "content": ""}]},
        "messages[0]",
        "expected text in a message of role user, got none",
    ),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0]", "expected text"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]", "expected 'text', "),
    ({"messages": HI, "temperature": -1}, "temperature", "expected a number >= 0, got -1"),
    ({"messages": HI, "temperature": "hot"}, "temperature", 'expected a number, got "hot"'),
    ({"messages": HI, "top_p": 0}, "top_p", "expected a number > 0, got 0"),
    ({"messages": HI, "n": 0}, "n", "expected a number >= 1, got 0"),
    ({"messages": HI, "max_tokens": 0}, "max_tokens", "expected a number >= 1, got 0"),
    ({"messages": HI, "max_tokens": 2, "min_tokens": 3}, "min_tokens", "in [0, 2], got 3"),
    ({"messages": HI, "stop": ["a", ""]}, "stop[1]", 'expected a string of at least 1 character, got ""'),
    ({"messages": HI, "logit_bias": {"x": 1}}, "logit_bias", "token ids as keys, got 'x'"),
    ({"messages": HI, "logit_bias": {"9999": 1}}, None, "logit_bias: expected token ids in [0, 300), got 9999"),
    ({"messages": HI, "stop_token_ids": [300]}, None, "stop_token_ids: expected token ids in [0, 300), got 300"),
    ({"messages": HI, "top_logprobs": 3}, "top_logprobs", "logprobs to be true"),
    ({"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "expected a number <= 20, got 21"),
    ({"messages": HI, "tool_choice": "required"}, "tool_choice", "expected tools to choose from"),
    ({"messages": HI, "tools": [{"function": {"name": "f"}}]}, "tools", "--tool-call-parser"),
    (
        {
            "messages": HI,
            "tools": [{"function": {"name": "f"}}],
            "tool_choice": {"type": "function", "function": {"name": "g"}},
        },
        "tool_choice",
        "expected one of f, got 'g'",
    ),
    ({"messages": HI, "response_format": {"type": "json_schema"}}, "response_format", "json_schema: expected"),
    ({"messages": HI, "structured_outputs": {"regex": "(a"}}, None, "structured_outputs.regex"),
    ({"messages": HI, "structured_outputs": {"regex": "(a{1000}){1000}"}}, None, "structured_outputs.regex"),
    ({"messages": HI, "guided_choice": ["a"] * 4097}, None, "choice: expected at most 4096 strings, got 4097"),
    ({"messages": HI, "structured_outputs": {"regex": "a", "choice": ["b"]}}, None, "got regex and choice"),
    ({"messages": HI, "guided_regex": "a", "response_format": {"type": "json_object"}}, None, "one form of the answer"),
    (
        {"messages": HI, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}},
        None,
        "json",
    ),
    ({"messages": HI, "best_of": 3}, "best_of", "best_of is not supported by this server, got 3"),
    ({"messages": [{"role": "user", "content": "x" * 400}]}, "messages", "needs"),
]


def name_of(value: Any) -> str:
    return json.dumps(value)[:60] if isinstance(value, dict) else ""


@pytest.mark.parametrize("body, param, text", BAD_CHATS, ids=name_of)
def test_h6_bad_chats_are_400_and_the_engine_is_untouched(
    bad_served: Served, body: dict[str, Any], param: str | None, text: str
) -> None:
    for stream in (False, True):
        got = error(bad_served.post("/v1/chat/completions", body | {"stream": stream}), 400)
        assert text in got["message"] and got["type"] == "invalid_request_error"
        assert param is None or (got["param"] or "").startswith(param)
    assert not bad_served.llm.engine.requests and bad_served.llm.engine.num_requests == 0


BAD_COMPLETIONS = [
    ({}, "prompt"),
    ({"prompt": []}, "at least 1"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [[]]}, "at least 1"),
    ({"prompt": ["ok", ""]}, "prompt[1]"),
    ({"prompt": ["ok", "x" * 400]}, "prompt[1]: of 400 tokens needs"),
    ({"prompt": [5, 300]}, "[0, 300), got 300"),
    ({"prompt": [5, -1]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": "x", "suffix": "y"}, "suffix is not supported"),
    ({"prompt": "x", "logprobs": 30}, "logprobs"),
]


@pytest.mark.parametrize("body, text", BAD_COMPLETIONS, ids=name_of)
def test_bad_completions(bad_served: Served, body: dict[str, Any], text: str) -> None:
    assert text in error(bad_served.post("/v1/completions", body), 400)["message"]


SURROGATE = "messages[0].content: expected valid text, got a lone surrogate at index 0"
BAD_BODIES = {  # and what the error says
    "empty": (b"", "body: expected a JSON object, got none"),
    "cut": (b'{"messages": [', "body: expected JSON, got an error at character 14: Expecting value"),
    "utf-8": (b'{"messages": "\xff\xfe"}', "body: expected JSON in UTF-8, got byte 0xff at byte 14"),
    "surrogate": (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', SURROGATE),
    "list": (b"[1, 2]", "body: expected a JSON object, got a list"),
    "number": (b"5", "body: expected a JSON object, got 5"),
    "deep": (b"[" * 100_000, "body: expected JSON, got one nested too deeply"),
    "nan": (
        b'{"messages": [{"role": "user", "content": "x"}], "prompt": "x", "temperature": NaN}',
        "temperature: expected a number <= 10000, got NaN",
    ),
    "long number": (b'{"n": ' + b"9" * 5000 + b"}", "body: expected numbers of at most 4300 digits, got a longer one"),
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_malformed_bodies(bad_served: Served, name: str) -> None:
    (body, text), headers = BAD_BODIES[name], {"content-type": "application/json"}
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        if name != "nan" or path.startswith("/v1"):  # the others have no temperature
            got = error(bad_served.post(path, content=body, headers=headers), 400)
            assert text in got["message"] or (text == SURROGATE and path != "/v1/chat/completions")
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        got = error(bad_served.post("/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": kind}), 400)
        assert got["message"] == f"body: expected Content-Type: application/json, got {kind}"


@pytest.fixture(scope="module")
def bad_served() -> Any:
    """One server for all requests that are refused."""
    from server.served import fake_llm

    with pytest.MonkeyPatch.context() as monkeypatch:
        llm = fake_llm(monkeypatch, num_blocks=64)
        with serving(llm, served_model_name=("fake",)) as served:
            yield served
            wait_idle(llm.engine)
        llm.shutdown()


def test_paths_methods_and_models(bad_served: Served) -> None:
    assert "no such path: /v1/nothing" in error(bad_served.get("/v1/nothing"), 404)["message"]
    assert "GET is not allowed" in error(bad_served.get("/v1/completions"), 405)["message"]
    got = error(bad_served.post("/v1/completions", {"model": "gpt-4", "prompt": "x"}), 404)
    assert got["code"] == "model_not_found" and "expected fake, got 'gpt-4'" in got["message"]
    assert error(bad_served.get("/v1/models/gpt-4"), 404)["param"] == "model"
    assert "not supported" in error(bad_served.post("/v1/embeddings", {"input": "x", "model": "fake"}), 400)["message"]
    assert "prompt: expected this field, got none" in error(bad_served.post("/tokenize", {}), 400)["message"]
    assert "got 300" in error(bad_served.post("/detokenize", {"tokens": [300]}), 400)["message"]
    assert bad_served.get("/version").json()["version"] and bad_served.get("/").status_code == 200


@pytest.mark.parametrize(
    "path, body, text",
    [
        ("/tokenize", {"prompt": "x" * 100_000}, "prompt of 100000 bytes has at least"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 100_000}]}, "has at least"),
        ("/tokenize", {"messages": HI, "chat_template_kwargs": {"tools": 1}}, "got the reserved name tools"),
        ("/detokenize", {"tokens": [300]}, "tokens: expected token ids in [0, 300), got 300"),
        ("/v1/completions", {"prompt": "x" * 100_000}, "has at least"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 100_000}]}, "has at least"),
    ],
)
def test_what_a_client_did_wrong_is_no_traceback_in_the_log(
    bad_served: Served, caplog: pytest.LogCaptureFixture, path: str, body: dict[str, Any], text: str
) -> None:
    got = error(bad_served.post(path, body), 400)
    assert text in got["message"] and got["param"] in body
    assert not [r for r in caplog.records if r.exc_info]


def test_an_engine_that_ends_meanwhile_is_503(
    serve_fake: ServeFake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve_fake()

    def gone(*_: Any) -> None:
        raise EngineStopped("AsyncLLM: the engine was shut down")

    monkeypatch.setattr(served.llm, "open_stream", gone)
    assert error(served.post("/v1/completions", {"prompt": "x"}), 503)["code"] == "engine_unavailable"
    assert served.app.state.service.num_open == 0 and not [r for r in caplog.records if r.exc_info]


def test_the_description_has_the_bounds(bad_served: Served) -> None:
    schemas = bad_served.get("/openapi.json").json()["components"]["schemas"]
    n, top_p = (schemas["ChatRequest"]["properties"][name]["anyOf"][0] for name in ("n", "top_p"))
    assert n == {"type": "integer", "minimum": 1, "maximum": 128}
    assert top_p == {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
    tokens = schemas["DetokenizeRequest"]["properties"]["tokens"]["items"]
    assert tokens == {"type": "integer", "minimum": 0, "maximum": VOCAB - 1}


def test_unknown_fields_are_ignored(serve_fake: ServeFake) -> None:
    served = serve_fake(writes("ok"))
    body = {"messages": HI, "store": True, "metadata": {"a": 1}, "service_tier": "auto", "x-unknown": [1]}
    assert served.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"] == "ok"


def test_api_keys(serve_fake: ServeFake) -> None:
    import openai

    served = serve_fake(writes("ok"), api_key=("one", "zwei"))
    for key in ("one", "zwei"):
        assert served.client(api_key=key).completions.create(model="fake", prompt="x").choices[0].text == "ok"
    with pytest.raises(openai.AuthenticationError, match="got another one"):
        served.client(api_key="three").completions.create(model="fake", prompt="x")
    got = error(served.post("/v1/completions", {"prompt": "x"}), 401)
    assert got["code"] == "invalid_api_key" and "got none" in got["message"]
    assert served.get("/health").status_code == served.get("/metrics").status_code == 200
    assert served.get("/v1/models").status_code == 401


def test_open_paths_are_open_behind_a_proxy_that_keeps_its_prefix(serve_fake: ServeFake) -> None:
    served = serve_fake(writes("ok"), api_key=("key",), root_path="/api")
    assert [served.get(f"{prefix}/health").status_code for prefix in ("", "/api")] == [200, 200]
    assert served.get("/api/v1/models").status_code == 401


def test_megabytes_of_text_are_refused_at_once(bad_served: Served) -> None:
    text = "the cat " * 1_000_000
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}]},
        "/v1/completions": {"prompt": text},
    }
    bodies["/tokenize"] = {"prompt": text}
    for path, body in bodies.items():
        assert "bytes has at least" in error(bad_served.post(path, body), 400)["message"]


def test_cors(serve_fake: ServeFake) -> None:
    served = serve_fake(writes("ok"), api_key=("key",), cors_origin=("https://chat.example",))
    ask = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    allowed = httpx.options(served.url + "/v1/chat/completions", headers=ask)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://chat.example"
    other = httpx.options(served.url + "/v1/chat/completions", headers=ask | {"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers
    refused = served.post("/v1/completions", {"prompt": "x"}, headers={"origin": "https://chat.example"})
    assert error(refused, 401) and refused.headers["access-control-allow-origin"] == "https://chat.example"


def test_body_limit(serve_fake: ServeFake) -> None:
    served = serve_fake(writes("ok"), max_body_bytes=1000)
    big = json.dumps({"prompt": "x" * 2000}).encode()
    got = error(served.post("/v1/completions", content=big, headers={"content-type": "application/json"}), 413)
    assert "at most 1000 bytes" in got["message"]

    def chunks() -> Any:  # without a content-length
        yield from (big[i : i + 100] for i in range(0, len(big), 100))

    error(served.post("/v1/completions", content=chunks(), headers={"content-type": "application/json"}), 413)
    assert served.post("/v1/completions", {"prompt": "x"}).status_code == 200


def test_queue_limit(serve_fake: ServeFake) -> None:
    import openai

    served = serve_fake(engine={"max_num_seqs": 2}, max_queue=1)
    go_on = threading.Event()
    served.llm.engine.runner.on_launch = lambda batch: go_on.wait(PATIENCE)
    answers: list[httpx.Response] = []
    threads = [
        threading.Thread(target=lambda: answers.append(served.post("/v1/completions", LONG_PROMPT))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: served.app.state.service.num_open == 3, "three run or wait")
    with served.client() as client, pytest.raises(openai.RateLimitError, match="the server is busy: 3 sequences"):
        client.chat.completions.create(model="fake", messages=HI)
    response = served.post("/v1/completions", {"prompt": "x", "n": 2})
    assert error(response, 429)["code"] == "queue_full" and response.headers["retry-after"] == "1"
    go_on.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert [a.status_code for a in answers] == [200] * 3
    assert served.post("/v1/completions", {"prompt": "x"}).status_code == 200


def test_slow_compiles_hold_up_no_other_request(serve_fake: ServeFake, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance")
    served = serve_fake(writes("aa"))
    grammars, go_on = served.llm.engine.grammars, threading.Event()
    compile_now, began = grammars._compile, []

    def slowly(kind: str, text: str) -> Any:
        began.append(text)
        assert go_on.wait(PATIENCE)
        return compile_now(kind, text)

    monkeypatch.setattr(grammars, "_compile", slowly)
    answers: list[httpx.Response] = []
    bodies = [{"prompt": "x", "guided_regex": f"a{{1,{i}}}"} for i in range(2, 8)]
    threads = [threading.Thread(target=lambda b=b: answers.append(served.post("/v1/completions", b))) for b in bodies]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: len(began) > 0 and served.app.state.service.num_open == 6, "forms are compiled")
        for _ in range(5):
            assert served.post("/v1/completions", {"prompt": "x"}).status_code == 200
        assert not answers
    finally:
        go_on.set()
        for thread in threads:
            thread.join(PATIENCE)
    assert [a.status_code for a in answers] == [200] * 6


def test_timeout(serve_fake: ServeFake) -> None:
    served = serve_fake(request_timeout=0.3)
    served.llm.engine.runner.on_launch = lambda batch: time.sleep(0.01)
    got = error(served.post("/v1/chat/completions", LONG), 504)
    assert got["type"] == "timeout_error" and "longer than 0.3 seconds" in got["message"]
    response = served.post("/v1/chat/completions", LONG | {"stream": True})
    assert response.status_code == 200 and "longer than 0.3 seconds" in response.text.split("data: ")[-1]
    wait_idle(served.llm.engine)


@pytest.mark.parametrize("overlap", [False, True])
def test_h3_a_client_that_leaves_ends_its_request(serve_fake: ServeFake, overlap: bool) -> None:
    """Blocks are free within two steps of the disconnect; nothing of the request is left."""
    served = serve_fake(engine={"overlap": overlap})
    engine, commands = served.llm.engine, served.llm._commands
    steps = threading.Semaphore(0)
    num_launched = 0

    def launch(batch: Any) -> None:
        nonlocal num_launched
        assert steps.acquire(timeout=PATIENCE)
        num_launched += 1

    engine.runner.on_launch = launch
    before = served.num_tasks
    for body in (LONG | {"stream": True}, LONG, LONG | {"n": 3, "stream": True}):
        with socket.create_connection(("127.0.0.1", int(served.url.split(":")[-1]))) as s:
            data = json.dumps(body).encode()
            s.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
            s.sendall(b"Content-Length: %d\r\n\r\n" % len(data) + data)
            steps.release(4)
            got = b""
            while body.get("stream") and got.count(b"data: ") < 2:
                got += s.recv(4096)
            wait_until(lambda: steps._value == 0 and bool(engine.requests), "the steps are made")
            assert engine.scheduler.block_manager.used_block_ids
        wait_until(lambda: not commands.empty(), "the disconnect is seen, while the engine waits in a step")
        num_before = num_launched
        steps.release(2)
        wait_until(lambda: not engine.scheduler.block_manager.used_block_ids, "the blocks are free")
        assert num_launched - num_before <= 2
        wait_idle(engine)
        while steps.acquire(blocking=False):
            pass
    assert not served.llm._streams and served.app.state.service.num_open == 0
    wait_until(lambda: served.num_tasks <= before + 1, "the tasks of the requests are gone")


def test_failed_step_is_500_and_the_server_goes_on(serve_fake: ServeFake) -> None:
    served = serve_fake(writes("ok"))

    def fail(batch: Any) -> None:
        raise MemoryError("no room")

    served.llm.engine.runner.on_launch = fail
    for stream in (False, True):
        got = error(served.post("/v1/chat/completions", {"messages": HI, "stream": stream}), 500)
        assert "a step failed" in got["message"] and "no room" in got["message"]
    served.llm.engine.runner.on_launch = None
    assert served.get("/health").json() == {"status": "ok"}
    assert served.post("/v1/completions", {"prompt": "x"}).json()["choices"][0]["text"] == "ok"


def test_step_that_fails_later_is_the_last_event(serve_fake: ServeFake) -> None:
    served = serve_fake(by_hash(VOCAB))
    calls = iter(range(1000))

    def fail_late(batch: Any) -> None:
        if next(calls) == 5:
            raise MemoryError("no room")

    served.llm.engine.runner.on_launch = fail_late
    last = served.post("/v1/chat/completions", LONG | {"stream": True}).text.split("data: ")[-1]
    assert "no room" in json.loads(last)["error"]["message"]
    served.llm.engine.runner.on_launch = None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_dead_engine_is_503(serve_fake: ServeFake) -> None:
    served = serve_fake()

    def die(batch: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    served.llm.engine.runner.on_launch = die
    assert "illegal memory access" in error(served.post("/v1/chat/completions", LONG), 500)["message"]
    wait_until(lambda: not served.llm.is_running, "the engine is dead")
    assert "illegal memory access" in error(served.get("/health"), 503)["message"]
    assert error(served.post("/v1/chat/completions", LONG), 503)["code"] == "engine_unavailable"
    assert "nanovllm:engine_up" in served.get("/metrics").text


def test_metrics(serve_fake: ServeFake) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    served = serve_fake(writes("the cat sat"))
    count = len(byte_tokenizer().encode("the cat sat")) + 1
    for _ in range(2):
        usage = served.post("/v1/chat/completions", {"messages": HI}).json()["usage"]
    assert usage["completion_tokens"] == count and usage["prompt_tokens_details"]["cached_tokens"] > 0
    text = served.get("/metrics").text
    samples = {s.name: s.value for f in text_string_to_metric_families(text) for s in f.samples}
    assert samples["nanovllm:generation_tokens_total"] == 2 * count
    assert samples["nanovllm:prompt_tokens_total"] == 2 * usage["prompt_tokens"]
    assert samples["nanovllm:prefix_cache_hits_total"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert samples["nanovllm:time_to_first_token_seconds_count"] == 2
    assert samples["nanovllm:inter_token_latency_seconds_count"] <= 2 * (count - 1)
    assert samples["nanovllm:num_requests_running"] == samples["nanovllm:kv_cache_usage_perc"] == 0
    assert 0 < samples["nanovllm:prefix_cache_hit_rate"] < 1
    assert "nanovllm:num_preemptions_total" in samples and samples["nanovllm:engine_up"] == 1


def test_shutdown_lets_running_requests_end(monkeypatch: pytest.MonkeyPatch) -> None:
    from server.served import fake_llm

    llm = fake_llm(monkeypatch)
    go_on = threading.Event()
    llm.engine.runner.on_launch = lambda batch: go_on.wait(PATIENCE) and time.sleep(0.005)
    texts = []
    with serving(llm) as served:

        def ask() -> None:
            texts.append(served.post("/v1/chat/completions", LONG | {"max_tokens": 60}).json())

        thread = threading.Thread(target=ask)
        thread.start()
        wait_until(lambda: bool(llm.engine.requests), "the request runs")
        go_on.set()
    thread.join(PATIENCE)
    assert texts[0]["usage"]["completion_tokens"] == 60
    wait_idle(llm.engine)
    llm.shutdown()


def test_shutdown_ends_what_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    from server.served import fake_llm

    llm = fake_llm(monkeypatch)
    llm.engine.runner.on_launch = lambda batch: time.sleep(0.05)
    body = LONG | {"max_tokens": 2000}
    answers: list[httpx.Response] = []
    began, lines = threading.Event(), []
    with serving(llm, shutdown_timeout=0.3) as served:

        def read() -> None:
            url, streamed = served.url + "/v1/chat/completions", body | {"stream": True}
            with httpx.stream("POST", url, json=streamed, timeout=PATIENCE) as response:
                for line in response.iter_lines():
                    lines.append(line)
                    began.set()

        def ask() -> None:
            answers.append(served.post("/v1/chat/completions", body))

        threads = [threading.Thread(target=target) for target in (read, ask)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(llm.engine.scheduler.running) == 2, "the requests run")
        assert began.wait(PATIENCE)
    for thread in threads:
        thread.join(PATIENCE)
    assert "the server is shutting down" in error(answers[0], 503)["message"]
    assert "the server is shutting down" in [line for line in lines if line][-1]
    llm.engine.runner.on_launch = None
    wait_idle(llm.engine)
    llm.shutdown()


def test_tool_calls_of_the_model(serve_fake: ServeFake, tmp_path: Any) -> None:
    """Auto tool choice: the template's format is recognised, text, thoughts and calls are told apart."""
    template = tmp_path / "template.jinja"
    template.write_text("{% if tools %}<tool_call>{% endif %}{{ messages[0].content }}<think>?")
    text = '<think>\nhm\n</think>\n\nI look.\n<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'
    served = serve_fake(writes(text), engine={"num_blocks": 512}, chat_template=str(template))
    request = {
        "model": "fake",
        "messages": HI,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    }
    client = served.client()
    message = client.chat.completions.create(**request).choices[0].message
    assert message.content == "I look." and message.reasoning_content == "hm"
    (call,) = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("f", '{"a": "x"}')
    deltas = [c.choices[0] for c in client.chat.completions.create(**request, stream=True)]
    assert "".join(d.delta.content or "" for d in deltas) == "I look."
    assert "".join(getattr(d.delta, "reasoning_content", None) or "" for d in deltas) == "hm"
    pieces = [p for d in deltas for p in d.delta.tool_calls or ()]
    assert pieces[0].function.name == "f" and "".join(p.function.arguments for p in pieces) == '{"a": "x"}'
    assert deltas[-1].finish_reason == "tool_calls"
    plain = client.chat.completions.create(**request | {"tool_choice": "none"}).choices[0].message
    assert plain.tool_calls is None and "<tool_call>" in plain.content


def test_template_variables_and_roles(serve_fake: ServeFake, tmp_path: Any) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{{ flavour }}")
    served = serve_fake(writes("ok"), chat_template=str(template))
    body = {
        "messages": [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ],
        "chat_template_kwargs": {"flavour": "mint"},
    }
    tokens = served.post("/tokenize", body).json()["tokens"]
    assert byte_tokenizer().decode(tokens) == "system:be brief;user:a\nb;mint"
    assert served.post("/v1/chat/completions", body).json()["usage"]["prompt_tokens"] == len(tokens)


def test_slow_readers_keep_their_text(serve_fake: ServeFake) -> None:
    served = serve_fake(engine={"num_blocks": 512})
    body = {"prompt": "the cat", "max_tokens": 1500, "ignore_eos": True, "temperature": 0, "logprobs": 5}
    whole = served.post("/v1/completions", body).json()["choices"][0]["text"]

    async def read_late() -> str:
        url = served.url + "/v1/completions"
        async with (
            httpx.AsyncClient(timeout=PATIENCE) as client,
            client.stream("POST", url, json=body | {"stream": True}) as response,
        ):
            await asyncio.sleep(0.5)
            lines = [line async for line in response.aiter_lines() if line.startswith("data: {")]
        return "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines)

    assert asyncio.run(read_late()) == whole
