"""What the program keeps on disk, kind by kind, and clearing it."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from workbench.engines import install
from workbench.engines.models import folder_bytes, list_models, remove_model
from workbench.errors import ConfigurationError
from workbench.paths import environments_dir, logs_dir, models_dir, saved_dir, traces_dir

KINDS: dict[str, Callable[[], Path]] = {
    "models": models_dir,
    "traces": traces_dir,
    "saved": saved_dir,
    "environments": environments_dir,
    "logs": logs_dir,
}


@dataclass(frozen=True, slots=True)
class Use:
    """Disk used by one kind of thing, and the command that clears it."""

    kind: str
    folder: Path
    bytes: int
    clean: str


def disk_use() -> list[Use]:
    """Every kind with its folder and size."""
    return [
        Use(kind, folder(), folder_bytes(folder()) if folder().is_dir() else 0, f"workbench models clean {kind}")
        for kind, folder in KINDS.items()
    ]


def clean(kind: str) -> int:
    """Delete everything of a kind that we made; returns the bytes freed. Raises ConfigurationError for an unknown kind.

    Models that lie elsewhere stay on the list and on disk.
    """
    if kind not in KINDS:
        raise ConfigurationError(
            f"there is nothing called {kind!r} to clean", where="clean", next=f"Use {', '.join(KINDS)}."
        )
    folder = KINDS[kind]()
    freed = folder_bytes(folder) if folder.is_dir() else 0
    if kind == "models":
        for row in list_models():
            if row.folder.parent == folder and row.status != "not fetched":
                remove_model(row.name)
    for path in list(folder.iterdir()) if folder.is_dir() else ():
        if kind == "environments" and path.name.endswith(".lock"):
            continue  # may be held
        if kind == "environments" and path.is_dir() and install.is_name(path.name):
            install.remove(path.name)
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
    return freed
