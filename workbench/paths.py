"""Where things live: what ships with the program, and the user's configuration, data and caches.

`WORKBENCH_HOME`, where set, holds everything of the user's in one folder; otherwise the platform's own places are used.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

import platformdirs

_PACKAGE = Path(__file__).resolve().parent
_NAME = "workbench"


def config_dir() -> Path:
    """Settings, presets and the user's own themes."""
    return _home("config") or Path(platformdirs.user_config_dir(_NAME))


def data_dir() -> Path:
    """Models, traces, saved sessions and engine environments."""
    return _home("data") or Path(platformdirs.user_data_dir(_NAME))


def cache_dir() -> Path:
    """What can be made again at any time."""
    return _home("cache") or Path(platformdirs.user_cache_dir(_NAME))


def models_dir() -> Path:
    """Converted and downloaded models."""
    return data_dir() / "models"


def traces_dir() -> Path:
    """Cached reference traces."""
    return data_dir() / "traces"


def saved_dir() -> Path:
    """Saved sessions that were given no path."""
    return data_dir() / "saved"


def environments_dir() -> Path:
    """Engine environments that we created."""
    return data_dir() / "environments"


def logs_dir() -> Path:
    """Logs of engine processes."""
    return cache_dir() / "logs"


def themes_dir() -> Path:
    """The themes that ship with the program."""
    return _shipped("themes")


def sessions_dir() -> Path:
    """The sample sessions that ship with the program."""
    return _shipped("sessions")


def worker_path() -> Path:
    """A folder that holds only a link to this package: what an engine's interpreter gets on its path."""
    folder = cache_dir() / "worker-path" / hashlib.sha256(bytes(_PACKAGE)).hexdigest()[:12]
    link = folder / _NAME
    if not link.is_symlink():
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # another process was first
            link.symlink_to(_PACKAGE, target_is_directory=True)
    return folder


def expanded(text: str) -> Path:
    """A path with `~` as the home folder; one of a user that is not known stays as written, and is then not found."""
    return Path(os.path.expanduser(text))


def places() -> dict[str, Path]:
    """Every place by its name, for `workbench paths`."""
    return {
        "configuration": config_dir(),
        "data": data_dir(),
        "cache": cache_dir(),
        "models": models_dir(),
        "traces": traces_dir(),
        "saved sessions": saved_dir(),
        "engine environments": environments_dir(),
        "logs": logs_dir(),
        "shipped themes": themes_dir(),
        "sample sessions": sessions_dir(),
    }


def _home(part: str) -> Path | None:
    home = os.environ.get("WORKBENCH_HOME")
    return expanded(home) / part if home else None


def _shipped(folder: str) -> Path:
    in_wheel = _PACKAGE / "data" / folder
    return in_wheel if in_wheel.is_dir() else _PACKAGE.parent / folder
