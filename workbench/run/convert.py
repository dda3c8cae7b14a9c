"""Conversion of a GGUF file by an engine process, as the function that the model cache asks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from workbench.engines.process import EngineProcess
from workbench.errors import ModelError
from workbench.protocol import events


def converter(python: Callable[[], str]) -> Callable[..., dict[str, Any]]:
    """A function that turns a GGUF file into a safetensors folder and returns its facts. It raises ModelError.

    `python` finds the interpreter that has transformers, and is asked only once something must be converted.
    """

    def convert(source: Path, target: Path, scheme: str = "") -> dict[str, Any]:
        engine = EngineProcess(python(), "transformers")
        try:
            engine.send(events.Convert(1, str(source), str(target), scheme))
            while True:
                match engine.receive():
                    case events.Converted(facts=facts):
                        return facts
                    case events.Failed() as failed:
                        raise ModelError(failed.what, where=failed.where or str(source), next=failed.next)
                    case _:
                        continue  # Ready and Progress
        finally:
            engine.stop()

    return convert
