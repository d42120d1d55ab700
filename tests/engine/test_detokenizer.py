"""Incremental text: whole characters, stop strings over token borders, and nothing that changes later."""

import random

import pytest
from engine.tokenizer import byte_tokenizer, piece_tokenizer

from nanovllm.engine.detokenizer import Detokenizer, _TokenBytes, token_bytes

EOS = 0
TEXTS = ["the cat sat", "naïve café", "日本語のテキスト", "emoji 👩‍👩‍👧 and 🏳️‍🌈!", "a�b", " leading", "x\n\n y\t"]


@pytest.fixture(autouse=True, params=["bytes", "window"])
def source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test by the tokens' bytes, and by the window that tokenizers of other kinds need."""
    if request.param == "window":
        monkeypatch.setattr(_TokenBytes, "of", lambda tokenizer, skip_special_tokens: None)
    return request.param


def feed(text: str, **options: object) -> tuple[Detokenizer, list[str], bool]:
    """The detokenizer after text's tokens, one at a time; the stable text after each; whether a stop string came."""
    tokenizer = byte_tokenizer()
    detokenizer = Detokenizer(tokenizer, **options)
    steps = []
    for token_id in tokenizer.encode(text):
        stopped = detokenizer.update([token_id])
        steps.append(detokenizer.stable_text(finished=stopped))
        if stopped:
            return detokenizer, steps, True
    return detokenizer, steps, detokenizer.finish()


def check_growth(steps: list[str], final: str) -> None:
    for before, after in zip(steps, [*steps[1:], final]):
        assert after.startswith(before), f"{before!r} was shown, then {after!r}"


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_add_up_and_hold_whole_characters(text: str) -> None:
    detokenizer, steps, stopped = feed(text)
    assert detokenizer.text == text and not stopped
    check_growth(steps, detokenizer.text)
    whole = {text[:i] for i in range(len(text) + 1)}
    assert set(steps) <= whole
    assert len(byte_tokenizer().encode("日")) == 3 and len(byte_tokenizer().encode("👩")) == 4  # split over tokens


def test_incomplete_character_shows_at_the_end_only(source: str) -> None:
    tokenizer = byte_tokenizer()
    detokenizer = Detokenizer(tokenizer)
    detokenizer.update(tokenizer.encode("ab日")[:-1])
    assert detokenizer.text == ("ab" if source == "bytes" else "")
    detokenizer.finish()
    assert detokenizer.text == "ab�" == tokenizer.decode(tokenizer.encode("ab日")[:-1])


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_equal_decoding_the_whole(seed: int) -> None:
    rng = random.Random(seed)
    tokenizer = byte_tokenizer()
    ids = [rng.randrange(2, len(tokenizer)) for _ in range(60)]
    detokenizer, steps = Detokenizer(tokenizer), []
    for token_id in ids:
        detokenizer.update([token_id])
        steps.append(detokenizer.stable_text(False))
    detokenizer.finish()
    assert detokenizer.text == tokenizer.decode(ids)
    check_growth(steps, detokenizer.text)


@pytest.mark.parametrize("stop", ["sat", "cat sat on", " ", "the", "mat and", "t o", "日本", "👩"])
@pytest.mark.parametrize("text", ["the cat sat on the mat and the dog", "go 日本語 then 👩 end"])
def test_stop_string_ends_the_text_before_its_first_occurrence(text: str, stop: str) -> None:
    detokenizer, steps, stopped = feed(text, stop=(stop,))
    assert stopped == (stop in text)
    assert detokenizer.text == text.split(stop)[0]
    assert detokenizer.stop_reason == (stop if stopped else None)
    check_growth(steps, detokenizer.text)


def test_earliest_of_several_stop_strings_wins() -> None:
    detokenizer, steps, stopped = feed("the cat sat on the mat", stop=("mat", "sat", "never"))
    assert (detokenizer.text, detokenizer.stop_reason, stopped) == ("the cat ", "sat", True)
    check_growth(steps, detokenizer.text)


@pytest.mark.parametrize("seed", range(30))
def test_text_held_back_never_changes(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice("ab日") for _ in range(80))
    stops = tuple("".join(rng.choice("ab日") for _ in range(rng.randint(3, 7))) for _ in range(3))
    detokenizer, steps, stopped = feed(text, stop=stops)
    ends = [text.find(s) + len(s) for s in stops if s in text]
    assert stopped == bool(ends)
    if not ends:
        assert detokenizer.text == text
    else:
        assert text.startswith(detokenizer.text + (detokenizer.stop_reason or ""))
        assert not any(s in detokenizer.text for s in stops)
    check_growth(steps, detokenizer.text)


