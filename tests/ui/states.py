"""Synthetic sessions for screens: deterministic, tool-calling, with lanes that diverge by a known amount."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np

from workbench.config.lane import Configuration, parse_spec
from workbench.metrics.acceptance import acceptance
from workbench.protocol.columns import TRACE
from workbench.session.regions import Role
from workbench.store.state import Columns, LaneRecord, LaneState, SessionState

REFERENCE_COLUMNS = ("logprob", "top_ids", "top_logprobs", "ties", "valid")
SPECS = ("transformers:weights=int8,kv=bf16", "transformers:weights=bf16,kv=int8", "transformers:weights=int8,kv=int4")
MEANS = (0.004, 0.019, 0.095, 0.03, 0.06, 0.01, 0.15)

SYSTEM = (
    "You are a careful engineer. Read before you write, keep changes small, and run the tests after every change.\n"
    "Tools: read_file(path, start, end), apply_patch(path, patch), run_tests(path)."
)
ASK = "The cache releases a block twice when a sequence is preempted. Find out why and fix it, with a test."
THOUGHTS = (
    "I will look at where blocks are released. The preempt path and the finish path both seem to call "
    "free, so the reference "
    "count may fall below zero when both happen in one step.",
    "The block is released twice: once when the sequence finishes and again in the preempt path. I will "
    "guard the second "
    "release and add a test that preempts a finished sequence.",
    "The patch applied. Now the test: it builds a pool with two blocks, finishes a sequence, preempts "
    "it, and expects the free "
    "list to hold each block once.",
    "All tests pass. The release is now idempotent, and the new test fails without the guard — I checked "
    "by reverting it.",
)
CALLS = (
    '{"name": "read_file", "arguments": {"path": "src/cache/block.py", "start": 120, "end": 184}}',
    '{"name": "apply_patch", "arguments": {"path": "src/cache/block.py", "patch": "@@ -131,6 +131,8 '
    '@@\\n  if block.ref_count == 0:\\n+     return"}}',
    '{"name": "run_tests", "arguments": {"path": "tests/cache/test_block.py", "verbose": true}}',
)
CODE = """\
120  def allocate(self, seq: Sequence) -> None:
121      h = -1
122      for i in range(seq.num_blocks):
123          token_ids = seq.block(i)
124          h = self.compute_hash(token_ids, h) if len(token_ids) == self.block_size else -1
125          block_id = self.hash_to_block_id.get(h, -1)
126          if block_id == -1 or self.blocks[block_id].token_ids != token_ids:
127              cache_miss = True
128          if cache_miss:
129              block = self._allocate_block(self.free_block_ids[0])
130          else:
131              seq.num_cached_tokens += self.block_size  # 已缓存 ✓
132
133  def deallocate(self, seq: Sequence) -> None:
134      for block_id in reversed(seq.block_table):
135          block = self.blocks[block_id]
136          block.ref_count -= 1
137          if block.ref_count == 0:
138              self._deallocate_block(block_id)
"""
RESULTS = (
    CODE,
    "patched 1 file: src/cache/block.py (+2 −0)\n",
    "..............................\n30 passed in 1.84s 🎉\n",
)


class Words:
    """A toy tokenizer: words with their leading space, runs of blanks, single symbols; wide characters "
    "in byte halves."""

    def __init__(self) -> None:
        self.table: list[bytes] = []
        self._ids: dict[bytes, int] = {}

    def add(self, data: bytes) -> int:
        if data not in self._ids:
            self._ids[data] = len(self.table)
            self.table.append(data)
        return self._ids[data]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in re.findall(r"<\|\w+\|>|</?tool_\w+>| ?[A-Za-z]{1,7}|\n+| +|\d|.", text):
            data = piece.encode()
            if len(data) > 3 and not data.isascii():
                ids += [self.add(data[:2]), self.add(data[2:])]
            else:
                ids.append(self.add(data))
        return ids

    def bytes_of(self, token: int) -> bytes:
        return self.table[token] if 0 <= token < len(self.table) else b""


class Script:
    """The stream's columns under construction."""

    def __init__(self, words: Words) -> None:
        self.words = words
        self.messages: list[dict[str, Any]] = []
        self.columns: dict[str, list[int]] = {name: [] for name in ("ids", "role", "generated", "turn", "message")}

    def say(self, text: str, role: Role, turn: int, *, generated: bool = False) -> None:
        ids = self.words.encode(text)
        self.columns["ids"] += ids
        for name, value in (
            ("role", int(role)),
            ("generated", int(generated)),
            ("turn", turn),
            ("message", len(self.messages) - 1),
        ):
            self.columns[name] += [value] * len(ids)

    def message(self, role: str, parts: list[tuple[str, Role]], turn: int) -> None:
        self.messages.append({"role": role, "content": "".join(text for text, _ in parts)})
        written = role == "assistant"
        self.say(f"<|im_start|>{role}\n", Role.STRUCTURE, turn)
        for text, part in parts:
            self.say(text, part, turn, generated=written)
        self.say("<|im_end|>", Role.STRUCTURE, turn, generated=written)
        self.say("\n", Role.STRUCTURE, turn)


