"""A reference that another machine recorded: whether it is one for this model and this session, and if not, why.

Distributions over other tokens, of another prompt or of a broken run cannot be compared with; each of these is told
apart, with the first place where they part.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from workbench.config.lane import Configuration, from_json
from workbench.errors import ConfigurationError, SavedSessionError
from workbench.session.script import Session
from workbench.session.script import from_json as session_from_json
from workbench.session.template import Rendered, Renderer
from workbench.store.exchange import (
    Exchange,
    export_reference,
    read_exchange,
    template_checksums,
    vocabulary_checksums,
)
from workbench.store.saved import SavedSession

PADDING_MASS = 1e-3
"""More probability than this on ids that the tokenizer does not have: the trace is of other distributions."""
LOW_ENTROPY = 0.05
"""Mean entropy in nats a token, under which a text repeats itself and any lane agrees with it."""


def reference_configuration(file: Exchange, model: str) -> Configuration:
    """How the reference was recorded, on this machine's `model`."""
    return from_json({**file.record.configuration, "model": model})


def session_of(path: Path) -> tuple[Session, Rendered]:
    """The session and token stream in the file; without text the session has no messages. Raises SavedSessionError."""
    with SavedSession.open(path) as saved:
        held, stream, facts = saved.session, saved.stream(), saved.facts
    facts = {name: facts[name] for name in facts if name not in ("exchange", "floor", "title")}
    known = bool(held.get("messages"))
    session = session_from_json(held) if known else Session(str(held.get("id") or "reference"), ())
    return session, Rendered(stream, "", facts)


def check_reading(file: Exchange, renderer: Renderer) -> None:
    """Raise ConfigurationError where this model's tokenizer or template is not the one the reference was made with."""
    where = f"reference {file.path}"
    own = vocabulary_checksums(renderer.tokenizer.tokens_bytes(range(renderer.tokenizer.vocabulary)))
    if not np.array_equal(own, file.vocabulary):
        raise ConfigurationError(
            _vocabulary_difference(own, file.vocabulary, renderer),
            where=where,
            next="Use the model that the reference was recorded with: --model.",
        )
    lines = template_checksums(renderer.template.source)
    if lines != file.template:
        at = next(
            (i for i, pair in enumerate(zip(lines, file.template, strict=False)) if pair[0] != pair[1]),
            min(len(lines), len(file.template)),
        )
        text = renderer.template.source.splitlines()
        shown = repr(text[at][:60]) if at < len(text) else "the end"
        raise ConfigurationError(
            f"the chat template is another one: line {at + 1} here is {shown}, and differs there",
            where=where,
            next="Use the template that the reference was recorded with, or record a reference of your own.",
        )


def check_stream(file: Exchange, ours: NDArray[np.int32], theirs: NDArray[np.int32], renderer: Renderer) -> None:
    """Raise ConfigurationError where the session renders to other tokens (n,) than the reference was recorded over."""
    if np.array_equal(ours, theirs):
        return
    where, shorter = f"reference {file.path}", min(len(ours), len(theirs))
    differ = np.flatnonzero(ours[:shorter] != theirs[:shorter])
    if not len(differ):
        longer = "the reference" if len(theirs) > len(ours) else "this session"
        raise ConfigurationError(
            f"the reference covers another window: {len(theirs):,} tokens, this session has {len(ours):,};"
            f" the first {shorter:,} are the same and {longer} goes on",
            where=where,
            next="Leave SESSION out to use the one in the file, or cut yours to the same turns.",
        )
    at = int(differ[0])

    def shown(ids: NDArray[np.int32]) -> str:
        return f"{int(ids[at])} {renderer.tokenizer.token_bytes(int(ids[at])).decode('utf-8', 'replace')!r}"

    raise ConfigurationError(
        f"the reference is of another session: token {at:,} is {shown(theirs)} there and {shown(ours)} here",
        where=where,
        next="Leave SESSION out to use the one in the file.",
    )


def check_trace(file: Exchange) -> list[str]:
    """Sentences about what weakens the reference. Raises ConfigurationError where it cannot be one."""
    where = f"reference {file.path}"
    padding = float(file.record.manifest.get("padding_mass_max") or 0)
    if padding > PADDING_MASS:
        raise ConfigurationError(
            f"its engine put up to {padding:.1%} of the probability on ids that the tokenizer does not have"
            " (a padded vocabulary), which was cut off",
            where=where,
            next="Record it with an engine that masks those ids.",
        )
    entropies: list[NDArray[np.float64]] = []
    with SavedSession.open(file.path) as saved:
        generated = saved.stream()["generated"] == 1
        for first, rows in saved.pieces(file.record.id, "trace"):
            finite = (rows["valid"] == 1) & np.isfinite(rows["logprob"]) & np.isfinite(rows["entropy"])
            if not finite.all():
                at = first + int(np.flatnonzero(~finite)[0])
                raise ConfigurationError(
                    f"its logits were not finite (NaN or infinite), first at position {at:,}",
                    where=where,
                    next="Record it again: its engine computed nonsense there.",
                )
            wanted = generated[first : first + len(finite)]
            entropies.append(rows["entropy"][wanted].astype(np.float64))
    found = np.concatenate(entropies) if entropies else np.zeros(0)
    notes: list[str] = []
    if len(found) and found.mean() < LOW_ENTROPY:
        notes.append(
            f"the reference is hardly ever in doubt ({found.mean():.3f} nats a token, as where a text repeats itself):"
            " any lane agrees with it, and agreement says little"
        )
    return notes


def load_reference(path: Path) -> Exchange:
    """The file, checked for itself. Raises SavedSessionError."""
    if not path.is_file():
        raise SavedSessionError("there is no such file", where=str(path))
    return read_exchange(path)


def export_from(path: Path, folder: Path, target: Path, *, text: bool) -> None:
    """Write the reference of a saved session, recorded with the model in `folder`. Raises SavedSessionError."""
    renderer = Renderer.load(folder)
    tokens = renderer.tokenizer.tokens_bytes(range(renderer.tokenizer.vocabulary))
    with SavedSession.open(path) as saved:
        export_reference(saved, target, tokens, renderer.template.source, text=text)


def _vocabulary_difference(own: NDArray[np.uint32], theirs: NDArray[np.uint32], renderer: Renderer) -> str:
    shorter = min(len(own), len(theirs))
    differ = np.flatnonzero(own[:shorter] != theirs[:shorter])
    if not len(differ):
        what = "more" if len(theirs) > len(own) else "fewer"
        return (
            f"its vocabulary is padded otherwise: {len(theirs):,} ids there, {len(own):,} here;"
            f" the first {shorter:,} are the same, and it has {abs(len(theirs) - len(own)):,} {what}"
        )
    at = int(differ[0])
    mine = renderer.tokenizer.token_bytes(at).decode("utf-8", "replace")
    if len(own) == len(theirs) and np.array_equal(np.sort(own), np.sort(theirs)):
        there = int(np.flatnonzero(theirs == own[at])[0])
        return (
            f"its vocabulary is the same {len(own):,} tokens in another order: id {at:,} is {mine!r} here,"
            f" which is id {there:,} there"
        )
    return (
        f"its tokenizer is another one: id {at:,} is {mine!r} here and something else there, as are"
        f" {len(differ) - 1:,} more of {shorter:,} ids"
    )