def test_min_tokens_hides_stop_strings_in_the_first_tokens() -> None:
    tokenizer = byte_tokenizer()
    text = "stop here. stop there. stop"
    first = len(tokenizer.encode("stop here."))
    detokenizer, steps, stopped = feed(text, stop=("stop",), min_tokens=first + 1)
    assert stopped and detokenizer.text == "stop here. "
    check_growth(steps, detokenizer.text)


def test_special_tokens_are_left_out_unless_wanted() -> None:
    tokenizer = byte_tokenizer()
    for skip, text in ((True, "hello"), (False, "hello<eos>")):
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
        for token_id in [*tokenizer.encode("hello"), EOS]:
            detokenizer.update([token_id])
        detokenizer.finish()
        assert detokenizer.text == text


def test_stop_string_of_held_back_bytes_is_found_at_the_end() -> None:
    tokenizer = byte_tokenizer()
    detokenizer = Detokenizer(tokenizer, stop=("b�",))
    for token_id in tokenizer.encode("ab日")[:-1]:
        assert not detokenizer.update([token_id])
    assert detokenizer.finish()
    assert (detokenizer.text, detokenizer.stop_reason) == ("a", "b�")


@pytest.mark.parametrize("stop", [(), ("sat",), ("zz", "t o")])
@pytest.mark.parametrize("step", [1, 3, 100])
def test_advance_gives_what_update_and_finish_give(stop: tuple[str, ...], step: int) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("the cat 日本 sat on")
    whole = Detokenizer(tokenizer, stop)
    stopped = any(whole.update([t]) for t in ids) or whole.finish()
    detokenizer, text = Detokenizer(tokenizer, stop), ""
    for start in range(0, len(ids), step):
        text += detokenizer.advance(ids[start : start + step], finished=start + step >= len(ids))
        if detokenizer.stop_reason is not None:
            break
    assert text == whole.text and (detokenizer.stop_reason is not None) == stopped


@pytest.mark.parametrize("skip", [True, False])
def test_special_and_unknown_tokens(skip: bool) -> None:
    tokenizer = byte_tokenizer()
    ids = [EOS, *tokenizer.encode("a b"), EOS, len(tokenizer) + 5, *tokenizer.encode("é")]
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    for token_id in ids:
        detokenizer.update([token_id])
    detokenizer.finish()
    assert detokenizer.text == tokenizer.decode(ids, skip_special_tokens=skip)
    assert b"".join(token_bytes(tokenizer, t) for t in tokenizer.encode("é")) in ("é".encode(), "�".encode() * 2)
    assert token_bytes(tokenizer, EOS) == b"<eos>"


def in_pieces(token_ids: list[int], size: int) -> str:
    detokenizer = Detokenizer(piece_tokenizer())
    for i in range(0, len(token_ids), size):
        detokenizer.update(token_ids[i : i + size])
    detokenizer.finish()
    return detokenizer.text


@pytest.mark.parametrize("text", [*TEXTS[:-2], "x\n\n y", "é the", "日é\n the end."])
def test_characters_of_single_bytes(text: str) -> None:
    token_ids = piece_tokenizer().encode(text, add_special_tokens=False)
    for size in (1, 2, 3, len(token_ids)):
        assert in_pieces(token_ids, size) == text == piece_tokenizer().decode(token_ids)
    assert [token_bytes(piece_tokenizer(), 1 + byte) for byte in b"\n\xff"] == [b"\n", b"\xff"]


@pytest.mark.parametrize("seed", range(20))
def test_bytes_that_are_no_text_cost_no_other_character(seed: int) -> None:
    """The tokenizer itself writes such a run as U+FFFD for each of its bytes."""
    rng = random.Random(seed)
    data = b"".join(rng.choice([b"\n", "é".encode(), "😀".encode(), "😀".encode()[:2], b"\xff"]) for _ in range(9))
    token_ids = [1 + byte for byte in data]
    for size in (1, 2, len(token_ids)):
        assert in_pieces(token_ids, size) == data.decode(errors="replace")
    the = piece_tokenizer().encode("the", add_special_tokens=False)
    assert in_pieces(the + token_ids + the, 1) == f"the{data.decode(errors='replace')} the"
