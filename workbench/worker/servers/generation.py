"""Continuation by a server: token ids as they arrive, and what speculation accepted, in its own words made ours."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from workbench.metrics.speed import decode_tps
from workbench.protocol.events import Generate
from workbench.worker.forcing import FLUSH_SECONDS, Report
from workbench.worker.servers.base import Dialect, Piece
from workbench.worker.servers.connection import Connection
from workbench.worker.servers.wire import Lost


class Continuation:
    """One Generate request. Where the connection breaks, a new request goes on behind the tokens that are there."""

    def __init__(
        self,
        dialect: Dialect,
        connection: Connection,
        request: Generate,
        report: Report,
        *,
        speculates: bool,
        check_identity: Callable[[], None],
    ) -> None:
        self.dialect, self.connection, self.request, self.report = dialect, connection, request, report
        self.check_identity = check_identity
        self.speculates = speculates
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.times: list[float] = []
        self.resumed: list[int] = []
        self._sent = 0
        self._began = self._flushed = 0.0

    def run(self, ids: list[int]) -> dict[str, Any]:
        """Send tokens in batches; returns the statistics of `Generated`. `seconds` are of their arrival here."""
        request = self.request
        self._began = self._flushed = time.perf_counter()
        reason, found = "length", None
        attempt, since = 0, None
        while len(self.tokens) < request.count:
            before = len(self.tokens)
            try:
                for piece in self.dialect.generate(ids + self.tokens, request, request.count - before):
                    self.report.check()
                    stopped = self._take(piece)
                    found = piece.acceptance or found
                    if piece.end or stopped or len(self.tokens) >= request.count:
                        reason = "stop" if stopped or piece.end == "stop" else "length"
                        if stopped:
                            break
                break
            except Lost as error:
                # Tokens came meanwhile: the server was there, and the time to wait begins anew.
                if since is None or len(self.tokens) > before:
                    attempt, since = 0, self.connection.clock()
                self.connection.wait(attempt, since, str(error))
                attempt += 1
                self.check_identity()
                self.resumed.append(len(self.tokens))
        self._flush()
        stats: dict[str, Any] = {
            "tokens": len(self.tokens),
            "seconds": self.times[-1] if self.times else 0.0,
            "median_tps": decode_tps(np.asarray(self.times)),
            "first_token_seconds": self.times[0] if self.times else None,
            "stop_reason": reason,
        }
        if self.resumed:
            stats["resumed_after"] = self.resumed
        elif found is not None:  # of one request; after a loss it would be about the last part only
            stats["acceptance"] = found
        return stats

    def _take(self, piece: Piece) -> bool:
        """Keep a piece's tokens up to one of `stop`; whether there was one."""
        now = time.perf_counter()
        for token, logprob in zip(piece.tokens, piece.logprobs, strict=True):
            if len(self.tokens) >= self.request.count:
                break
            self.tokens.append(token)
            self.logprobs.append(math.nan if self.speculates else logprob)
            self.times.append(now - self._began)
            if token in self.request.stop:
                return True
        if now - self._flushed >= FLUSH_SECONDS:
            self._flush()
        return False

    def _flush(self) -> None:
        if self._sent == len(self.tokens):
            return
        arrays = {
            "ids": np.array(self.tokens[self._sent :], "<i4"),
            "logprobs": np.array(self.logprobs[self._sent :], "<f4"),
            "seconds": np.array(self.times[self._sent :], "<f4"),
        }
        self.report.tokens(self._sent, arrays)
        self._sent, self._flushed = len(self.tokens), time.perf_counter()
