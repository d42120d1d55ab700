"""Many clients at once, good, bad and impatient: the good ones get what they get alone, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
from collections.abc import Callable
from typing import Any

import httpx
from server.served import PATIENCE, Served, wait_idle, wait_until

NUM_GOOD = 100
NUM_OTHERS = 100


def request_of(number: int) -> dict[str, Any]:
    """A request that differs from the others in all that may be mixed up."""
    rng = random.Random(number)
    return {
        "prompt": [rng.randrange(2, 300) for _ in range(rng.randrange(1, 40))],
        "max_tokens": rng.randrange(1, 60),
        "temperature": rng.choice([0, 1]),
        "seed": number,
        "n": rng.choice([1, 1, 1, 2]),
        "ignore_eos": True,
        "stop": rng.choice([None, None, "e", ["a", "zz"]]),
        "nobody_knows": [number],
    }


async def texts_of(client: httpx.AsyncClient, body: dict[str, Any], stream: bool) -> list[tuple[str, str]]:
    """(text, finish_reason) of each choice."""
    if not stream:
        answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
        return [(c["text"], c["finish_reason"]) for c in answer["choices"]]
    texts, reasons = [""] * body["n"], [""] * body["n"]
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                texts[choice["index"]] += choice["text"]
                reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
    return list(zip(texts, reasons))


async def leave_early(client: httpx.AsyncClient, rng: random.Random) -> None:
    body = {"prompt": [5] * rng.randrange(1, 60), "max_tokens": 500, "ignore_eos": True, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for _ in response.aiter_bytes():
            await asyncio.sleep(rng.random() * 0.01)
            if rng.random() < 0.3:
                return


async def give_up(client: httpx.AsyncClient, rng: random.Random) -> None:
    body = {"prompt": [5], "max_tokens": 500, "ignore_eos": True}
    task = asyncio.create_task(client.post("/v1/completions", json=body))
    await asyncio.sleep(rng.random() * 0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def talk_rubbish(client: httpx.AsyncClient, rng: random.Random) -> None:
    content = rng.choice(
        [b"{", b"\xff" * 100, b"[" * 50_000, b"x" * 70_000, b'{"prompt": "\\ud800"}', b'{"prompt": [1e999]}']
    )
    response = await client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code in (400, 413), response.text


async def break_off(port: int, rng: random.Random) -> None:
    """Half a request, or bytes that are no HTTP, and then silence."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
    )
    writer.write(rng.choice([head, b"\x16\x03\x01\x02 no http\r\n\r\n", head[:30]]))
    await writer.drain()
    await asyncio.sleep(rng.random() * 0.05)
    writer.close()
    await asyncio.gather(writer.wait_closed(), return_exceptions=True)
    del reader


async def read_slowly(client: httpx.AsyncClient, expected: list[tuple[str, str]], body: dict[str, Any]) -> None:
    texts = [""] * body["n"]
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        async for line in response.aiter_lines():
            await asyncio.sleep(0.002)
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                texts[choice["index"]] += choice["text"]
    assert texts == [text for text, _ in expected]


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_crowd(serve_fake: Callable[..., Served]) -> None:
    served = serve_fake(engine={"num_blocks": 300, "max_num_seqs": 64}, max_body_bytes=60_000)
    port = int(served.url.split(":")[-1])
    engine = served.llm.engine

    async def alone() -> list[list[tuple[str, str]]]:
        async with httpx.AsyncClient(base_url=served.url, timeout=PATIENCE) as client:
            return [await texts_of(client, request_of(i), stream=False) for i in range(NUM_GOOD)]

    async def crowd(expected: list[list[tuple[str, str]]]) -> None:
        rng = random.Random(0)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=served.url, timeout=PATIENCE, limits=limits) as client:
            good = [texts_of(client, request_of(i), stream=i % 2 == 0) for i in range(NUM_GOOD)]
            others = [
                rng.choice(
                    [
                        lambda: leave_early(client, rng),
                        lambda: give_up(client, rng),
                        lambda: talk_rubbish(client, rng),
                        lambda: break_off(port, rng),
                        lambda: read_slowly(client, expected[0], request_of(0)),
                    ]
                )()
                for _ in range(NUM_OTHERS)
            ]
            results = await asyncio.gather(*good, *others)
        assert results[:NUM_GOOD] == expected

    expected = asyncio.run(alone())
    asyncio.run(crowd(expected))  # opens what stays open
    wait_idle(engine)
    gc.collect()
    wait_until(lambda: served.num_tasks <= 3, "the tasks of the requests are gone")
    files, tasks = num_files(), served.num_tasks
    asyncio.run(crowd(expected))
    wait_idle(engine)
    gc.collect()
    wait_until(lambda: served.num_tasks <= tasks, "the tasks of the requests are gone")
    wait_until(lambda: num_files() <= files, f"{files} open files as before, {num_files()}")
    service = served.app.state.service
    assert service.num_open == 0 and not served.llm._streams and engine.scheduler.num_preemptions > 0
    assert served.get("/health").status_code == 200
