"""The server's own options: every flag of `nanovllm serve` that is not the engine's."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TOOL_CALL_PARSERS = ("auto", "none", "hermes", "llama3_json")
REASONING_PARSERS = ("auto", "none", "think")
_MAX_PORT = 65535
_MAX_SECONDS = 1_000_000_000  # timers cannot run for ever


def _doc(text: str, default: Any = dataclasses.MISSING) -> Any:
    if isinstance(default, tuple):
        return field(default=default, metadata={"help": f"{text}; may be repeated"})
    return field(default=default, metadata={"help": text})


@dataclass(slots=True, frozen=True, kw_only=True)
class ServerConfig:
    """Options of one server. Each field is also a `--kebab-case` flag of `nanovllm serve`.

    Raises:
        ValueError: a value is not allowed; the text names field, value and the allowed set.
    """

    host: str = _doc("address to listen on; 0.0.0.0 for all", "127.0.0.1")
    port: int = _doc("port to listen on; 0 takes a free one", 8000)
    api_key: tuple[str, ...] = _doc("key that clients must send as `Authorization: Bearer KEY`", ())
    served_model_name: tuple[str, ...] = _doc("name of the model in the API (default: MODEL)", ())
    chat_template: str | None = _doc("Jinja file in place of the model's chat template", None)
    tool_call_parser: str = _doc("auto (of the chat template), none, hermes or llama3_json", "auto")
    reasoning_parser: str = _doc("auto (of the chat template), none, or think for <think> blocks", "auto")
    max_queue: int = _doc("sequences that may wait beyond --max-num-seqs; more are refused with status 429", 1024)
    max_body_bytes: int = _doc("largest request body; a larger one is refused with status 413", 16 << 20)
    request_timeout: float = _doc("seconds after which a request ends with status 504; 0: never", 600.0)
    shutdown_timeout: float = _doc("seconds that running requests get after SIGTERM or Ctrl-C", 30.0)
    keep_alive_timeout: float = _doc("seconds after which an idle connection is closed", 30.0)
    read_timeout: float = _doc(
        "seconds for the head of a request, and for each next piece of its body; 0: no limit", 30.0
    )
    max_chunks_per_second: float = _doc(
        "pieces of all streams together; beyond that a piece has the tokens of several steps; 0: no limit", 10_000.0
    )
    cors_origin: tuple[str, ...] = _doc("origin that browsers may call from; * for any", ())
    cors_header: tuple[str, ...] = _doc("request header that browsers may send (default: any)", ())
    cors_credentials: bool = _doc("let browsers send credentials", False)
    root_path: str = _doc("path under which a proxy serves this", "")
    ssl_keyfile: str | None = _doc("TLS key; needs --ssl-certfile", None)
    ssl_certfile: str | None = _doc("TLS certificate; needs --ssl-keyfile", None)
    access_log: bool = _doc("print a line for every request", True)

    def __post_init__(self) -> None:
        self._one_of("tool_call_parser", TOOL_CALL_PARSERS)
        self._one_of("reasoning_parser", REASONING_PARSERS)
        self._number("port", 0, _MAX_PORT)
        self._number("max_queue", 0)
        self._number("max_body_bytes", 1)
        self._number("max_chunks_per_second", 0)
        for name in ("request_timeout", "shutdown_timeout", "keep_alive_timeout", "read_timeout"):
            self._number(name, 0, _MAX_SECONDS)
        for name in ("api_key", "served_model_name", "cors_origin", "cors_header"):
            if not all(getattr(self, name)):
                raise ValueError(f"{name}: expected non-empty text, got ''")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError(
                f"ssl_keyfile, ssl_certfile: expected both or neither, got {self.ssl_keyfile!r}, {self.ssl_certfile!r}"
            )
        for name in ("chat_template", "ssl_keyfile", "ssl_certfile"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise ValueError(f"{name}: expected a file, got {path!r}")
        if self.ssl_keyfile is not None:
            self._check_key()
        if self.chat_template is not None:
            from nanovllm.server.template import read_template

            read_template(self.chat_template)
        if self.root_path and not self.root_path.startswith("/"):
            raise ValueError(f"root_path: expected a path that starts with /, got {self.root_path!r}")

    def _check_key(self) -> None:
        import ssl

        assert self.ssl_certfile is not None

        def refuse() -> str:  # else OpenSSL asks the terminal
            raise ValueError("the key has a password")

        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, password=refuse)
        except (OSError, ValueError) as e:  # an SSLError is an OSError
            wanted = "expected a PEM certificate and its key without a password"
            got = f"{self.ssl_certfile!r} and {self.ssl_keyfile!r}"
            raise ValueError(f"ssl_certfile, ssl_keyfile: {wanted}, got {got}: {e}") from None

    def _one_of(self, name: str, allowed: tuple[str, ...]) -> None:
        if getattr(self, name) not in allowed:
            raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {getattr(self, name)!r}")

    def _number(self, name: str, low: float, high: float = float("inf")) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            allowed = f">= {low}" if high == float("inf") else f"in [{low}, {high}]"
            raise ValueError(f"{name}: expected a number {allowed}, got {value!r}")
