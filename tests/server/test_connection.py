"""Clients that send too much, too slowly or no HTTP get an error in OpenAI's form, and no connection for ever."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from server.served import PATIENCE, Served, fake_llm, serving, wait_until

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = json.dumps({"prompt": "hello", "max_tokens": 2}).encode()
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@contextmanager
def connected(served: Served) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", int(served.url.rsplit(":", 1)[1])), timeout=PATIENCE) as sock:
        yield sock


def rest(sock: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    data = b""
    while piece := sock.recv(1 << 16):
        data += piece
    return data


def error(answer: bytes) -> tuple[int, str]:
    """Status and text of an error in OpenAI's form."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    return int(head.split()[1]), json.loads(body)["error"]["message"]


@pytest.mark.parametrize("piece", [b"a" * 1000, b"a: b\r\n" * 200], ids=["one", "many"])
def test_headers_have_a_limit(serve_fake: Callable[..., Served], piece: bytes) -> None:
    with connected(serve_fake()) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nX: ")
        sock.setblocking(False)
        end, answer = time.monotonic() + PATIENCE, b""
        while not answer and time.monotonic() < end:
            with contextlib.suppress(BlockingIOError):
                sock.send(piece)
                time.sleep(0.001)
                answer = sock.recv(1 << 16)
    assert error(answer) == (431, "headers: expected at most 65536 bytes, got more")


@pytest.mark.parametrize(
    "sent",
    [HEAD[:20], HEAD, WHOLE[:-5], CHUNKED, CHUNKED + b"5\r\nabc", CHUNKED + b"ffffffffffffffff\r\nabc"],
    ids=["line", "headers", "body", "chunks", "chunk", "endless chunk"],
)
def test_a_request_that_does_not_go_on_ends(serve_fake: Callable[..., Served], sent: bytes) -> None:
    with connected(serve_fake(read_timeout=0.2)) as sock:
        sock.sendall(sent)
        assert error(rest(sock)) == (408, "expected the rest of the request within 0.2 seconds, got no more")


def test_a_head_has_one_time_limit_for_all_of_it(serve_fake: Callable[..., Served]) -> None:
    with connected(serve_fake(read_timeout=0.3)) as sock, pytest.raises(ConnectionError):
        sock.sendall(b"GET /")
        for _ in range(20 * PATIENCE):
            time.sleep(0.05)
            sock.sendall(b"a")


def test_a_connection_that_never_asks_is_closed(serve_fake: Callable[..., Served]) -> None:
    with connected(serve_fake(read_timeout=0.2)) as sock:
        assert rest(sock) == b""


def test_a_slow_upload_that_goes_on_is_served(serve_fake: Callable[..., Served]) -> None:
    with connected(serve_fake(read_timeout=0.5)) as sock:
        sock.sendall(WHOLE[: -len(BODY)])
        for byte in BODY:
            time.sleep(0.03)  # more than the limit, all together
            sock.sendall(bytes([byte]))
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def test_a_long_answer_outlives_the_limits_on_requests(serve_fake: Callable[..., Served]) -> None:
    served = serve_fake(read_timeout=0.2)
    body = json.dumps({"prompt": "hello", "max_tokens": 2, "stream": True}).encode()
    served.llm.set_paused(True).result()
    with connected(served) as sock:
        sock.sendall(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        time.sleep(0.6)
        served.llm.set_paused(False).result()
        assert rest(sock).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.parametrize("sent", [b"\x16\x03\x01\x02\x00", b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_what_is_no_http_gets_an_error_of_the_usual_form(serve_fake: Callable[..., Served], sent: bytes) -> None:
    with connected(serve_fake()) as sock:
        sock.sendall(sent)
        assert error(rest(sock)) == (400, "expected a request of HTTP/1.1, got one that cannot be read")


def test_requests_on_one_connection(serve_fake: Callable[..., Served]) -> None:
    with connected(serve_fake(read_timeout=0.2)) as sock:
        sock.sendall(WHOLE * 3 + b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = rest(sock)
    assert answer.count(b"HTTP/1.1 200 OK") == 4 and answer.endswith(b'{"status":"ok"}')


def test_half_a_request_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = fake_llm(monkeypatch)
    with ExitStack() as stack:
        with serving(llm, read_timeout=0, shutdown_timeout=2 * PATIENCE) as served:
            num_tasks = served.num_tasks
            head, body = (stack.enter_context(connected(served)) for _ in range(2))
            head.sendall(HEAD)
            body.sendall(WHOLE[:-5])
            wait_until(lambda: served.num_tasks > num_tasks, "the body is waited for")
        assert [error(rest(sock))[0] for sock in (head, body)] == [503, 503]
    llm.shutdown()
