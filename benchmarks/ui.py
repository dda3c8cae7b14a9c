"""The interface's cost at 4 lanes × 100,000 tokens: first frame, idle, following, seeking, memory; `--quick`: less.

Everything runs in a child on a real pseudo-terminal of 160×45; this process reads what it writes and its CPU time from
/proc. Exits 1 where a bar of the design notes (section 8) is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import platform
import pty
import select
import signal
import statistics
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COLUMNS, LINES, TOKENS, LANES = 160, 45, 100_000, 4
TICKS_PER_SECOND, RATE = os.sysconf("SC_CLK_TCK"), 200
MARKER = b"repo-fix-07"  # the title, which the first frame with lanes shows


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter measurements")
    parser.add_argument("--child", choices=("idle", "follow", "seek"), help=argparse.SUPPRESS)
    parser.add_argument("--data", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options.child, Path(options.data))
    seconds = 4.0 if options.quick else 10.0
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        prepare(data)
        first: list[tuple[float, float]] = [
            Terminal("idle", data).first_frame() for _ in range(3 if options.quick else 7)
        ]
        idle = Terminal("idle", data).measure(seconds)
        follow = Terminal("follow", data).measure(seconds)
        seek = Terminal("seek", data).seeks(data)
    # On a machine busy with other work, waiting for a core says nothing about the interface: its CPU time is judged.
    busy = os.getloadavg()[0] > (os.cpu_count() or 1)
    judged = 1 if busy else 0
    frame = statistics.median(values[judged] for values in first)
    worst = max(values[judged] for values in seek)
    memory = f"{idle.lane_megabytes:.1f} MB (process {idle.megabytes:.0f} MB)"
    rows = [
        ("first frame, fresh process", f"{both(first, statistics.median, 's', 2)}", frame < 0.7, "< 0.7 s"),
        ("idle", f"{idle}", idle.cpu < 0.005, "0 %"),
        (f"{LANES} lanes followed at {RATE} tok/s each", f"{follow}", follow.cpu < 0.3, "< 30 %"),
        (f"seek anywhere, median of {len(seek)}", both(seek, statistics.median, "ms", 1), True, ""),
        ("  the worst", both(seek, max, "ms", 1), worst < 50, "< 50 ms"),
        ("memory a lane", memory, idle.lane_megabytes < 10, "< 10 MB"),
    ]  # fmt: skip
    import textual

    print(
        f"{LANES} lanes × {TOKENS:,} tokens, {COLUMNS}×{LINES} pty; {platform.processor() or platform.machine()}, "
        f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}{', judged by CPU time' if busy else ''}; "
        f"Python {platform.python_version()}, Textual {textual.__version__}"
    )
    for name, value, good, bar in rows:
        print(f"  {name:<40} {value:<44} {'ok  ' if good else 'MISS'} {bar}")
    print(f"following {LANES} lanes: {100 * follow.cpu:.1f} % of a core")
    return 0 if all(good for _, _, good, _ in rows) else 1


def both(values: list[tuple[float, float]], of: Callable[[Iterable[float]], float], unit: str, digits: int) -> str:
    """Wall time and CPU time."""
    wall, cpu = (of([pair[index] for pair in values]) for index in (0, 1))
    return f"{wall:.{digits}f} {unit} wall, {cpu:.{digits}f} {unit} CPU"


class Measured:
    """What a child used over a while."""

    def __init__(self, cpu: float, kilobytes: float, megabytes: float, lane_megabytes: float) -> None:
        self.cpu = cpu
        self.kilobytes = kilobytes
        self.megabytes = megabytes
        self.lane_megabytes = lane_megabytes

    def __str__(self) -> str:
        return f"{100 * self.cpu:.1f} % of a core, {self.kilobytes:.0f} kB/s"


class Terminal:
    """One child on a pseudo-terminal."""

    def __init__(self, mode: str, data: Path) -> None:
        self.started = time.perf_counter()
        self.bytes = 0
        self.seen = b""
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", "PYTHONPATH": str(ROOT)}
            environment.pop("NO_COLOR", None)
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
            arguments = [sys.executable, __file__, "--child", mode, "--data", str(data)]
            os.execve(sys.executable, arguments, environment)

    def drain(self, seconds: float, until: bytes = b"") -> bool:
        """Read what comes for a while, or until some bytes were written."""
        end = time.perf_counter() + seconds
        while (left := end - time.perf_counter()) > 0:
            ready, _, _ = select.select([self.fd], [], [], min(left, 0.05))
            if ready:
                try:
                    data = os.read(self.fd, 1 << 16)
                except OSError:  # the child is gone
                    return False
                self.bytes += len(data)
                self.seen = (self.seen + data)[-200_000:]
                if until and until in self.seen:
                    return True
        return False

    def first_frame(self) -> tuple[float, float]:
        """Seconds, and CPU seconds, from the start of the process to the first frame that shows the lanes."""
        if not self.drain(20, MARKER):
            self.stop()
            raise SystemExit(f"no frame came: {self.seen[-2000:]!r}")
        elapsed, cpu = time.perf_counter() - self.started, self.cpu()
        self.stop()
        return elapsed, cpu

    def cpu(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND

    def measure(self, seconds: float) -> Measured:
        """CPU and bytes once everything has settled."""
        self.drain(20, MARKER)
        self.drain(2.5)
        before, sent, then = self.cpu(), self.bytes, time.perf_counter()
        self.drain(seconds)
        elapsed = time.perf_counter() - then
        cpu, kilobytes = (self.cpu() - before) / elapsed, (self.bytes - sent) / elapsed / 1e3
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        self.stop()
        megabytes = pages * os.sysconf("SC_PAGE_SIZE") / 1e6
        return Measured(cpu, kilobytes, megabytes, lane_bytes() / 1e6)

    def seeks(self, data: Path) -> list[tuple[float, float]]:
        """Milliseconds, and CPU milliseconds, of each seek: from the action to the frame handed to the terminal."""
        out = data / "seeks.json"
        self.drain(60, b"seeks done")
        self.stop()
        return json.loads(out.read_text())

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.fd)


def states():
    """The synthetic sessions of the tests."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    from tests.ui import states as module

    return module


