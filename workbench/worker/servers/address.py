"""Where a server is: its URL taken apart, shown without what must not be shown, and the key that opens it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from urllib.parse import urlsplit

from workbench.errors import ConfigurationError

PORTS = {"http": 80, "https": 443}
LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Address:
    """scheme, host, port, and the path in front of every endpoint's (without `/v1`, which endpoints bring)."""

    scheme: str
    host: str
    port: int
    base: str

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.base}"

    @property
    def local(self) -> bool:
        """Whether it names this machine."""
        return self.host in LOOPBACK


def parse_address(url: str) -> Address:
    """The address of a URL. Raises ConfigurationError, which never holds what the URL says of user and password."""
    try:
        parts = urlsplit(url.strip())
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port, parts = None, None, urlsplit("")
    if parts.scheme not in PORTS or not host or any(ord(c) <= 32 or ord(c) == 127 for c in url.strip()):
        raise ConfigurationError("url is not an address", where="server", next="Such as url=http://127.0.0.1:8000.")
    if parts.username is not None or parts.password is not None:
        raise ConfigurationError(
            "url holds a user name or password, which would be stored with the lane",
            where=str(Address(parts.scheme, host, port or PORTS[parts.scheme], "")),
            next="Put the key into an environment variable and name it: key_env=NAME.",
        )
    if parts.query or parts.fragment:
        raise ConfigurationError(
            "url holds a query or fragment", where="server", next="Give scheme, host, port and path."
        )
    base = parts.path.rstrip("/").removesuffix("/v1")
    return Address(parts.scheme, host, port or PORTS[parts.scheme], base)


def read_key(name: str) -> str:
    """The key in the environment variable `name`; "" where no variable is named. Raises ConfigurationError."""
    if not name:
        return ""
    key = os.environ.get(name, "").strip()
    if not key:
        raise ConfigurationError(
            f"the environment variable {name} is not set", where="server", next=f"Set it, or leave key_env={name} out."
        )
    if not key.isascii() or any(ord(c) <= 32 or ord(c) == 127 for c in key):
        raise ConfigurationError(f"the environment variable {name} holds no key", where="server")
    return key
