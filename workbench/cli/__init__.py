"""The command line: everything that the screens can do, headless first.

Data goes to stdout, narration and progress to stderr. Exit codes: 0 done, 1 failed, 2 usage or refused configuration.
The interface is imported only where a screen is asked for.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence

from workbench.cli.parser import build_parser
from workbench.errors import Cancelled, ConfigurationError, WorkbenchError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower().replace("-", "") != "utf8":
            stream.reconfigure(errors="backslashreplace")  # a locale that has no "─" still gets its table
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0].endswith(".wbs"):
        words.insert(0, "replay")  # `workbench FILE`
    options = build_parser().parse_args(words)
    module, _, name = str(options.command).partition(".")
    command: Callable[..., int] = getattr(importlib.import_module(f"workbench.cli.{module}"), name)
    try:
        code = command(options)
        if sys.stdout:
            sys.stdout.flush()  # here and not when the interpreter ends, where a reader that left would be a traceback
        return code
    except ConfigurationError as error:
        return _complain(error, 2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader left; nothing more to say to it
        return 1
    except (WorkbenchError, OSError) as error:
        return _complain(error, 1)
    except KeyboardInterrupt:
        return _complain(Cancelled("interrupted"), 1)


def _complain(error: Exception, code: int) -> int:
    from workbench.session.text import harmless

    lines = [str(error), *getattr(error, "log_tail", ())]
    for line in "\n".join(lines).splitlines():
        print(f"workbench: {harmless(line)}", file=sys.stderr)
    return code
