"""The request loop of an engine process: one request at a time, and a failing one does not end the process."""

from __future__ import annotations

import importlib
import os
import re
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from workbench.config.lane import from_json
from workbench.errors import Cancelled, ConfigurationError, WorkbenchError
from workbench.protocol.events import (
    Convert,
    Converted,
    Failed,
    Generate,
    Generated,
    Inspect,
    Inspected,
    Probe,
    Quantize,
    Ready,
    Request,
    Score,
    Scored,
    Start,
    Started,
    Stop,
    Windows,
)
from workbench.worker.backends.base import Backend, OutOfMemory, Quantizer, Windower
from workbench.worker.channel import Channel, Job

MEMORY_ADVICE = "Lower ctx or chunk, quantise the KV cache or the weights, or end other programs; then retry."


def serve(name: str, requests: int, events: int) -> int:
    """Answer requests from descriptor `requests` until Stop; returns the exit code."""
    channel = Channel(os.fdopen(requests, "rb"), os.fdopen(events, "wb"))
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    channel.watch()
    try:
        backend = _load(name)
        channel.send(Ready(0, backend.probe()))
    except (WorkbenchError, ImportError, OSError) as error:
        traceback.print_exc()
        channel.send(_failure(0, error))
        return 1
    while True:
        request = channel.next()
        if isinstance(request, Stop):
            backend.stop()
            return 0
        job = Job(request.job, channel)
        try:
            job.check()
            channel.send(_answer(backend, request, job))
        except (
            Exception
        ) as error:  # the boundary: whatever a library raises becomes the job's answer, and goes to the log
            if not isinstance(error, Cancelled):
                traceback.print_exc()
            answer = _failure(request.job, error)
            if isinstance(error, MemoryError):
                del error  # its traceback holds the tensors that filled the memory
                backend.release()
            channel.send(answer)
        finally:
            channel.finish(request.job)


def _load(name: str) -> Backend:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or not (Path(__file__).parent / "backends" / f"{name}.py").exists():
        raise ConfigurationError(f"there is no engine backend {name!r}", where="engine process")
    return importlib.import_module(f"workbench.worker.backends.{name}").make()


def _answer(backend: Backend, request: Request, job: Job) -> Any:
    match request:
        case Probe():
            return Ready(job.number, backend.probe())
        case Start():
            began = time.perf_counter()
            configuration = from_json(request.configuration)
            effective = backend.start(configuration, Path(request.model_path), int(request.context), job)
            return Started(job.number, effective, time.perf_counter() - began)
        case Score():
            return Scored(job.number, backend.score(request, job))
        case Generate():
            return Generated(job.number, backend.generate(request, job))
        case Inspect():
            return Inspected(job.number, *backend.inspect(request, job))
        case Convert():
            facts = backend.convert(Path(request.source), Path(request.target), request.scheme, job)
            return Converted(job.number, request.target, facts)
        case Quantize() if isinstance(backend, Quantizer):
            return Converted(job.number, request.target, backend.quantize(request, job))
        case Windows() if isinstance(backend, Windower):
            return Scored(job.number, backend.windows(request, job))
        case _:
            raise ConfigurationError(f"{type(request).__name__} is not expected here", where="engine process")


def _failure(job: int, error: BaseException) -> Failed:
    """The Failed of an exception: our own carry their words, an unknown one its type, message and place."""
    if isinstance(error, WorkbenchError):
        kinds = {Cancelled: "cancelled", ConfigurationError: "refused"}
        kind = next((word for known, word in kinds.items() if isinstance(error, known)), "failed")
        return Failed(job, kind, error.what, error.where, error.next)
    if isinstance(error, MemoryError):
        what = str(error) if isinstance(error, OutOfMemory) else f"out of memory: {error}"
        return Failed(job, "failed", what, "engine process", MEMORY_ADVICE)
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "engine process"
    return Failed(job, "failed", f"{type(error).__name__}: {error}", where, "The engine's log has the whole trace.")
