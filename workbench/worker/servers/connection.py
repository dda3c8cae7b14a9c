"""Requests to one server: JSON out, JSON in, bounded in size and time; a lost connection is tried again for a while.

The waits grow from half a second to eight and end RETRY_SECONDS after the first failure. A request is repeated only
where that is harmless: every request here asks for numbers and changes nothing. Nothing that is raised holds the key.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from workbench.errors import ConfigurationError, EngineError
from workbench.worker.servers.address import Address
from workbench.worker.servers.answers import shown
from workbench.worker.servers.wire import Link, Lost, TooLarge

RETRY_SECONDS = 60.0
FIRST_SECONDS = 10.0
"""The same before anything has ever answered there: the address may be wrong."""
FIRST_WAIT = 0.5
LONGEST_WAIT = 8.0
LOOK_SECONDS = 0.2
TIMEOUT_SECONDS = 300.0
BUSY = (429, 502, 503, 504)
"""The server is there and may answer later. 500 is tried twice again: a dying engine says it too."""
TRIES_OF_500 = 2
ABSENT = (404, 405, 501)
DEFAULT_LIMIT = 16 << 20
ERROR_LIMIT = 1 << 16


class Refused(EngineError):
    """An answer that is an error: its HTTP `status`, and what the server said."""

    def __init__(self, status: int, said: str, *, where: str, next: str = "") -> None:
        super().__init__(f"the server answers {status}: {said}", where=where, next=next)
        self.status, self.said = status, said


class Gone(EngineError):
    """No answer within the time for trying again."""


class Connection:
    """Speaks to one address. `look()` runs every fraction of a second while it waits; it may raise to give up.

    `losses` counts the times a connection was lost: another server may stand there afterwards.
    """

    def __init__(
        self,
        address: Address,
        key: str = "",
        timeout: float = TIMEOUT_SECONDS,
        look: Callable[[], None] = lambda: None,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self.address, self.timeout, self.look, self.retry_seconds = address, timeout, look, retry_seconds
        self.losses = 0
        self._met = False
        self._key = key
        self._link: Link | None = None
        self.clock: Callable[[], float] = time.monotonic
        self.sleep: Callable[[float], None] = time.sleep

    def get(self, path: str) -> Any:
        """The JSON answer of a GET. Raises Refused, Gone, EngineError."""
        return self._parsed(self._whole("GET", path, None, DEFAULT_LIMIT), path)

    def find(self, path: str) -> Any:
        """The same, or None where there is no such endpoint, or it gives no JSON."""
        try:
            data = self._whole("GET", path, None, DEFAULT_LIMIT)
        except Refused as error:
            if error.status in ABSENT:
                return None
            raise
        try:
            return _loads(data)
        except ValueError:
            return None

    def text(self, path: str) -> str | None:
        """A GET as text, or None where there is no such endpoint."""
        try:
            return self._whole("GET", path, None, DEFAULT_LIMIT).decode("utf-8", "replace")
        except Refused as error:
            if error.status in ABSENT:
                return None
            raise

    def post(self, path: str, body: dict[str, Any], limit: int = DEFAULT_LIMIT) -> Any:
        """The JSON answer of a POST of at most `limit` bytes. Raises Refused, Gone, EngineError."""
        return self._parsed(self._whole("POST", path, body, limit), path)

    def stream(self, path: str, body: dict[str, Any], limit: int = DEFAULT_LIMIT) -> Iterator[Any]:
        """The JSON events of a stream, as they come. Raises Lost where it breaks off; what came before has been given.

        A connection that cannot be made is tried again, as for other requests; one that breaks is the caller's.
        """
        link, response = self._begin("POST", path, body)
        data = b""
        try:
            for piece in link.pieces(response, limit):
                *lines, data = (data + piece).split(b"\n")
                for line in map(bytes.strip, lines):
                    event = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
                    if event == b"[DONE]":
                        return
                    if event:
                        yield self._event(event, path)
            raise Lost("the stream ended without its end mark")
        except TooLarge:
            raise self._too_large(path, limit) from None
        except Lost:
            self.losses += 1
            raise
        finally:
            self.drop()  # also where the caller has enough: the server then stops generating

    def _event(self, data: bytes, path: str) -> Any:
        value = self._parsed(data, path)
        if isinstance(value, dict) and value.get("error"):
            raise EngineError(f"the server ends its stream: {self._message(value)}", where=f"{self.address}{path}")
        return value

    def wait(self, attempt: int, since: float, why: str, asked: float = 0.0) -> None:
        """Wait before trying again, the `attempt`-th time since `since`. Raises Gone where the time is up."""
        most = self.retry_seconds if self._met else min(FIRST_SECONDS, self.retry_seconds)
        left = most - (self.clock() - since)
        pause = max(min(FIRST_WAIT * 2**attempt, LONGEST_WAIT), asked)
        if left <= 0 or asked > left:
            after = f" (it asks to wait {asked:g} s)" if asked > left else ""
            raise Gone(
                f"no answer for {most:g} s: {why}{after}",
                where=str(self.address),
                next="Start the server and run the lane again: it goes on where it stopped.",
            )
        until = self.clock() + min(pause, left)
        while (rest := until - self.clock()) > 0:
            self.look()
            self.sleep(min(rest, LOOK_SECONDS))
        self.look()

    def drop(self) -> None:
        """Close what is open."""
        if self._link is not None:
            self._link.close()
        self._link = None

    def clean(self, text: str) -> str:
        """What a server said, harmless and without the key."""
        return shown(text.replace(self._key, "***") if self._key else text)

    def _whole(self, method: str, path: str, body: dict[str, Any] | None, limit: int) -> bytes:
        attempt, since = 0, None
        while True:
            fresh = self._link is None or not self._link.used
            try:
                link, response = self._begin(method, path, body)
                data = b"".join(link.pieces(response, limit))
            except TooLarge:
                self.drop()
                raise self._too_large(path, limit) from None
            except Lost as error:
                self.drop()
                if not fresh:  # a kept connection may have been closed since; that alone is no failure
                    continue
                self.losses += 1
                since = self.clock() if since is None else since
                self.wait(attempt, since, str(error))
                attempt += 1
                continue
            except BaseException:
                self.drop()
                raise
            if response.will_close:
                self.drop()
            return data

    def _begin(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[Link, http.client.HTTPResponse]:
        """The head of an answer that is no error; waits where the server is busy or cannot be reached."""
        headers = {"Accept": "application/json, text/event-stream", "User-Agent": "workbench"}
        data = None
        if body is not None:
            data = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
            headers["Content-Type"] = "application/json"
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        attempt, since = 0, None
        while True:
            self.look()
            fresh = self._link is None or not self._link.used
            link = self._link = self._link or Link(self.address, self.timeout, lambda: self.look())
            try:
                response = link.send(method, self.address.base + path, headers, data)
                self._met = True
                if 200 <= response.status < 300:
                    return link, response
                said = self._said(link, response)
            except Lost as error:
                self.drop()
                if not fresh:
                    continue
                self.losses += 1
                since = self.clock() if since is None else since
                self.wait(attempt, since, str(error))
                attempt += 1
                continue
            except BaseException:
                self.drop()
                raise
            if response.will_close:
                self.drop()
            if response.status not in BUSY and (response.status != 500 or attempt >= TRIES_OF_500):
                raise self._refusal(response, path, said)
            since = self.clock() if since is None else since
            self.wait(attempt, since, f"{response.status} {said}", _retry_after(response))
            attempt += 1

    def _said(self, link: Link, response: http.client.HTTPResponse) -> str:
        """The message of an error: of the several forms in use, or the page's first words."""
        try:
            data = b"".join(link.pieces(response, ERROR_LIMIT))
        except TooLarge:
            self.drop()
            return "a page too large to be an error"
        try:
            value = _loads(data)
        except ValueError:
            return self.clean(data.decode("utf-8", "replace"))
        return self._message(value)

    def _message(self, value: Any) -> str:
        while isinstance(value, dict):
            value = next((value[name] for name in ("error", "message", "detail") if name in value), "")
        return self.clean(value if isinstance(value, str) else json.dumps(value))

    def _refusal(self, response: http.client.HTTPResponse, path: str, said: str) -> Exception:
        where = f"{self.address}{path}"
        if response.status in (401, 403):
            advice = (
                "It does not take this key: see key_env." if self._key else "It wants a key: give key_env=VARIABLE."
            )
            return ConfigurationError(f"the server answers {response.status}: {said}", where=where, next=advice)
        if 300 <= response.status < 400:
            target = self.clean(response.headers.get("Location", "").partition("?")[0])
            return ConfigurationError(
                f"the server sends us on to {target or 'nowhere'}, which is not followed",
                where=where,
                next="Give the address that answers itself as url.",
            )
        return Refused(response.status, said, where=where)

    def _too_large(self, path: str, limit: int) -> EngineError:
        return EngineError(
            f"the server's answer is larger than {limit:,} bytes, which is more than was asked for",
            where=f"{self.address}{path}",
        )

    def _parsed(self, data: bytes, path: str) -> Any:
        try:
            return _loads(data)
        except ValueError as error:
            raise EngineError(
                f"the server's answer is not JSON ({error}): {self.clean(data[:200].decode('utf-8', 'replace'))!r}",
                where=f"{self.address}{path}",
            ) from error


def _loads(data: bytes) -> Any:
    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not a JSON number")

    try:
        return json.loads(data, parse_constant=refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _retry_after(response: http.client.HTTPResponse) -> float:
    """Seconds that the server asks to wait; a date, or nonsense, asks for nothing."""
    text = response.headers.get("Retry-After", "")
    return float(text) if text.strip().isdecimal() and len(text) < 10 else 0.0
