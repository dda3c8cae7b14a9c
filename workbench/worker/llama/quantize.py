"""Weights of another type from a GGUF file, by llama.cpp's own quantiser."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workbench.errors import ConfigurationError, ModelError
from workbench.worker.llama.binding import FILE_TYPES, api, physical_cores
from workbench.worker.llama.effective import scheme_of
from workbench.worker.llama.header import read_header
from workbench.worker.llama.log import Log

_STEP = re.compile(r"^\[\s*(\d+)/\s*(\d+)\]")


def quantize(source: Path, target: Path, scheme: str, log: Log, progress: Callable[[int, int], None]) -> dict[str, Any]:
    """Write `target` with the weights of `scheme`; returns facts. `progress(done, total)` counts tensors.

    It cannot be stopped between tensors. A source that is quantised already is quantised once more, which the facts
    say. Raises ModelError where llama.cpp fails, with its words, ConfigurationError for a scheme it has not.
    """
    if scheme not in FILE_TYPES:
        raise ConfigurationError(
            f"weights of {scheme} cannot be made", where="llamacpp", next=f"Use {'|'.join(FILE_TYPES)}."
        )
    header = read_header(source, log)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    os.close(handle)
    params = api.llama_model_quantize_default_params()
    params.ftype = FILE_TYPES[scheme]
    params.nthread = physical_cores()
    params.allow_requantize = header.quantized
    log.begin()
    log.listener = lambda line: _tell(line, progress)
    try:
        code = api.llama_model_quantize(str(source).encode(), name.encode(), params)
        if code:
            raise ModelError(f"llama.cpp cannot make {scheme} of it: {log.complaint()}", where=str(source))
        made = read_header(Path(name), log)
        os.chmod(name, 0o644)
        os.replace(name, target)
    finally:
        log.listener = None
        Path(name).unlink(missing_ok=True)
    return {
        "format": "gguf",
        "architecture": made.architecture,
        "scheme": scheme,
        "source": source.name,
        "source_scheme": scheme_of(header),
        "source_types": header.tensors,
        "tensors": made.tensors,
        "bytes": sum(made.bytes.values()),
        "requantised": header.quantized,
    }


def _tell(line: str, progress: Callable[[int, int], None]) -> None:
    if match := _STEP.match(line):
        progress(int(match[1]), int(match[2]))