def script(words: Words, turns: int) -> Script:
    """A repair session of `turns` assistant turns."""
    out = Script(words)
    out.message("system", [(SYSTEM, Role.SYSTEM)], 0)
    out.message("user", [(ASK, Role.USER)], 0)
    for turn in range(turns):
        call, result = CALLS[turn % 3], RESULTS[turn % 3]
        parts = [(THOUGHTS[turn % 4] + "\n", Role.CONTENT)]
        last = turn == turns - 1
        if not last:
            parts += [
                ("<tool_call>\n", Role.STRUCTURE),
                (call, Role.ARGUMENT_VALUE),
                ("\n</tool_call>", Role.STRUCTURE),
            ]
        out.message("assistant", parts, turn)
        if not last:
            out.message("tool", [(f"<tool_response>\n{result}</tool_response>", Role.TOOL_RESULT)], turn + 1)
    return out


def stream_of(out: Script, count: int | None = None) -> dict[str, np.ndarray]:
    """The stream's arrays, cut at `count` tokens."""
    dtypes = {"ids": "<i4", "role": "|u1", "generated": "|u1", "turn": "<i4", "message": "<i4"}
    return {name: np.array(values[:count], dtypes[name]) for name, values in out.columns.items()}


def lane_rows(
    stream: dict[str, np.ndarray], vocabulary: int, mean: float, seed: int, tps: float = 640.0
) -> dict[str, np.ndarray]:
    """Columns of ROWS for the whole stream, from position 1 on: KL that grows with depth, flips where it is large."""
    n = len(stream["ids"]) - 1
    rng = np.random.default_rng(seed)
    depth = np.linspace(0.5, 1.5, n)
    kl = (rng.gamma(0.22, 1.0, n) / 0.22 * mean * depth).astype("<f4")
    flip = rng.random(n) < np.clip(kl * 0.55, 0, 0.85)
    ids = stream["ids"][1:]
    top = rng.integers(0, vocabulary, (n, 4)).astype("<i4")
    top[:, 0] = np.where(flip, top[:, 0], ids)
    top[:, 1] = np.where(flip, ids, top[:, 1])
    first = np.clip(0.92 - kl * 1.2 - rng.random(n) * 0.25, 0.2, 0.99)
    shares = np.stack([first, (1 - first) * 0.6, (1 - first) * 0.25, (1 - first) * 0.1], 1)
    return {
        "kl": kl,
        "kl_low": (kl * np.float32(0.97)).astype("<f4"),
        "tv": np.sqrt(kl / 2).clip(0, 1).astype("<f4"),
        "tv_high": np.sqrt(kl / 2).clip(0, 1).astype("<f4"),
        "rank": np.where(flip, rng.integers(2, 9, n), 1).astype("<i4"),
        "logprob": np.log(np.where(flip, shares[:, 1], shares[:, 0])).astype("<f4"),
        "top_ids": top,
        "top_logprobs": np.log(shares).astype("<f4"),
        "ties": np.zeros(n, "|u1"),
        "valid": np.ones(n, "|u1"),
        "seconds": (np.arange(1, n + 1) / tps).astype("<f4"),
    }


