"""Live events and their controls: readers come, go and are slow; the engine never waits for them."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from engine.fakes import greedy
from inspector.served import PATIENCE, fake_llm

from nanovllm.inspector import live as live_module
from nanovllm.inspector.live import Live, NobodyWatches
from nanovllm.inspector.view import View


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch):
    llm = fake_llm(monkeypatch)
    yield llm
    llm.shutdown()


def run(coroutine) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, PATIENCE))


async def messages(stream: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    async for message in stream:
        if message.startswith("data: "):
            for event in json.loads(message.removeprefix("data: ")):
                yield event


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def add(llm, *args: Any, **options: Any) -> None:
    llm.call(lambda: llm.engine.add_request(*args, **options)).result()


def test_every_reader_gets_a_snapshot_and_then_everything(llm) -> None:
    live = Live(llm, interval=0.001)

    async def watch(num_tokens: int) -> View:
        view = View()
        async for event in messages(live.events()):
            if event["kind"] not in ("control", "end"):
                view.apply(event)
            if view.num_ended == 1:
                break
        assert view.num_tokens == num_tokens
        return view

    async def main() -> None:
        readers = [asyncio.create_task(watch(6)) for _ in range(3)]
        await until(lambda: llm.engine.observer and len(llm.engine.observer._sinks) == 3)
        add(llm, [1, 2, 3], greedy(6, ignore_eos=True))
        await asyncio.gather(*readers)
        await until(lambda: live.num_viewers == 0)
        await until(lambda: llm.engine.observer is None)

    run(main())


def test_slow_reader_gets_a_snapshot_in_place_of_what_it_missed(llm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "_MAX_PENDING", 10)
    live = Live(llm, interval=0.001)

    async def main() -> None:
        stream = live.events()
        reader = messages(stream)
        assert [(await anext(reader))["kind"] for _ in range(2)] == ["control", "snapshot"]
        add(llm, [1, 2, 3], greedy(100, ignore_eos=True))
        await until(lambda: not llm.engine.has_work)
        assert max(len(v.pending) for v in live._viewers) <= 11
        add(llm, [4, 5, 6], greedy(5, ignore_eos=True))
        view = View()
        kinds = []
        async for event in reader:
            kinds.append(event["kind"])
            if event["kind"] != "control":
                view.apply(event)
            if "snapshot" in kinds and not llm.engine.has_work and not view.running and not view.waiting:
                break
        assert "snapshot" in kinds and not view.owners
        assert set(view.hash_to_block_id.values()) == set(llm.engine.scheduler.block_manager.hash_to_block_id.values())
        await stream.aclose()

    run(main())


def test_pause_needs_a_reader_and_ends_with_the_last(llm) -> None:
    live = Live(llm, interval=0.001)

    async def main() -> None:
        with pytest.raises(NobodyWatches):
            await live.control("pause")
        first, second = live.events(), live.events()
        await anext(first), await anext(second)
        assert await live.control("pause")
        add(llm, [1, 2, 3], greedy(20, ignore_eos=True))
        await asyncio.sleep(0.02)
        assert not llm.engine.runner.batches
        assert await live.control("step", 3)
        await until(lambda: len(llm.engine.runner.batches) == 3)
        await first.aclose()
        assert live.is_paused
        events = [e async for e in messages_now(second)]
        assert {"kind": "control", "paused": True} in events
        await second.aclose()
        assert not live.is_paused
        await until(lambda: not llm.engine.has_work)
        assert len(llm.engine.runner.batches) == 20
        for action, steps, message in (
            ("stop", 1, "action: expected one of"),
            ("step", 0, "steps: expected 1 to 1000"),
        ):
            with pytest.raises(ValueError, match=message):
                await live.control(action, steps)

    run(main())


async def messages_now(stream: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    """Events of the next message."""
    for event in json.loads((await anext(stream)).removeprefix("data: ")):
        yield event


def test_step_pauses_a_running_engine(llm) -> None:
    live = Live(llm, interval=0.001)

    async def main() -> None:
        stream = live.events()
        await anext(stream)
        assert await live.control("step") and live.is_paused
        assert not await live.control("resume") and not live.is_paused
        await stream.aclose()

    run(main())


@pytest.mark.parametrize("how", ["close", "shutdown"])
def test_streams_end_with_the_server_and_with_the_engine(llm, how: str) -> None:
    live = Live(llm, interval=0.001)

    async def main() -> list[dict[str, Any]]:
        stream = live.events()
        await anext(stream)
        await live.control("pause")
        if how == "close":
            live.close()
        else:
            await asyncio.get_running_loop().run_in_executor(None, llm.shutdown)
        return [event async for event in messages(stream)]

    assert run(main())[-1] == {"kind": "end"}
    assert not live.is_paused


def test_quiet_streams_say_that_they_are_there(llm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "_HEARTBEAT", 0.01)
    live = Live(llm, interval=0.001)

    async def main() -> None:
        stream = live.events()
        while not (await anext(stream)).startswith(":"):
            pass
        await stream.aclose()

    run(main())


def test_router(llm) -> None:
    fastapi = pytest.importorskip("fastapi", reason="needs the extra `server`")
    testclient = pytest.importorskip("fastapi.testclient", reason="needs httpx")
    from nanovllm.server.inspector import inspector_router

    def check(authorization: str | None = fastapi.Header(None)) -> None:
        if authorization != "Bearer secret":
            raise fastapi.HTTPException(401, "no key")

    live = Live(llm, interval=0.001)
    app = fastapi.FastAPI()
    app.include_router(inspector_router(live, [fastapi.Depends(check)]))
    assert not app.openapi()["paths"]
    client = testclient.TestClient(app)
    page = client.get("/inspector")
    assert page.status_code == 200 and "nanovllm inspector" in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert client.get("/inspector/events").status_code == 401
    assert client.post("/inspector/control", json={"action": "pause"}).status_code == 401
    headers = {"Authorization": "Bearer secret"}
    for body, status in (({"action": "pause"}, 409), ({"action": "jump"}, 422), ({"action": "step", "steps": 0}, 422)):
        assert client.post("/inspector/control", json=body, headers=headers).status_code == status
    assert client.post("/inspector/control", json={"action": "resume"}, headers=headers).json() == {"paused": False}
    live.close()
    assert '"end"' in client.get("/inspector/events", headers=headers).text
