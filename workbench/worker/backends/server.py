"""The server backend: a lane on a running OpenAI-compatible endpoint, spoken to with the standard library.

The API key is read from an environment variable when it is needed, and stands in nothing that leaves this process.
"""

from __future__ import annotations

import platform
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from workbench.config.axes import ENGINES, check
from workbench.config.lane import Configuration, from_json
from workbench.errors import ConfigurationError, EngineError
from workbench.metrics.divergence import BOUNDED, HEAD_AND_SAMPLES
from workbench.protocol.events import Generate, Inspect, Score
from workbench.protocol.wire import Arrays
from workbench.worker.channel import Job
from workbench.worker.forcing import check_request
from workbench.worker.servers.address import parse_address, read_key
from workbench.worker.servers.base import Dialect, Served, Target
from workbench.worker.servers.connection import TIMEOUT_SECONDS, Connection
from workbench.worker.servers.detect import DIALECTS, detect, make_dialect
from workbench.worker.servers.generation import Continuation
from workbench.worker.servers.llama_server import LlamaServer
from workbench.worker.servers.scoring import Scoring, check_repeats
from workbench.worker.servers.vocabulary import sizes

ENGINE = ENGINES["server"]
TWO_RUNS = "divergence without the drafter, acceptance and speed with it"
LEFT_OUT = "log-probabilities of generated tokens are left out: the server speculates"


def make() -> ServerBackend:
    """The backend."""
    return ServerBackend()


