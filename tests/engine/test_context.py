import threading

import pytest

from nanovllm.engine.context import Context, get_context, set_context


def make_context() -> Context:
    return Context(*[None] * len(Context.__slots__))


def test_set_for_the_block_only():
    context = make_context()
    with set_context(context):
        assert get_context() is context
    with pytest.raises(RuntimeError, match="expected a running forward, got none"):
        get_context()


def test_nesting_is_refused_and_leaves_the_outer_one():
    context = make_context()
    with set_context(context):
        with pytest.raises(RuntimeError, match="nested"), set_context(make_context()):
            pass
        assert get_context() is context


def test_an_exception_unsets_it():
    with pytest.raises(KeyError), set_context(make_context()):
        raise KeyError
    with set_context(make_context()):
        pass


def test_threads_have_their_own():
    seen = []

    def other() -> None:
        with set_context(make_context()) as context:
            seen.append(get_context() is context)

    with set_context(make_context()):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert seen == [True]
