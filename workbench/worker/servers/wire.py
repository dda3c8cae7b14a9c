"""One HTTP connection that can be given up at any moment: reads wait in slices, and between them the caller looks.

`http.client` speaks the protocol; below it stands a socket whose reads return to us every SLICE_SECONDS.
"""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from typing import Any

from workbench.worker.servers.address import Address

SLICE_SECONDS = 0.2
CONNECT_SECONDS = 5.0
PIECE = 1 << 16


class Lost(Exception):
    """The connection could not be made, broke, or fell silent; the message says which."""


class TooLarge(Exception):
    """An answer beyond its bound."""


class Link:
    """One connection to an address. `look()` runs while it waits and may raise; `timeout` is seconds without a byte."""

    def __init__(self, address: Address, timeout: float, look: Callable[[], None]) -> None:
        self.timeout, self.look = timeout, look
        self.used = False
        if address.scheme == "https":
            context = ssl.create_default_context()
            self._http: http.client.HTTPConnection = http.client.HTTPSConnection(
                address.host, address.port, timeout=CONNECT_SECONDS, context=context
            )
        else:
            self._http = http.client.HTTPConnection(address.host, address.port, timeout=CONNECT_SECONDS)
        self._socket: socket.socket | None = None

    def send(self, method: str, path: str, headers: dict[str, str], body: bytes | None) -> http.client.HTTPResponse:
        """Send a request and return its answer once the head is here. Raises Lost."""
        try:
            if self._socket is None:
                self._http.connect()
                real: Any = self._http.sock
                self._socket = real
                self._http.sock = _Patient(real, self)  # pyright: ignore[reportAttributeAccessIssue]
            self._http.request(method, path, body=body, headers=headers)
            response = self._http.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise Lost(_words(error)) from error
        return response

    def pieces(self, response: http.client.HTTPResponse, limit: int) -> Iterator[bytes]:
        """The body as it comes, at most `limit` bytes. Raises Lost where it ends early, TooLarge beyond the limit."""
        length = response.length
        if length is not None and length > limit:
            raise TooLarge
        seen = 0
        try:
            while length is None or seen < length:
                piece = response.read1(PIECE if length is None else min(PIECE, length - seen))
                if not piece:
                    break
                seen += len(piece)
                if seen > limit:
                    raise TooLarge
                yield piece
        except (OSError, http.client.HTTPException) as error:
            raise Lost(_words(error)) from error
        if length is not None and seen < length:
            raise Lost(f"the answer broke off after {seen:,} of {length:,} bytes")
        response.close()  # it does not notice by itself, and the next request would be sent in vain
        self.used = True

    def close(self) -> None:
        """Let go of the connection."""
        if self._socket is not None:
            self._socket.close()
        self._socket = None
        self._http.sock = None
        self._http.close()


class _Patient:
    """What `http.client` takes for its socket."""

    def __init__(self, real: socket.socket, link: Link) -> None:
        self._real, self._link = real, link

    def sendall(self, data: bytes) -> None:
        self._real.settimeout(self._link.timeout)
        self._real.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Reader(self._real, self._link), PIECE)

    def close(self) -> None:
        """Nothing: `http.client` closes before the answer's body is read; the link does it."""


class _Reader(io.RawIOBase):
    def __init__(self, real: socket.socket, link: Link) -> None:
        self._real, self._link = real, link

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._real.settimeout(min(SLICE_SECONDS, self._link.timeout))
        began = time.monotonic()
        while True:
            self._link.look()
            try:
                return self._real.recv_into(buffer)
            except TimeoutError:
                if time.monotonic() - began >= self._link.timeout:
                    raise TimeoutError(f"no byte for {self._link.timeout:g} s") from None


def _words(error: Exception) -> str:
    match error:
        case ConnectionRefusedError():
            return "the connection was refused"
        case http.client.RemoteDisconnected() | ConnectionResetError() | BrokenPipeError():
            return "the connection was closed"
        case http.client.IncompleteRead():
            return "the answer broke off"
        case http.client.HTTPException():
            return f"what answers does not speak HTTP ({type(error).__name__})"
        case TimeoutError():
            return str(error) if str(error).startswith("no byte") else "the connection could not be made in time"
        case ssl.SSLError():
            return f"the secure connection failed: {error.reason}"
        case OSError():
            return error.strerror or str(error)
        case _:
            return str(error)
