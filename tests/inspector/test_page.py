"""The inspector's page in headless Chromium: what it shows is what the engine has."""

import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engine.fakes import greedy, make_engine
from inspector.served import PATIENCE, browser, fake_llm, page, serving  # noqa: F401 - fixtures

from nanovllm.cli import main
from nanovllm.engine.observer import observe
from nanovllm.inspector import record, walkthrough
from nanovllm.inspector.live import Live
from nanovllm.inspector.view import View


def dump(view: View) -> dict[str, Any]:
    """A view in the form of `EngineState.dump()` of page/state.js, by way of JSON."""
    seqs = {
        s.seq_id: [
            s.name,
            s.num_prompt_tokens,
            s.max_length,
            s.token_ids,
            s.block_table,
            s.num_cached,
            s.state,
            s.reason,
        ]
        for s in view.seqs.values()
    }
    contents = {b: [c.hash, c.parent_hash, c.token_ids, c.is_published] for b, c in view.contents.items()}
    dumped = {
        "seqs": seqs,
        "waiting": view.waiting,
        "running": view.running,
        "owners": {b: sorted(o) for b, o in view.owners.items()},
        "contents": contents,
        "hashes": view.hash_to_block_id,
        "next": view.next_free,
        "counts": {
            "steps": view.num_steps,
            "preemptions": view.num_preemptions,
            "tokens": view.num_tokens,
            "ended": view.num_ended,
            "prefixTokens": view.num_prefix_tokens,
            "admittedTokens": view.num_admitted_tokens,
        },
        "batch": view.batch,
    }
    return json.loads(json.dumps(dumped))


def view_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    view = View()
    for event in events:
        view.apply(event)
    return dump(view)


def write_recording(path: Path, num_blocks: int = 24, num_requests: int = 40, **options: Any) -> list[dict[str, Any]]:
    """Records a run with shared prefixes, preemptions and aborts; its events."""
    rng = random.Random(1)
    engine = make_engine(num_blocks, max_num_seqs=8, max_num_batched_tokens=48, max_model_len=90, **options)
    recorder = record.Recorder(path)
    observe(engine, recorder)
    prefix = [rng.randrange(900) for _ in range(17)]
    for i in range(num_requests):
        prompt = prefix[: rng.randrange(18)] + [rng.randrange(900) for _ in range(rng.randrange(1, 9))]
        engine.add_request(prompt, greedy(rng.randrange(2, 40)), f"req-{i}")
        if i % 9 == 8:
            engine.abort(f"req-{i - 1}")
        engine.step()
    while engine.has_work:
        engine.step()
    recorder.close()
    return [e for e in record.read(path) if e["kind"] != "header"]


def wait_for(page: Any, condition: str) -> None:  # noqa: F811
    """Until a JavaScript expression is true; Playwright's own wait would need eval(), which the page forbids."""
    for _ in range(PATIENCE * 50):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(20)
    raise AssertionError(f"still false: {condition}")


def on_page(page: Any) -> dict[str, Any]:  # noqa: F811
    return page.evaluate("inspector.dump()")


# Recordings


