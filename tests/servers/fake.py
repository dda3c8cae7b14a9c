"""Scripted servers on loopback that speak each dialect by its documented names, and can be made to fail in many ways.

`change(path, answer)` may alter any JSON answer before it is sent; `fault(path, number)` names what the `number`-th
request of a path meets instead: a status, or one of `FAULTS`.
"""

from __future__ import annotations

import json
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from tests.servers import dialects
from tests.servers.dialects import Options

FAULTS = ("drop", "half", "garbage", "html", "huge", "redirect", "wait", "drop_stream")
Change = Callable[[str, Any], Any]
Fault = Callable[[str, int], Any]


class Fake:
    """A server of a dialect; `url` while it runs. `seen` holds (path, body, headers) of all requests.

    `go` is what a request with the fault `wait` waits for.
    """

    def __init__(self, dialect: str, options: Options | None = None, **given: Any) -> None:
        self.dialect = dialects.DIALECTS[dialect](options or Options(**given))
        self.change: Change = lambda path, answer: answer
        self.fault: Fault = lambda path, number: None
        self.key = ""
        self.seen: list[tuple[str, Any, dict[str, str]]] = []
        self.counts: Counter[str] = Counter()
        self.go = threading.Event()
        self.waiting = threading.Event()
        self.port = 0
        self._server: ThreadingHTTPServer | None = None
        self._open: set[socket.socket] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Listen, on the port of last time where there was one."""
        fake = self

        class Handler(_Handler):
            owner = fake

        self._server = _Server(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """Stop listening and break every connection."""
        server, self._server = self._server, None
        if server is None:
            return
        self.go.set()
        server.shutdown()
        for connection in list(self._open):
            _break(connection)
        server.server_close()
        self.dialect.forget()

    def paths(self) -> list[str]:
        """The paths that were asked for, in order."""
        return [path for path, _, _ in self.seen]

    def bodies(self, path: str) -> list[Any]:
        """What was sent to a path."""
        return [body for each, body, _ in self.seen if each == path]


class _Server(ThreadingHTTPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is part of the play."""


def _break(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    owner: Fake

    def setup(self) -> None:
        super().setup()
        self.owner._open.add(self.connection)

    def finish(self) -> None:
        self.owner._open.discard(self.connection)
        super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self._serve(None)

    def do_POST(self) -> None:
        self._serve(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _serve(self, body: Any) -> None:
        try:
            self._play(body)
        except OSError:
            raise
        except Exception as error:
            self._json(418, {"error": {"message": f"the script fails: {error!r}"}})

    def _play(self, body: Any) -> None:
        fake, path = self.owner, self.path.partition("?")[0]
        fake.seen.append((path, body, dict(self.headers.items())))
        fake.counts[path] += 1
        fault = fake.fault(path, fake.counts[path])
        if fake.key and self.headers.get("Authorization") != f"Bearer {fake.key}":
            self._json(401, {"error": {"message": f"Incorrect API key: {self.headers.get('Authorization')}"}})
            return
        if fault == "wait":
            fake.waiting.set()
            fake.go.wait(30)
            fault = None
        if isinstance(fault, tuple):  # status, headers, body
            self._send(fault[0], fault[2], fault[1])
            return
        if isinstance(fault, int):
            self._json(fault, {"error": {"message": f"scripted {fault}", "code": fault}})
            return
        if fault == "drop":
            _break(self.connection)
            self.close_connection = True
            return
        if fault in ("garbage", "html", "huge", "redirect"):
            self._odd(fault)
            return
        status, answer = fake.dialect.answer(path, body)
        if isinstance(answer, Iterator):
            self._stream(path, answer, fault)
            return
        if status == 200 and not isinstance(answer, str):
            answer = fake.change(path, answer)
        if isinstance(answer, str):
            self._send(status, answer.encode(), {"Content-Type": "text/plain"})
        else:
            self._json(status, answer, half=fault == "half")

    def _odd(self, fault: str) -> None:
        if fault == "garbage":
            self._send(200, b'{"choices": [{"text": "\x1b[31mred\x1b[0m"', {})
        elif fault == "html":
            self._send(502, b"<html><head><title>502 Bad Gateway</title></head>\x1b]0;x\x07</html>", {})
        elif fault == "huge":
            self._send(200, b"[" + b"0," * (40 << 20) + b"0]", {})
        else:
            self._send(307, b"", {"Location": "http://example.invalid/v1/completions?token=secret"})

    def _stream(self, path: str, events: Iterator[Any], fault: Any) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number, event in enumerate(events):
            if fault == "drop_stream" and number == 3:
                _break(self.connection)
                self.close_connection = True
                return
            data = event if isinstance(event, str) else json.dumps(self.owner.change(path, event))
            line = f"data: {data}\n\n".encode()
            self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
        self.wfile.write(b"0\r\n\r\n")

    def _json(self, status: int, value: Any, half: bool = False) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"}, half)

    def _send(self, status: int, data: bytes, headers: dict[str, str], half: bool = False) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if half else data)
        if half:
            self.wfile.flush()
            _break(self.connection)
            self.close_connection = True
