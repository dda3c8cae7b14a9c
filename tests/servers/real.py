"""Real servers in processes of their own, and an engine process that speaks to them."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from tokenizers import Tokenizer

from workbench.config.lane import parse_spec
from workbench.engines.process import EngineProcess
from workbench.protocol import events
from workbench.protocol.columns import cut, join
from workbench.protocol.wire import Arrays


class RealServer:
    """A command that serves until it is killed; `ready` is what its output holds once it does, `log` keeps that."""

    def __init__(self, command: list[str], ready: str, log: Path, environment: dict[str, str] | None = None) -> None:
        self.command, self.ready, self.log = command, ready, log
        self.environment = {**os.environ, **(environment or {})}
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self, seconds: float = 300) -> None:
        """Start it and wait until it serves. Fails the test where it ends before that, or takes too long."""
        child = self._child = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self.environment,
            start_new_session=True,
        )
        serves = threading.Event()
        threading.Thread(target=self._read, args=(child, serves), daemon=True).start()
        if not serves.wait(seconds) or child.poll() is not None:
            said = self.log.read_text(encoding="utf-8", errors="replace")[-3000:]
            self.kill()
            pytest.fail(f"the server did not start: {said}")

    def kill(self) -> None:
        """End its whole process group at once, as `kill -9` does."""
        child, self._child = self._child, None
        if child is None:
            return
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        child.stdin.close()  # type: ignore[union-attr]

    def _read(self, child: subprocess.Popen[bytes], serves: threading.Event) -> None:
        """Its output into the log, to the end, so that it never waits for us."""
        assert child.stdout is not None
        with child.stdout, self.log.open("ab") as log:
            for line in child.stdout:
                log.write(line)
                log.flush()
                if self.ready in line.decode("utf-8", "replace"):
                    serves.set()
        serves.set()


class Child:
    """An engine process of the server backend in our own interpreter: requests down, what comes back sorted."""

    def __init__(self, log: Path) -> None:
        self.process = EngineProcess(sys.executable, "server", log)
        self.number = 0
        self.rows: list[tuple[int, Arrays]] = []
        self.tokens: list[Arrays] = []
        self.on_rows: Callable[[], None] = lambda: None
        assert isinstance(self.process.receive(60), events.Ready)

    def ask(self, kind: Any, *values: Any, trace: Arrays | None = None, **named: Any) -> Any:
        """Send a request and take its answer. `trace` is fed from the request's first position on."""
        self.number += 1
        self.rows, self.tokens = [], []
        request = kind(self.number, *values, **named)
        self.process.send(request)
        if trace is not None:
            first = request.first
            self.process.send(events.Feed(self.number, first, cut("trace", trace, first - 1, len(trace["k"]))))
        while True:
            event = self.process.receive(300)
            assert event is not None, self.process.log_tail(30)
            if event.job != self.number:
                continue
            match event:
                case events.Rows():
                    self.rows.append((event.first, event.arrays))
                    self.on_rows()
                case events.Tokens():
                    self.tokens.append(event.arrays)
                case events.Progress():
                    pass
                case _:
                    return event

    def start(self, spec: str, folder: Path, context: int) -> dict[str, Any]:
        started = self.ask(events.Start, parse_spec(spec).to_json(), str(folder), context)
        assert isinstance(started, events.Started), (started, self.process.log_tail(30))
        return started.effective

    def inspect(self, spec: str, folder: Path, **given: Any) -> tuple[dict[str, Any], list[int]]:
        seen = self.ask(events.Inspect, parse_spec(spec).to_json(), str(folder), **given)
        assert isinstance(seen, events.Inspected), (seen, self.process.log_tail(30))
        return seen.facts, seen.arrays["ids"].tolist()

    def score(self, ids: Any, trace: Arrays, path: str, first: int = 1) -> Any:
        return self.ask(events.Score, first, False, path=path, arrays={"ids": ids}, trace=trace)

    def generate(self, ids: Any, count: int) -> tuple[Any, Arrays]:
        generated = self.ask(events.Generate, count, arrays={"ids": ids})
        assert isinstance(generated, events.Generated), (generated, self.process.log_tail(30))
        return generated.stats, join("continuation", self.tokens)

    def joined(self) -> Arrays:
        """All rows as one, having come in order without a gap."""
        position = self.rows[0][0]
        for first, arrays in self.rows:
            assert first == position
            position += len(arrays["kl"])
        return join("rows", [arrays for _, arrays in self.rows])


def free_port() -> int:
    """A loopback port that nobody listens on just now."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


def session_ids(folder: Path, count: int) -> Any:
    """The first tokens of a file of source text that every machine has."""
    text = Path(argparse.__file__).read_text(encoding="utf-8")
    return np.array(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids[:count], dtype="<i4")


def flips(rows: Arrays) -> float:
    """The share of positions where the reference's best id is not the engine's."""
    return float((rows["rank"] > 1).mean())
