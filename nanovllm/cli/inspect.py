"""`nanovllm inspect`: a recording of --record, or the worked example, in the browser; no model is loaded."""

from __future__ import annotations

import argparse
import statistics
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SUMMARY = "show a recorded run, or the worked example of `nanovllm trace`, in the browser"
_DEFAULT_PORT = 8017


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", nargs="?", metavar="TRACE", help="a file that --record wrote (default: the example)")
    parser.add_argument("--html", metavar="FILE", help="write the page with the recording in it, and exit")
    parser.add_argument("--summary", action="store_true", help="print what the recording holds, and exit")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument(
        "--port", type=int, default=_DEFAULT_PORT, help=f"port to listen on, 0 for any (default: {_DEFAULT_PORT})"
    )


def run(args: argparse.Namespace) -> int:
    from nanovllm.inspector import page

    if not 0 <= args.port <= 65535:
        raise ValueError(f"--port: expected 0 to 65535, got {args.port}")
    text = None
    if args.trace is not None:
        lines = summary(args.trace)
        print("\n".join(lines), flush=True)
        text = Path(args.trace).read_text(encoding="utf-8", errors="replace")
    elif args.summary:
        raise ValueError("inspect: expected a TRACE for --summary, got none")
    if args.summary:
        return 0
    html = page.html(text or "")
    if args.html is not None:
        Path(args.html).write_text(html, encoding="utf-8")
        return 0
    with ThreadingHTTPServer((args.host, args.port), _handler(html)) as server:
        host, port = server.server_address[:2]
        print(f"http://{host}:{port}/ (Ctrl-C ends)", flush=True)
        server.serve_forever()
    return 0


def summary(path: str) -> list[str]:
    """Aligned lines on a recording, which is read and checked as a whole.

    Raises:
        OSError, ValueError: it cannot be read, or is none; the text has the line.
    """
    from nanovllm.inspector import record
    from nanovllm.inspector.view import View, checked_number

    view, header = View(), {}
    used, micros = 0, []
    for number, event in enumerate(record.read(path), 1):
        if event["kind"] == "header":
            header = event
            continue
        try:
            view.apply(event)
            if event.get("us"):
                micros.append([checked_number(us) for us in event["us"]])
        except (KeyError, ValueError, TypeError, IndexError) as e:
            raise ValueError(f"{path}: line {number}: this event does not fit those before it: {e!r}") from e
        used = max(used, len(view.owners))
    phases = "".join(
        f", {name} {statistics.median(us) / 1e3:.2f}"
        for name, us in zip(("schedule", "launch", "wait", "collect"), zip(*micros))
    )
    share = view.num_prefix_tokens / max(view.num_admitted_tokens, 1)
    rows = {
        "recorded": f"{header.get('created', '?')}, nanovllm {header.get('nanovllm', '?')}, {view.model}",
        "steps": f"{view.num_steps:,} in {view.time:.1f} s (median ms{phases})" if micros else f"{view.num_steps:,}",
        "sequences": f"{view.num_ended:,} ended, {len(view.running):,} running, {len(view.waiting):,} waiting",
        "tokens": f"{view.num_tokens:,} sampled; {view.num_prefix_tokens:,} of {view.num_admitted_tokens:,} admitted "
        f"ones came from the prefix cache ({share:.0%})",
        "blocks": f"{view.num_blocks:,} of {view.block_size} tokens, at most {used:,} used",
        "preemptions": f"{view.num_preemptions:,}",
    }
    width = max(map(len, rows))
    # A recording may be a stranger's: its names must not steer a terminal.
    return [f"{name.ljust(width)}  {''.join(filter(str.isprintable, value))}" for name, value in rows.items()]


def _handler(html: str) -> type[BaseHTTPRequestHandler]:
    from nanovllm.inspector.page import CONTENT_SECURITY_POLICY

    body = html.encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.split("?")[0] != "/":
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Security-Policy", CONTENT_SECURITY_POLICY)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Says nothing."""

    return Handler
