"""What passes between the user's process and an engine's: one event, one small frozen dataclass.

Requests go down (Probe, Inspect, Start, Score, Feed, Generate, Windows, Convert, Quantize, Cancel, Stop), events come
up (Ready, Progress, Inspected, Started, Converted, Rows, Tokens, WindowRows, Scored, Generated, Failed). A field
annotated `Arrays` travels as raw arrays, everything else as JSON. `job` numbers the request that an event answers.
Positions are absolute token indices: row `i` is about the distribution that predicts token `i`, so the first scored
position of a stream is 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, get_args

from workbench.protocol.wire import Arrays, WireError


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask what this engine is and can do; answered by Ready."""

    job: int = 0


@dataclass(frozen=True, slots=True)
class Inspect:
    """Ask how the engine itself would read a prompt; weights need not be loaded. Answered by Inspected.

    `text`, where given, is a rendered prompt: it is tokenised with control tokens on and nothing added in front. Else
    `messages` and `tools` are shown through the engine's own template where the engine renders them itself (a server).
    """

    job: int
    configuration: dict[str, Any]
    model_path: str
    text: str = ""
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """Load a model in a configuration (`Configuration.to_json()`); what is already loaded and still fits is kept.

    `context` is the number of token positions the KV cache must hold. Answered by Started.
    """

    job: int
    configuration: dict[str, Any]
    model_path: str
    context: int


@dataclass(frozen=True, slots=True)
class Score:
    """Teacher forcing: run `arrays["ids"]` (int32, n) and send Rows for the positions `first` to n − 1.

    `record` makes a reference trace (`trace_seed`, adaptive head and samples); otherwise rows compare against the
    trace that Feed brings. On `path="decode"` each token where `arrays["single"]` (uint8, n) is 1 is fed by a pass of
    its own, as a served model feeds what it wrote; the tokens between go in chunks. The first `reuse` tokens are taken
    from the KV cache of a previous pass over the same ids where `first` lies beyond them, else they are run up to there
    first: chunks begin at `reuse`. Answered by Rows and at last Scored; the KV cache then holds all n tokens.
    """

    job: int
    first: int
    record: bool
    path: str = "prefill"
    trace_seed: int = 0
    reuse: int = 0
    arrays: Arrays = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Feed:
    """A piece of the reference trace (columns of `protocol.columns.TRACE`) from `first` on, for the Score `job`."""

    job: int
    first: int
    arrays: Arrays = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Generate:
    """Continue after the `keep` first tokens of the KV cache (all when −1) for `count` tokens; temperature 0 is greedy.

    `arrays["ids"]`, where given, replaces the context first. Generation stops early only at a token of `stop`.
    Answered by Tokens in batches of at most 50 ms and at last Generated.
    """

    job: int
    count: int
    keep: int = -1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[int, ...] = ()
    arrays: Arrays = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Windows:
    """Run the windows of the llama.cpp base file `path` (`protocol.logits_file`), each from an empty KV cache.

    `record` writes the file, of the windows `arrays["tokens"]` (int32, windows × n_ctx); otherwise the file's rows are
    compared with the model's. Answered by WindowRows and at last Scored.
    """

    job: int
    path: str
    record: bool = False
    arrays: Arrays = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Convert:
    """Make a model that an engine loads out of another. Answered by Converted.

    `transformers`: a GGUF file into a safetensors folder (weights, config, tokenizer, template). `llamacpp`: such a
    folder, or a GGUF file, into a GGUF file with the weights of `scheme` (F32, BF16, Q8_0, ...).
    """

    job: int
    source: str
    target: str
    scheme: str = ""


@dataclass(frozen=True, slots=True)
class Quantize:
    """Make quantized weights of the folder `source` in the folder `target`. Answered by Converted with the manifest.

    `recipe` is `config.schemes.Recipe.to_json()`, `facts` go into the manifest as they are. `arrays["windows"]` (int32,
    n × length) are the calibration text's token ids, n = 0 where the scheme needs none.
    """

    job: int
    source: str
    target: str
    recipe: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    arrays: Arrays = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Cancel:
    """Give up the job as soon as the current chunk or token is done; answered by its Failed with kind `cancelled`."""

    job: int