class ServerBackend:
    """See `workbench.worker.backends.base.Backend`."""

    def __init__(self) -> None:
        self.configuration = Configuration(engine="server")
        self._connection: Connection | None = None
        self._dialect: Dialect | None = None
        self._served = Served("")
        self._tokens: list[int] = []
        self._best = 0
        self._vocabulary = self._width = self._context = 0

    def probe(self) -> dict[str, Any]:
        """What the backend can speak; no server is asked."""
        return {
            "name": "server",
            "version": platform.python_version(),
            "build": "http.client",
            "python": platform.python_version(),
            "executable": sys.executable,
            "devices": ["cpu"],
            "axes": {axis: list(values) for axis, values in ENGINE.axes.items()},
            "keys": list(ENGINE.keys),
            "dialects": list(DIALECTS),
            "converts": [],
            "cpu": platform.machine(),
        }

    def start(self, configuration: Configuration, model: Path, context: int, job: Job) -> dict[str, Any]:
        """Find out what the server is and gives, refuse what it does not, and let it show that it repeats itself."""
        check(configuration)
        self.release()
        self._vocabulary, self._width = sizes(model)
        try:
            return self._start(configuration, context, job)
        except BaseException:
            self.release()
            raise

    def _start(self, configuration: Configuration, context: int, job: Job) -> dict[str, Any]:
        own = dict(configuration.extra)
        connection, dialect, served = self._meet(configuration, job, scores=True)
        self._check_size(dialect, served, context)
        best = dialect.best(int(own.get("logprobs", "0")))
        job.progress("checking", 0, 1)
        room = max(dialect.probe_lengths) if served.context is None else served.context - 1
        checks = check_repeats(dialect, _probe_ids(self._vocabulary, min(room, max(dialect.probe_lengths))), best)
        job.progress("checking", 1, 1)
        self.configuration, self._dialect = configuration, dialect
        self._served, self._best, self._context = served, best, context
        exact = dialect.name == "trtllm"
        key = read_key(own.get("key_env", ""))
        exposed = bool(key) and connection.address.scheme == "http" and not connection.address.local
        notes = [*served.notes, *(["the key travels unencrypted"] if exposed else [])]
        notes += [LEFT_OUT] if served.speculation else []
        return {
            "engine": "server",
            "version": served.version,
            "build": served.build,
            "weights": "served",
            "kv": "served",
            "attn": "served",
            "device": None,
            "threads": None,
            "chunk": None,
            "estimator": HEAD_AND_SAMPLES if exact else BOUNDED,
            "logits": "full" if exact else f"top-{best}",
            "vocabulary": self._vocabulary,
            "context_limit": served.context,
            "notes": notes,
            "cpu": None,
            "url": str(connection.address),
            "dialect": dialect.name,
            "served_model": connection.clean(served.model),
            "speculation": served.speculation,
            **({"runs": TWO_RUNS} if served.speculation else {}),
            "server": served.facts,
            "checks": checks,
            "weights_kept": True,
        }

    def score(self, request: Score, job: Job) -> dict[str, Any]:
        """Forced scoring, piece by piece."""
        connection, dialect = self._require("score", job)
        if request.record:
            raise ConfigurationError(
                "a server gives no whole distributions, so it records no reference",
                where=str(connection.address),
                next="Record it with another engine.",
            )
        if request.path != self.configuration.path or request.path not in dialect.paths:
            raise ConfigurationError(f"{dialect.name} cannot score on path={request.path}", where="score")
        check_request(request, self._context, self._width, self._tokens)
        ids = request.arrays["ids"]
        if "prefill" in dialect.paths and self._served.context is not None and len(ids) >= self._served.context:
            raise ConfigurationError(
                f"{len(ids):,} tokens and the one that a request must generate do not fit the server's context of"
                f" {self._served.context:,}",
                where=str(connection.address),
                next=f"{dialect.context_advice}, or use a shorter session.",
            )
        step = int(dict(self.configuration.extra).get("step", "0"))
        before = (dialect.recomputed, dialect.fed) if isinstance(dialect, LlamaServer) else (0, 0)
        scoring = Scoring(
            dialect, request, job, self._best, step, self._width, lambda: connection.losses, self._check_identity
        )
        losses = connection.losses
        stats = scoring.run()
        self._tokens = ids.tolist()
        if isinstance(dialect, LlamaServer):
            stats |= {"recomputed": dialect.recomputed - before[0], "fed": dialect.fed - before[1]}
        return {**stats, "connections_lost": connection.losses - losses, **self.stats()}

    def generate(self, request: Generate, job: Job) -> dict[str, Any]:
        """Continue the ids that the request brings, or those of the last request."""
        connection, dialect = self._require("generate", job)
        given = request.arrays.get("ids")
        held = self._tokens if given is None else given.tolist()
        keep = len(held) if request.keep < 0 else request.keep
        if not 0 < keep <= len(held) or request.count < 1:
            raise ConfigurationError(
                f"cannot keep {keep} of {len(held)} tokens and generate {request.count}", where="generate"
            )
        limit = self._served.context or self._context
        if keep + request.count > limit:
            raise ConfigurationError(
                f"{keep} tokens and {request.count} new ones do not fit a context of {limit}",
                where=str(connection.address),
                next=f"{dialect.context_advice}.",
            )
        if not 0 <= min(held) <= max(held) < self._width:
            raise ConfigurationError("ids lie outside the vocabulary: another model's?", where="generate")
        if not 0 <= request.temperature < float("inf") or not 0 < request.top_p <= 1 or request.top_k < 0:
            raise ConfigurationError("temperature, top_p or top_k is out of range", where="generate")
        continuation = Continuation(
            dialect,
            connection,
            request,
            job,
            speculates=bool(self._served.speculation),
            check_identity=self._check_identity,
        )
        stats = continuation.run(held[:keep])
        self._tokens = held[:keep] + continuation.tokens[:-1]
        return {**stats, **self.stats()}

    def inspect(self, request: Inspect, job: Job) -> tuple[dict[str, Any], Arrays]:
        """The server's own tokenizer and template, as far as it tells."""
        configuration = check(from_json(request.configuration))
        self.release()
        self._vocabulary, self._width = sizes(Path(request.model_path))
        try:
            return self._inspect(configuration, request, job)
        finally:
            self.release()

    def _inspect(self, configuration: Configuration, request: Inspect, job: Job) -> tuple[dict[str, Any], Arrays]:
        connection, dialect, served = self._meet(configuration, job)
        read = None
        if request.text:
            ids = dialect.tokenize(request.text)
        else:
            read = dialect.render(request.messages, request.tools) if request.messages else None
            ids = read.ids if read else None
        front = dialect.adds_in_front()
        facts: dict[str, Any] = {
            "template": served.template,
            "template_from": f"the server at {connection.address}",
            "rendered": read.text if read else None,
            "adds_bos": None if front is None else bool(front),
            "specials": {},
            "vocabulary": served.vocabulary,
            "sampling": dialect.sampling(),
            "says": ids is not None,
        }
        return facts, {"ids": np.array(ids or [], "<i4")}

    def convert(self, source: Path, target: Path, scheme: str, job: Job) -> dict[str, Any]:
        """Nothing: a server loads its own model."""
        raise ConfigurationError("a server converts no models", where="server")

    def stats(self) -> dict[str, Any]:
        """Memory and cache are the server's, and not told."""
        return {
            "peak_memory_bytes": None,
            "memory_kind": None,
            "kv_cache_bytes": None,
            "kv_workspace_bytes": None,
            "kv_positions": len(self._tokens),
        }

    def release(self) -> None:
        """Close the connection and forget the server."""
        if self._connection is not None:
            self._connection.drop()
        self._connection = self._dialect = None
        self._served, self._tokens = Served(""), []

    def stop(self) -> None:
        """Same as release."""
        self.release()

    def _meet(
        self, configuration: Configuration, job: Job, *, scores: bool = False
    ) -> tuple[Connection, Dialect, Served]:
        """Connect, find the dialect and the model. Raises ConfigurationError, EngineError."""
        own = dict(configuration.extra)
        address = parse_address(own["url"])
        timeout = float(own.get("timeout", TIMEOUT_SECONDS))
        if timeout <= 0:
            raise ConfigurationError("timeout=0 gives no server time to answer", where="server", next="Leave it out.")
        connection = self._connection = Connection(address, read_key(own.get("key_env", "")), timeout, job.check)
        name = own.get("dialect", "auto")
        dialect = make_dialect(
            detect(connection) if name == "auto" else name, connection, Target(own.get("served", ""), self._width)
        )
        if scores and configuration.path not in dialect.paths:
            raise ConfigurationError(
                f"{dialect.name} cannot score on path={configuration.path}", where=str(address), next=dialect.advice
            )
        served = dialect.served()
        dialect.target = Target(served.model, self._width)
        if served.vocabulary is not None and not self._vocabulary <= served.vocabulary <= self._width:
            raise ConfigurationError(
                f"the server's model has {served.vocabulary:,} ids, ours {self._vocabulary:,}: another model",
                where=str(address),
                next="Name the session's model as model=, or the right one as served=.",
            )
        return connection, dialect, served

    @staticmethod
    def _check_size(dialect: Dialect, served: Served, context: int) -> None:
        if served.context is not None and context > served.context:
            raise ConfigurationError(
                f"the server's context holds {served.context:,} tokens, and the session with its decode sample needs"
                f" {context:,}",
                where=dialect.name,
                next=f"{dialect.context_advice}, or name its context: ctx={served.context}, with a session that fits.",
            )

    def _check_identity(self) -> None:
        """After a loss: raise EngineError where the server that is there now is another one."""
        assert self._dialect is not None and self._connection is not None
        now = self._dialect.served()
        if now.identity() != self._served.identity():
            names = [
                f"{self._connection.clean(each.model)} {each.version or each.build or ''}"
                for each in (now, self._served)
            ]
            raise EngineError(
                f"another server answers now: {names[0]}, before {names[1]}",
                where=str(self._connection.address),
                next="The rows until now stay; run another lane for the other server.",
            )

    def _require(self, what: str, job: Job) -> tuple[Connection, Dialect]:
        if self._connection is None or self._dialect is None:
            raise ConfigurationError("no server is known", where=what, next="Send Start first.")
        self._connection.look = job.check
        return self._connection, self._dialect


def _probe_ids(vocabulary: int, count: int) -> list[int]:
    """Ids that no cache has seen: new ones each time."""
    chance = random.Random(time.time_ns())
    return [chance.randrange(vocabulary) for _ in range(count)]
