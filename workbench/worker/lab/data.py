"""Tokens to train on: sessions that the user's process rendered, with what is learned in each."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.errors import ModelError


@dataclass(frozen=True)
class Sessions:
    """Session i is `ids[starts[i]:starts[i + 1]]`; `learn` is 1 where a token is predicted with loss. The last `held`
    sessions are never trained on: their loss is measured."""

    ids: NDArray[np.int32]
    learn: NDArray[np.uint8]
    starts: NDArray[np.int64]
    held: int
    digest: str

    @property
    def trained(self) -> int:
        """Sessions to train on."""
        return len(self.starts) - 1 - self.held

    def __getitem__(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        span = slice(int(self.starts[index]), int(self.starts[index + 1]))
        return self.ids[span], self.learn[span]


def read_sessions(path: Path) -> Sessions:
    """Read the file that `run.lab` wrote. Raises ModelError where it is missing, damaged or too short."""
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        with np.load(path, allow_pickle=False) as file:
            columns: dict[str, NDArray[Any]] = {name: file[name] for name in ("ids", "learn", "starts", "held")}
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"not training data: {error}", where=str(path), next="Make it again.") from error
    found = Sessions(columns["ids"], columns["learn"], columns["starts"], int(columns["held"]), digest)
    whole = len(found.ids) == len(found.learn) and len(found.starts) and found.starts[-1] == len(found.ids)
    if not whole or found.trained < 1 or found.held < 1:
        what = "it holds no session to train on, or none to measure"
        raise ModelError(what, where=str(path), next="Ask for more --tokens.")
    return found