def prepare(data: Path) -> None:
    """Build the session once and keep its arrays, so that a child starts as one that opens a file does."""
    import pickle  # our own temporary file, written a moment ago

    module = states()
    state = module.make_state(count=TOKENS)
    columns = [state.stream["ids"], *(lane.continuation.column("ids") for lane in state.lanes)]
    highest = max(int(ids.max()) for ids in columns)
    words = [state.token_bytes(token) for token in range(highest + 1)]
    lanes = [(lane.record, lane.rows, lane.continuation, lane.entropy) for lane in state.lanes]
    (data / "state.pickle").write_bytes(pickle.dumps((state.session, state.stream, lanes, words)))


def lane_bytes() -> int:
    """Bytes of one lane's columns and of what the interface keeps beside them, at TOKENS positions."""
    from workbench.protocol.columns import ROWS
    from workbench.ui.board import Board

    module = states()
    state = module.make_state(count=TOKENS)
    board = Board(state)
    columns = sum((max(1, item.width)) * int(item.dtype[-1]) for item in ROWS.values()) * TOKENS
    view = board.views[1].measures
    kept = sum(array.nbytes for array in (view.codes, view.bin_n, view.bin_kl, view.bin_max, view.bin_flips))
    return columns + kept


def child(mode: str, data: Path) -> int:
    """The app itself, in one of the ways that are measured."""
    import pickle

    from workbench.config.theme import load_themes
    from workbench.store.state import LaneState, SessionState
    from workbench.ui.app import WorkbenchApp

    session, stream, lanes, words = pickle.loads((data / "state.pickle").read_bytes())
    state = SessionState(
        title=MARKER.decode(), session=session, facts={}, stream=stream,
        lanes=[LaneState(record, rows, tail, entropy=entropy) for record, rows, tail, entropy in lanes],
        token_bytes=lambda token: words[token] if 0 <= token < len(words) else b"",
        trace=states().trace_reader(stream, len(words)), version=1,
    )  # fmt: skip
    themes, _ = load_themes([ROOT / "themes"])
    if mode == "idle":
        WorkbenchApp(themes, state=state).run()
        return 0
    return driven(mode, data, state, themes)


def driven(mode: str, data: Path, state, themes) -> int:  # type: ignore[no-untyped-def]
    """The app with a script inside: lanes that grow, or seeks that are timed."""
    import random

    from workbench.ui.app import WorkbenchApp

    module = states()

    class Driven(WorkbenchApp):
        def on_ready(self) -> None:
            if mode == "follow":
                self.then = time.monotonic()
                self.set_interval(1 / 20, self.more)
            else:
                self.run_worker(self.seek(), exit_on_error=True)

        def more(self) -> None:
            """What a hub does: rows of 50 ms for every lane."""
            now = time.monotonic()
            rows = int((now - self.then) * RATE)
            if rows:
                self.then += rows / RATE
                for lane, everything in growing:
                    module.grow(lane, everything, rows)
                state.version += 1

        async def seek(self) -> None:
            import asyncio

            while self.desk.board is None:
                await asyncio.sleep(0.05)
            await asyncio.sleep(1)
            random.seed(1)
            times: list[tuple[float, float]] = []
            for _ in range(60):
                position = random.randrange(TOKENS)
                done = asyncio.Event()
                start, used = time.perf_counter(), time.process_time()
                self.lanes.goto(position)
                self.lanes.call_after_refresh(done.set)
                await done.wait()
                times.append(((time.perf_counter() - start) * 1e3, (time.process_time() - used) * 1e3))
                await asyncio.sleep(0.05)
            (data / "seeks.json").write_text(json.dumps(times))
            self.lanes.say("seeks done")

    growing = []
    if mode == "follow":
        growing = [(lane, module.rewind(lane, TOKENS // 2)) for lane in state.lanes]
    app = Driven(themes, state=state)
    app.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