@dataclass(frozen=True, slots=True)
class Stop:
    """End the process."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine process is up: `engine` has name, version, build, python, device, and what it can do."""

    job: int
    engine: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Progress:
    """What the job does (`loading`, `converting`, `prefill`, `decode`, `generate`) and how far, `done` of `total`."""

    job: int
    phase: str
    done: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class Inspected:
    """`arrays["ids"]` (int32): the prompt's tokens as the engine makes them; empty where it cannot say.

    `facts`: template (its source, or null), template_from (whose it is), rendered (the text, where the engine rendered
    it itself), adds_bos (whether it puts a control token in front on its own), specials (name → text), vocabulary (how
    many ids), sampling (the sampling defaults that the engine would apply, by name).
    """

    job: int
    facts: dict[str, Any]
    arrays: Arrays = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Started:
    """The model is loaded: `effective` says what really runs, read back from the engine, not what was asked for.

    Of every engine: engine, version, build, weights, kv, attn, device, threads, chunk, estimator (`metrics.divergence`:
    which one its rows carry), logits (`full`, `top-K`, `trace ids`), notes (sentences), and draft where one was asked
    for. A value that cannot be read back is null, never a copy of what was asked for.
    """

    job: int
    effective: dict[str, Any]
    load_seconds: float


@dataclass(frozen=True, slots=True)
class Converted:
    """The folder is written; `facts` names the source's quantization, the architecture and the tensors' dtype."""

    job: int
    target: str
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rows:
    """Scored positions from `first` on: columns of `protocol.columns.TRACE` (reference) or `.ROWS` (lane)."""

    job: int
    first: int
    arrays: Arrays = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Tokens:
    """Generated tokens from the `first`-th on: columns of `protocol.columns.CONTINUATION`."""

    job: int
    first: int
    arrays: Arrays = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class WindowRows:
    """Rows of a base file from its row `first` on (64-bit). Scoring: kl, kl_whole, mass, nll, nll_base (float64), same
    (uint8), as `worker.window_rows.compared` defines them; recording: nll. Nats."""

    job: int
    first: int
    arrays: Arrays = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Scored:
    """Scoring is done. Seconds are of the engine's forward passes; our own work on the rows is `rows_seconds`.

    `stats`: prefill_tokens, prefill_seconds, decode_tokens, decode_seconds, rows_seconds, peak_memory_bytes,
    kv_cache_bytes, kv_workspace_bytes, kv_positions, memory_kind (`rss` or `device`), chunk; where the logits are
    padded beyond the tokenizer's ids, padding_mass_mean and padding_mass_max, the probability that was cut off. Of
    Windows: tokens, rows, forward_seconds, rows_seconds, file_seconds, bos (the id that stood in for the first token of
    each window, or null), rows_at_once, and memory as above.
    """

    job: int
    stats: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Generated:
    """Generation is done. `stats`: tokens, seconds, median_tps, first_token_seconds, stop_reason, peak_memory_bytes,
    kv_cache_bytes; with a drafter, acceptance (`metrics.acceptance`)."""

    job: int
    stats: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Failed:
    """The job could not be done; `kind` is `refused`, `failed` or `cancelled`. The process lives on where it can."""

    job: int
    kind: str
    what: str
    where: str = ""
    next: str = ""


Request = Probe | Inspect | Start | Score | Feed | Generate | Windows | Convert | Quantize | Cancel | Stop
Event = Ready | Progress | Inspected | Started | Converted | Rows | Tokens | WindowRows | Scored | Generated | Failed

_TYPES: dict[str, type] = {kind.__name__: kind for kind in (*get_args(Request), *get_args(Event))}


def encode(event: Request | Event) -> tuple[dict[str, Any], Arrays]:
    """The frame of an event: its header and its arrays."""
    header: dict[str, Any] = {"type": type(event).__name__}
    arrays: Arrays = {}
    for item in fields(event):
        value = getattr(event, item.name)
        if item.name == "arrays":
            arrays = value
        else:
            header[item.name] = value
    return header, arrays


def decode(header: dict[str, Any], arrays: Arrays) -> Request | Event:
    """The event of a frame. Raises WireError for an unknown type or for fields that do not belong to it."""
    values = dict(header)
    name = values.pop("type", None)
    kind = _TYPES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise WireError(f"unknown event type {name!r}")
    names = {item.name for item in fields(kind)}
    if "arrays" in names:
        values["arrays"] = arrays
    if unknown := values.keys() - names:
        raise WireError(f"{name} has no field {', '.join(sorted(unknown))}")
    if isinstance(values.get("stop"), list):
        values["stop"] = tuple(values["stop"])
    try:
        return kind(**values)
    except TypeError as error:
        raise WireError(f"{name}: {error}") from error
