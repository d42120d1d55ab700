"""The inspector's page of the real server: behind its key, with its own chat."""

from typing import Any

import pytest
from engine.tokenizer import byte_tokenizer
from inspector.served import browser, fake_llm, page, serving  # noqa: F401 - fixtures

pytest.importorskip("fastapi", reason="pip install -e '.[server]'")

from nanovllm.server.app import make_app
from nanovllm.server.config import ServerConfig


def test_page_asks_for_the_key_and_chats(page: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    llm = fake_llm(monkeypatch, num_blocks=128, tokenizer=byte_tokenizer(), max_model_len=256)
    app = make_app(llm, ServerConfig(api_key=("secret",)))
    try:
        with serving(app) as url:
            page.goto(f"{url}/inspector")
            page.get_by_label("API key").fill("wrong")
            page.get_by_role("button", name="Connect").click()
            page.get_by_label("API key").fill("secret")
            page.get_by_role("button", name="Connect").click()
            page.get_by_text("live", exact=True).wait_for()
            page.get_by_role("textbox", name="message").fill("the cat")
            page.get_by_role("textbox", name="message").press("Enter")
            page.get_by_role("button", name="Send").wait_for()
            page.locator(".message.assistant").wait_for()
            page.locator("#sequences .done").wait_for()
            assert page.evaluate("inspector.dump().counts.ended") == 1
            assert not page.locator(".message.error").count()
            for end in app.state.on_exit:
                end()
        # Chromium says on the console that the server refused the page without the right key.
        assert [p for p in page.problems if "401" not in p] == []
        page.problems.clear()
    finally:
        llm.shutdown()