@pytest.mark.parametrize("overlap", [False, True])
def test_page_equals_the_python_view_wherever_one_scrubs(page, tmp_path: Path, overlap: bool) -> None:  # noqa: F811
    events = write_recording(tmp_path / "trace.jsonl", overlap=overlap)
    assert main(["inspect", str(tmp_path / "trace.jsonl"), "--html", str(tmp_path / "page.html")]) == 0
    page.goto((tmp_path / "page.html").as_uri())
    assert page.evaluate("inspector.app.mode") == "file"
    assert page.evaluate("inspector.app.history.frames.length") == len(events)
    positions = [1, len(events), len(events) // 2, 7, len(events) - 3, 2, *range(10, len(events), 17)]
    for position in positions:
        page.evaluate(f"inspector.seek({position})")
        assert on_page(page) == view_of(events[:position]), f"at event {position}"
    assert view_of(events)["counts"]["preemptions"] > 0 and view_of(events)["counts"]["prefixTokens"] > 0


def test_scrubbing_with_keys_buttons_and_slider(page, tmp_path: Path) -> None:  # noqa: F811
    events = write_recording(tmp_path / "trace.jsonl")
    main(["inspect", str(tmp_path / "trace.jsonl"), "--html", str(tmp_path / "page.html")])
    page.goto((tmp_path / "page.html").as_uri())
    position = "inspector.app.history.position"
    page.keyboard.press("End")
    assert page.evaluate(position) == len(events)
    page.keyboard.press("ArrowLeft")
    page.get_by_role("button", name="one event back").click()
    assert page.evaluate(position) == len(events) - 2
    page.get_by_role("button", name="one event forward").click()
    page.keyboard.press("Home")
    assert page.evaluate(position) == 1
    page.get_by_role("slider", name="recorded events").fill(str(len(events) // 2))
    assert page.evaluate(position) == len(events) // 2
    assert f"event {len(events) // 2} of {len(events)}" in page.locator("#where").text_content()
    page.locator("#speed").select_option("60")
    page.get_by_role("button", name="play").click()
    wait_for(page, f"{position} > {len(events) // 2 + 3}")


def test_recording_is_opened_from_a_file(page, tmp_path: Path) -> None:  # noqa: F811
    events = write_recording(tmp_path / "trace.jsonl")
    main(["inspect", "--html", str(tmp_path / "page.html")])
    page.goto((tmp_path / "page.html").as_uri())
    assert page.evaluate("inspector.app.mode") == "walk"
    with open(tmp_path / "trace.jsonl", "a") as file:
        file.write('{"kind": "st')  # cut off while it was written
    page.locator("#file").set_input_files(tmp_path / "trace.jsonl")
    wait_for(page, "inspector.app.mode === 'file'")
    assert page.evaluate("inspector.app.history.frames.length") == len(events)
    (tmp_path / "other.jsonl").write_text('{"hello": 1}\n')
    page.locator("#file").set_input_files(tmp_path / "other.jsonl")
    page.get_by_text("other.jsonl cannot be shown: this is no recording").wait_for()
    assert page.evaluate("inspector.app.mode") == "file"


def test_details_of_a_block_name_its_hash_chain(page, tmp_path: Path) -> None:  # noqa: F811
    main(["inspect", "--html", str(tmp_path / "page.html")])
    page.goto((tmp_path / "page.html").as_uri())
    page.evaluate("inspector.seek(7)")  # B is prefilled: blocks 0, 3 and 4 are a chain
    box = page.locator("#pool").bounding_box()
    size = page.evaluate("inspector.pool.layout.size")
    page.mouse.move(box["x"] + 4.5 * size, box["y"] + size / 2)
    chain = page.locator("#details .chain li")
    chain.first.wait_for()
    assert [text.split()[0] for text in chain.all_text_contents()] == ["#4", "#3", "#0"]
    page.locator("#pool").focus()
    page.keyboard.press("ArrowRight")
    page.mouse.move(box["x"] + 4.5 * size, box["y"] + 400)
    page.get_by_role("heading", name="Block 0").wait_for()
    assert "shared, 2 references" in page.locator("#details").text_content()


def test_names_of_requests_are_text(page, tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "trace.jsonl"
    engine = make_engine()
    recorder = record.Recorder(path)
    observe(engine, recorder)
    name = "</script><img src=x onerror=document.title='bad'>"
    engine.add_request([1, 2, 3], greedy(3), name)
    engine.step()
    recorder.close()
    main(["inspect", str(path), "--html", str(tmp_path / "page.html")])
    page.goto((tmp_path / "page.html").as_uri())
    page.keyboard.press("End")
    page.get_by_role("button", name="sequence </script>").wait_for()
    assert page.title() == "nanovllm inspector"


def test_large_pool_is_drawn_in_cells_of_several_blocks(page, tmp_path: Path) -> None:  # noqa: F811
    write_recording(tmp_path / "trace.jsonl", num_blocks=100_000)
    main(["inspect", str(tmp_path / "trace.jsonl"), "--html", str(tmp_path / "page.html")])
    page.goto((tmp_path / "page.html").as_uri())
    page.keyboard.press("End")
    wait_for(page, "inspector.pool.layout?.per > 1")
    layout = page.evaluate("inspector.pool.layout")
    assert layout["size"] >= 5 and layout["end"] == 100_000
    box = page.locator("#pool").bounding_box()
    page.mouse.move(box["x"] + 1, box["y"] + 1)
    page.get_by_role("heading", name=f"Blocks 0 to {layout['per'] - 1}").wait_for()
    page.mouse.click(box["x"] + 1, box["y"] + 1)
    wait_for(page, "inspector.pool.layout.per === 1")
    assert page.locator("#pool-range").text_content() == "blocks 0 to 1,023"
    page.keyboard.press("Escape")
    wait_for(page, "inspector.pool.layout.per > 1")
    frame = page.evaluate(
        "new Promise(done => { inspector.app.hoveredSeq = null; const t = performance.now(); inspector.seek(50);"
        "requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - t))) })"
    )
    assert frame < 2000  # a frame that takes seconds is no picture; how fast it is, is not the test's


# The worked example


def test_walkthrough_tells_the_example(page, tmp_path: Path) -> None:  # noqa: F811
    main(["inspect", "--html", str(tmp_path / "page.html")])
    page.goto((tmp_path / "page.html").as_uri())
    events = walkthrough_events()
    seen = []
    for position in range(2, len(events) + 1):
        title = page.locator("#note h3").text_content()
        seen.append(title)
        assert on_page(page) == view_of(events[:position])
        page.keyboard.press("ArrowRight")
        if position < len(events):
            wait_for(page, f"document.querySelector('#note h3')?.textContent !== {json.dumps(title)}")
    assert seen == [e["note"]["title"] for e in events[1:]]
    page.evaluate("inspector.seek(6)")
    page.get_by_text("[12,13,14,15,16,17,18,19,20]").wait_for()  # B's slots, as the seed has them
    state = on_page(page)
    assert [s[4] for s in state["seqs"].values()] == [[0, 1, 2], [0, 3, 4, 5]]
    assert state["owners"]["0"] == [0, 1]


def walkthrough_events() -> list[dict[str, Any]]:
    path = Path(walkthrough.__file__).parent / "page" / "walkthrough.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


# Live


def make_app(live: Live) -> Any:
    fastapi = pytest.importorskip("fastapi", reason="needs the extra `server`")
    from nanovllm.server.inspector import inspector_router

    app = fastapi.FastAPI()
    app.include_router(inspector_router(live))

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"data": [{"id": "fake"}]}

    @app.post("/v1/chat/completions")
    async def answer(request: fastapi.Request) -> Any:
        body = await request.json()
        assert body["model"] == "fake" and body["stream"]
        answer = f"You said {body['messages'][-1]['content']}."
        deltas = [{"reasoning_content": c} for c in "Hm, hm."] + [{"content": c} for c in answer]
        chunks = [f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n" for delta in deltas]
        return fastapi.responses.StreamingResponse(iter([*chunks, "data: [DONE]\n\n"]), media_type="text/event-stream")

    return app


@contextmanager
def inspected(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Iterator[tuple[Any, str]]:
    """A fake AsyncLLM with an inspector; it, and the page's address."""
    llm = fake_llm(monkeypatch, **options)
    live = Live(llm, interval=0.01)
    try:
        with serving(make_app(live)) as url:
            try:
                yield llm, f"{url}/inspector"
            finally:
                live.close()
    finally:
        llm.shutdown()


def generate(llm: Any, prompt: list[int], num_tokens: int, name: str) -> None:
    """Starts a request whose output nobody reads."""
    llm.call(lambda: llm.engine.add_request(prompt, greedy(num_tokens, ignore_eos=True), name)).result()


@pytest.mark.parametrize("overlap", [False, True])
def test_live_page_pauses_steps_scrubs_and_follows(page, monkeypatch, overlap: bool) -> None:  # noqa: F811
    with inspected(monkeypatch, overlap=overlap) as (llm, url):
        assert llm.engine.observer is None
        page.goto(url)
        page.get_by_text("live", exact=True).wait_for()
        wait_for(page, "inspector.dump().next.length > 0")
        page.get_by_role("button", name="Pause engine").click()
        page.get_by_role("button", name="Resume engine").wait_for()
        generate(llm, [5] * 9, 30, "a")
        generate(llm, [5] * 9 + [1, 2], 30, "b")
        wait_for(page, "inspector.dump().waiting.length === 2")
        for steps in (1, 2, 3):
            page.get_by_role("button", name="Step engine").click()
            wait_for(page, f"inspector.dump().counts.steps === {steps}")
        page.wait_for_timeout(100)
        assert on_page(page)["counts"]["steps"] == 3 and len(on_page(page)["running"]) == 2
        page.get_by_role("button", name="one event back").click()
        assert on_page(page)["counts"]["steps"] == 2
        page.get_by_role("button", name="Follow").click()
        assert on_page(page)["counts"]["steps"] == 3
        page.get_by_role("button", name="Resume engine").click()
        wait_for(page, "inspector.dump().counts.ended === 2")
        assert on_page(page)["owners"] == {} and on_page(page)["counts"]["tokens"] == 60
        page.goto("about:blank")
        wait_until(lambda: llm.engine.observer is None)


def test_closing_a_page_lets_the_engine_go_on(page, monkeypatch) -> None:  # noqa: F811
    with inspected(monkeypatch) as (llm, url):
        page.goto(url)
        page.get_by_text("live", exact=True).wait_for()
        page.get_by_role("button", name="Pause engine").click()
        page.get_by_role("button", name="Resume engine").wait_for()
        generate(llm, [1, 2, 3], 5, "a")
        page.goto("about:blank")
        wait_until(lambda: not llm.engine.requests)


def test_chat_on_the_page(page, monkeypatch) -> None:  # noqa: F811
    with inspected(monkeypatch) as (_, url):
        page.goto(url)
        page.get_by_role("textbox", name="message").fill("hello")
        page.keyboard.press("Enter")
        page.get_by_text("You said hello.").wait_for()
        assert page.locator(".thoughts").inner_text() == "Hm, hm."


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(PATIENCE * 100):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("the condition did not come true")


def test_controls_have_names_and_dark_is_a_key_away(page, tmp_path: Path) -> None:  # noqa: F811
    main(["inspect", "--html", str(tmp_path / "page.html")])
    page.goto((tmp_path / "page.html").as_uri())
    unnamed = page.evaluate(
        "[...document.querySelectorAll('button, input, select, textarea, canvas:not([aria-hidden])')]"
        ".filter(e => !(e.ariaLabel || e.textContent.trim() || e.labels?.length)).map(e => e.id)"
    )
    assert unnamed == []
    scheme = "getComputedStyle(document.documentElement).colorScheme"
    before = page.evaluate(scheme)
    page.keyboard.press("t")
    assert {before, page.evaluate(scheme)} == {"light", "dark"}
    page.keyboard.press("?")
    page.get_by_role("dialog").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="hidden")
