"""`python -m workbench.worker BACKEND`: one engine in its own process, frames in on stdin and out on stdout.

The two pipes are moved to other descriptors before anything else is imported, and descriptors 1 and 2 point at the log
file named by WORKBENCH_LOG: native libraries print to them whenever they like.
"""

from __future__ import annotations

import os
import sys


def _claim_pipes() -> tuple[int, int]:
    """Descriptors for requests and events; afterwards 0 reads nothing, and 1 and 2 write to the log."""
    requests, events = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    path = os.environ.get("WORKBENCH_LOG")
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) if path else os.dup(2)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for spare in {null, log}:
        os.close(spare)
    return requests, events


def main() -> int:
    """Serve until the requests end; the exit code is 0 after Stop, 2 for a wrong call, 3 for a broken stream."""
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m workbench.worker BACKEND\n")
        return 2
    requests, events = _claim_pipes()
    from workbench.worker.serve import serve

    return serve(sys.argv[1], requests, events)


if __name__ == "__main__":
    # Skips the interpreter's teardown: engines' threads and compilers can hang in it.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
