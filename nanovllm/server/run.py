"""From a configuration to a server that listens, and to its orderly end."""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import uvicorn

from nanovllm.async_llm import AsyncLLM
from nanovllm.config import EngineConfig
from nanovllm.inspector.record import recording
from nanovllm.parallel.rendezvous import external_rank
from nanovllm.server.app import make_app
from nanovllm.server.config import ServerConfig
from nanovllm.server.connection import Connection

logger = logging.getLogger("nanovllm.server")
_BACKLOG = 2048  # connections that wait for the server to take them
_OPEN_FILES = 65536  # where the system allows so many
_LAST_WORDS = 1  # second in which requests end once nobody waits for them
_GRACE = 5  # seconds that clients have to take in that the server is going
SWITCH_INTERVAL = 1e-5  # seconds after which the engine's thread gets Python back from a busy event loop


def serve(engine_config: EngineConfig, config: ServerConfig, record: str | None = None) -> None:
    """Loads the model and serves it until SIGTERM or Ctrl-C; running requests then get shutdown_timeout to end.

    record: a file that gets everything that the engine does.

    Raises:
        OSError: the address cannot be had; told before the model is loaded.
        SystemExit: this process is a rank above 0, started by a launcher such as torchrun, and its work is done.
    """
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s", stream=sys.stderr)
    values = {name: getattr(engine_config, name) for name in engine_config.__dataclass_fields__}
    if external_rank(engine_config.distributed_init_method, engine_config.tensor_parallel_size):
        AsyncLLM(**values)  # the rank's whole life; only rank 0 has an address
    raise_file_limit()
    with listening(config) as sock:
        llm = AsyncLLM(**values)
        try:
            server = make_server(llm, config)
            host, port = sock.getsockname()[:2]
            scheme = "https" if config.ssl_certfile else "http"
            where = f"[{host}]" if ":" in host else host
            url = f"{scheme}://{where}:{port}"
            logger.info("nanovllm: serving on %s (Ctrl-C ends it); %s/inspector has a chat to try it", url, url)
            previous = sys.getswitchinterval()
            sys.setswitchinterval(SWITCH_INTERVAL)
            try:
                with recording(llm, record):
                    server.run(sockets=[sock])
            finally:
                sys.setswitchinterval(previous)
        finally:
            llm.shutdown()


def raise_file_limit() -> None:
    """A connection is an open file, of which a process may usually have 1,024."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if most == resource.RLIM_INFINITY else min(_OPEN_FILES, most)
    if limit != resource.RLIM_INFINITY and limit < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def make_server(llm: AsyncLLM, config: ServerConfig) -> uvicorn.Server:
    """A server of llm that is not running yet: serve(sockets=[...]) of it runs in an event loop, run(...) makes one."""
    return _Server(
        uvicorn.Config(
            make_app(llm, config),
            access_log=config.access_log,
            log_level="info",
            lifespan="on",
            ws="none",
            server_header=False,
            http=partial(Connection, read_timeout=config.read_timeout),  # type: ignore[arg-type]
            timeout_keep_alive=math.ceil(config.keep_alive_timeout),
            timeout_graceful_shutdown=math.ceil(config.shutdown_timeout) + _GRACE,
            ssl_keyfile=config.ssl_keyfile,
            ssl_certfile=config.ssl_certfile,
        )
    )


class _Server(uvicorn.Server):
    """uvicorn's server, which would end the process with the signal that stopped it, before the engine is shut down."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        signals = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
        previous = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for call in self.config.app.state.on_exit:  # type: ignore[union-attr]
            call()
        await super().shutdown(sockets)
        if self.force_exit:  # a second Ctrl-C: the clients that are still there hear of it
            self.config.app.state.service.end_all()  # type: ignore[union-attr]
            if self.server_state.tasks:
                await asyncio.wait(self.server_state.tasks, timeout=_LAST_WORDS)
            await self.lifespan.shutdown()


@contextmanager
def listening(config: ServerConfig) -> Iterator[socket.socket]:
    """A socket that listens on the configured address; OSError when it cannot be had.

    It listens at once: with SO_REUSEADDR, two servers can both bind a port on which none listens yet.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((config.host, config.port))
            sock.listen(_BACKLOG)
        except OSError as e:
            raise OSError(f"serve: cannot listen on {config.host}:{config.port}: {e.strerror}") from e
        yield sock
