"""One writer a file: an advisory lock of the operating system on `FILE.lock`, gone with the process that held it.

The database file itself is never opened beside SQLite: closing such a handle would drop SQLite's own locks on it.
"""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from workbench.errors import SavedSessionError


class WriterLock:
    """Held from construction to `release`. Raises SavedSessionError, naming the holder, where another one has it."""

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(path.name + ".lock")
        self._handle = _acquire(self._path, path)

    def release(self) -> None:
        """Let the next writer in and remove the lock's file."""
        self._path.unlink(missing_ok=True)
        os.close(self._handle)


def held(path: Path) -> bool:
    """Whether a file is being written now. What a killed writer left behind does not count."""
    try:
        handle = os.open(path.with_name(path.name + ".lock"), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # a writer has the lock's file there for as long as it writes
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # where nothing can be locked, nothing is being written
        return False
    else:
        return False
    finally:
        os.close(handle)


def _acquire(lock: Path, path: Path) -> int:
    while True:
        try:
            handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise SavedSessionError(
                f"cannot be opened for writing: {error.strerror}",
                where=str(path),
                next="Check the folder's permissions.",
            ) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(handle, 256, 0).decode("utf-8", "replace").strip()
            os.close(handle)
            raise SavedSessionError(
                f"is being written by {holder or 'another process'}",
                where=str(path),
                next="Wait for it, end it, or write to another file.",
            ) from error
        except OSError as error:
            os.close(handle)
            raise SavedSessionError(
                f"cannot be locked: {error.strerror}", where=str(path), next="Write to a disk of this machine."
            ) from error
        if _is_current(handle, lock):
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
            return handle
        # The former holder removed the file between our open and our lock.
        os.close(handle)


def _is_current(handle: int, lock: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(lock))
    except FileNotFoundError:
        return False