def continuation(words: Words, count: int, seed: int, tps: float) -> Columns:
    """A free continuation of some greedy tokens."""
    text = " The change is small and covered by a test. I would also watch the pool's size under load, since a leak "
    text += "would show there first.\n"
    ids = (words.encode(text) * (count // 10 + 1))[:count]
    rng = np.random.default_rng(seed)
    out = Columns("continuation", 0)
    out.append(0, {
        "ids": np.array(ids, "<i4"),
        "logprobs": np.log(rng.uniform(0.3, 1, count)).astype("<f4"),
        "seconds": (np.arange(1, count + 1) / tps).astype("<f4"),
    })  # fmt: skip
    return out


def trace_reader(stream: dict[str, np.ndarray], vocabulary: int):
    """A `state.trace` that makes its rows up from the position, heads of 8."""

    def read(first: int, stop: int) -> dict[str, np.ndarray]:
        n = stop - first
        rng = np.random.default_rng(first)
        heads = rng.integers(0, vocabulary, (n, 8)).astype("<i4")
        heads[:, 0] = stream["ids"][first:stop]
        shares = np.array([0.71, 0.16, 0.06, 0.03, 0.01, 0.005, 0.003, 0.002])
        out = {name: np.zeros(n, column.dtype) for name, column in TRACE.items() if not column.per}
        out |= {"k": np.full(n, 8, "|u1"), "entropy": rng.uniform(0.05, 2, n).astype("<f4"), "valid": np.ones(n, "|u1")}
        out |= {"head_ids": heads.reshape(-1), "head_logprobs": np.tile(np.log(shares), n).astype("<f4")}
        return out | {"sample_ids": np.zeros(0, "<i4"), "sample_logprobs": np.zeros(0, "<f4")}

    return read


def make_state(
    turns: int = 14,
    specs: tuple[str, ...] = SPECS,
    *,
    count: int | None = None,
    tail: int = 128,
    floor: float | None = 0.0021,
) -> SessionState:
    """A finished session: a reference and one lane for each SPEC, all measured to the end."""
    words = Words()
    out = script(words, turns)
    while count is not None and len(out.columns["ids"]) < count:
        more = script(words, turns)
        shift, turn = len(out.messages), max(out.columns["turn"]) + 1
        out.messages += more.messages
        for name, values in more.columns.items():
            add = shift if name == "message" else turn if name == "turn" else 0
            out.columns[name] += [value + add for value in values]
    stream = stream_of(out, count)
    tails = [continuation(words, tail, seed, 41.0 + 23 * seed) for seed in range(len(specs) + 1)]
    vocabulary, n = len(words.table), len(stream["ids"])
    rows = Columns("rows", 1, REFERENCE_COLUMNS)
    rows.append(1, lane_rows(stream, vocabulary, 0.0, 0))
    made = {"model_name": "smollm2-135m"}
    measured = {"prefill_tokens": n, "prefill_seconds": n / 702, "decode": {"median_tps": 63.4}}
    reference = LaneState(
        LaneRecord(
            1, "reference", "reference", Configuration().to_json(), status="done", manifest=made, stats=measured
        ),
        rows,
        tails[0],
        entropy=np.random.default_rng(5).gamma(0.6, 0.7, n - 1).astype(np.float32),
    )  # fmt: skip
    lanes = [reference]
    for number, spec in enumerate(specs):
        columns = Columns("rows", 1)
        columns.append(1, lane_rows(stream, vocabulary, MEANS[number % len(MEANS)], 10 + number))
        record = LaneRecord(number + 2, spec.partition(":")[2], "lane", parse_spec(spec).to_json(), status="done")
        lanes.append(LaneState(record, columns, tails[number + 1]))
    return SessionState(
        title="repo-fix-07",
        session={"messages": out.messages},
        facts={},
        stream=stream,
        lanes=lanes,
        token_bytes=words.bytes_of,
        trace=trace_reader(stream, vocabulary),
        floor={"value": floor, "rows": []} if floor is not None else None,
        version=1,
    )


def set_status(lane: LaneState, status: str, **fields: Any) -> None:
    """Another status for a lane's record."""
    lane.record = replace(lane.record, status=status, **fields)


def rewind(lane: LaneState, rows: int) -> dict[str, np.ndarray]:
    """Take a lane back to its first `rows` rows, running; gives all its rows, so that `grow` can bring them back."""
    names = tuple(lane.rows._arrays)
    everything = {name: lane.rows.column(name).copy() for name in names}
    lane.rows = Columns("rows", 1, names)
    lane.rows.append(1, {name: values[:rows] for name, values in everything.items()})
    lane.continuation = Columns("continuation", 0)
    lane.phase = "prefill" if rows else "loading"
    set_status(lane, "running")
    return everything


def grow(lane: LaneState, everything: dict[str, np.ndarray], rows: int) -> None:
    """Append the next rows."""
    start = len(lane.rows)
    stop = min(start + rows, len(everything["valid"]))
    if stop > start:
        lane.rows.append(1 + start, {name: values[start:stop] for name, values in everything.items()})


class FakeRunner:
    """A runner that holds a state and notes what it is asked for."""

    def __init__(
        self, state: SessionState | None = None, *, busy: bool = False, message: str = "", missing: str = ""
    ) -> None:
        self.state = state
        self.busy = busy
        self.message = message
        self.missing = missing
        self.asked: list[tuple[str, Any]] = []

    def open_lane(self, configuration: Configuration) -> int | None:
        self.asked.append(("open", configuration))
        assert self.state is not None
        lane = max(lane.record.id for lane in self.state.lanes) + 1
        record = LaneRecord(lane, configuration.to_line().partition(":")[2], "lane", configuration.to_json())
        self.state.lanes.append(LaneState(record, Columns("rows", 1), Columns("continuation", 0)))
        self.state.version += 1
        return lane

    def cancel(self, lane_id: int) -> None:
        self.asked.append(("cancel", lane_id))

    def retry(self, lane_id: int) -> None:
        self.asked.append(("retry", lane_id))

    def close(self) -> None:
        self.asked.append(("close", None))


VLLM = "vllm:weights=bf16,kv=fp8"
ENGINE_SPECS = (
    VLLM,
    "llamacpp:weights=Q4_K_M,kv=q8_0",
    "vllm:weights=bf16,attn=FLASHINFER",
    "transformers:weights=bf16,kv=int8,kv_group=64",
    "llamacpp:weights=Q3_K_M,kv=q4_0",
    "server:url=http://127.0.0.1:8000,dialect=vllm",
)
RUNS = "divergence without the drafter, acceptance and speed with it"
ACCEPTANCE = acceptance([4] * 40, [2, 3] * 20)


def effective(engine: str, **values: Any) -> dict[str, Any]:
    """A manifest as an engine leaves it."""
    usual = {"engine": engine, "device": "cpu", "threads": 2, "chunk": 512, "logits": "full", "engine_notes": []}
    return {**usual, **values}


def engine_state(turns: int = 14) -> SessionState:
    """Lanes of every engine, 2 to 7: bounded, Q4_K_M, invalid, without effect, severe, and a speculating server."""
    state = make_state(turns, ENGINE_SPECS)
    lanes = state.lanes
    made = effective(
        "transformers", version="5.24.0", weights="bf16", kv="bf16", attn="sdpa", model_name="smollm2-135m"
    )
    set_status(lanes[0], "done", name="bf16", manifest=made)
    bound(lanes[1], top=256, version="0.32.0", weights="bf16", kv="fp8", attn="CPU_ATTN")
    read = effective("llamacpp", version="0.3.36", weights="Q4_K_M", kv="q8_0", attn="on")
    set_status(lanes[2], "done", name="engine llamacpp · weights Q4_K_M · kv q8_0", manifest=read)
    reason = "attn: asked for FLASHINFER, runs CPU_ATTN"
    read = effective("vllm", version="0.32.0", weights="bf16", kv="auto", attn="CPU_ATTN", differs=[reason])
    set_status(lanes[3], "invalid", name="engine vllm · attn FLASHINFER", reason=reason, manifest=read)
    read = effective("transformers", version="5.24.0", weights="bf16", kv="int8", attn="sdpa")
    set_status(lanes[4], "done", name="kv int8 · kv_group 64", manifest=read, stats={"no_effect": "bf16"})
    rows = lanes[5].rows
    rows.column("kl")[:] += np.float32(1.4)
    read = effective("llamacpp", version="0.3.36", weights="Q3_K_M", kv="q4_0", attn="on")
    set_status(lanes[5], "done", name="engine llamacpp · weights Q3_K_M · kv q4_0", manifest=read)
    read = effective("server", dialect="vllm", version="0.32.0", url="http://127.0.0.1:8000", runs=RUNS, draft="ngram")
    read |= {"device": None, "threads": None, "chunk": None, "logits": "top-20"}
    bound(lanes[6], top=20, **read)
    set_status(lanes[6], "done", name="engine server", stats={"decode": {"median_tps": 88.0, "acceptance": ACCEPTANCE}})
    return state


def bound(lane: LaneState, top: int, **values: Any) -> None:
    """Make a lane one that gives bounds only: no more than its own `top` ids."""
    rows = lane.rows
    for name in ("kl", "kl_low"):
        rows.column(name)[:] *= np.float32(0.7)
    rows.column("kl_low")[:] = rows.column("kl")
    rows.column("tv_high")[:] = np.minimum(1, rows.column("tv") * 1.4 + 0.01)
    missing = np.flatnonzero(rows.column("rank") > 1)[::2]  # the reference's first choice is not among them
    rows.column("rank")[missing] = top + 1
    rows.column("top_ids")[missing, 2:] = -1  # fewer ids than columns
    rows.column("top_logprobs")[missing, 2:] = -np.inf
    engine = str(lane.record.configuration["engine"])
    manifest = {**effective(engine), "logits": f"top-{top}", **values}
    name = f"engine {engine} · kv fp8"
    lane.record = replace(lane.record, name=name, estimator="bounded", manifest=manifest)
