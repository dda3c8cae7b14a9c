"""A model's tokenizer as an engine uses it: exact ids, the bytes of each id, and where each token stands in the text.

Control tokens are parsed from the template's own text only; the same letters inside a message stay letters.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from workbench.errors import ModelError

Ints = NDArray[np.int64]
Span = tuple[int, int]
_START = "\U0010fffe"  # a noncharacter: the one added token of the copy that parses no control tokens


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids and the half-open character span of each in the text; parts of one character share its span."""

    ids: Ints
    starts: Ints
    stops: Ints
    kept_as_text: int = 0  # control-token literals in messages that were encoded as letters


@dataclass(frozen=True)
class Tokenizer:
    """`tokenizer.json` of a model folder and what its configuration files say of control tokens."""

    folder: Path
    definition: dict[str, Any]
    config: dict[str, Any]
    added: dict[int, str]  # control and other added tokens, parsed before anything else
    special: frozenset[int]
    ends: frozenset[int]  # tokens that end an assistant's turn
    _table: list[bytes] = field(repr=False)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read the tokenizer of a model folder. Raises ModelError."""
        definition = read_object(folder / "tokenizer.json")
        config = read_object(folder / "tokenizer_config.json", missing={})
        try:
            entries = cast(list[dict[str, Any]], definition.get("added_tokens") or [])
            added = {int(entry["id"]): str(entry["content"]) for entry in entries}
            special = frozenset(int(entry["id"]) for entry in entries if entry.get("special"))
            table = _byte_table(definition, added)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise ModelError(f"not a tokenizer: {error!r}", where=str(folder / "tokenizer.json")) from error
        by_text = {text: identity for identity, text in added.items()}
        ends = {by_text[text] for text in [token_text(config.get("eos_token"))] if text in by_text}
        for name in ("generation_config.json", "config.json"):
            value: Any = read_object(folder / name, missing={}).get("eos_token_id")
            listed = cast(list[Any], value if isinstance(value, list) else [value])
            ends.update(item for item in listed if isinstance(item, int))
        return cls(folder, definition, config, added, special, frozenset(ends), table)

    @property
    def vocabulary(self) -> int:
        """The number of ids, added tokens included; a model's logits may be padded beyond it."""
        return len(self._table)

    def token_bytes(self, identity: int) -> bytes:
        """The bytes that a token stands for; b"" for an id that the tokenizer does not know."""
        return self._table[identity] if 0 <= identity < len(self._table) else b""

    def tokens_bytes(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes of several tokens."""
        return [self.token_bytes(int(identity)) for identity in ids]

    @cached_property
    def hash(self) -> str:
        """sha256 of the id → bytes table, control tokens told apart from text."""
        digest = hashlib.sha256()
        for identity, data in enumerate(self._table):
            kind = 2 if identity in self.special else 1 if identity in self.added else 0
            digest.update(len(data).to_bytes(4, "little") + bytes([kind]) + data)
        return digest.hexdigest()

    def encode(self, text: str, data: Sequence[Span] = ()) -> Encoded:
        """Ids of a rendered text, equal to the plain encoding except where a control-token literal lies in `data`.

        `data` are sorted, disjoint character spans that came from messages. The stretch between two real control tokens
        around such a literal is encoded anew with control tokens off.
        """
        ids, starts, stops = self._run(self._plain, text)
        if not data or not self.added:
            return Encoded(ids, starts, stops)
        begins, ends = [span[0] for span in data], [span[1] for span in data]
        control = np.isin(ids, np.fromiter(self.added, np.int64))
        found = [int(index) for index in np.flatnonzero(control)]
        inside: set[int] = set()
        for i in found:
            # Some control tokens take the blanks beside them along; only their letters count. A literal that only
            # begins or ends in a message is no control token of the template either.
            token, low, high = self.added[int(ids[i])], int(starts[i]), int(stops[i])
            if (at := text.find(token, low, high)) >= 0:
                low, high = at, at + len(token)
            if bisect_right(ends, low) < bisect_left(begins, high):
                inside.add(i)
        if not inside:
            return Encoded(ids, starts, stops)
        walls = [-1, *(i for i in found if i not in inside), len(ids)]
        pieces: list[tuple[Ints, Ints, Ints]] = []
        for left, right in pairwise(walls):
            low, high = left + 1, right
            if any(i in inside for i in range(low, high)):
                begin = int(stops[left]) if left >= 0 else 0
                end = int(starts[right]) if right < len(ids) else len(text)
                pieces.append(self._letters(text[begin:end], begin))
            else:
                pieces.append((ids[low:high], starts[low:high], stops[low:high]))
            if right < len(ids):
                pieces.append((ids[right : right + 1], starts[right : right + 1], stops[right : right + 1]))
        joined = [np.concatenate(column) for column in zip(*pieces, strict=True)]
        return Encoded(joined[0], joined[1], joined[2], kept_as_text=len(inside))

    def literals(self, text: str) -> list[str]:
        """The control tokens whose letters stand in a text."""
        return [token for token in self.added.values() if token and token in text]

    def _letters(self, text: str, begin: int) -> tuple[Ints, Ints, Ints]:
        """Encode without control tokens; `begin` > 0 means that something precedes the text."""
        lead = _START if begin else ""
        ids, starts, stops = self._run(self._bare, lead + text)
        skip = len(lead)
        ids, starts, stops = ids[skip:], starts[skip:], stops[skip:]
        if np.isin(ids, np.fromiter(self.added, np.int64)).any():
            raise ModelError(
                "the tokenizer makes a control token out of letters in a message",
                where=str(self.folder / "tokenizer.json"),
                next="Remove the control token's letters from the session.",
            )
        return ids, starts + (begin - skip), stops + (begin - skip)

    def _run(self, engine: Any, text: str) -> tuple[Ints, Ints, Ints]:
        encoding = engine.encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids, np.int64)
        spans = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        return ids, spans[:, 0], spans[:, 1]

    @cached_property
    def _plain(self) -> Any:
        # The post-processor adds control tokens, which we never ask for, and trims blanks off the offsets.
        return _engine({**self.definition, "post_processor": None, "truncation": None, "padding": None}, self.folder)

    @cached_property
    def _bare(self) -> Any:
        start = {"id": self.vocabulary, "content": _START, "special": True, "normalized": False}
        start |= {"single_word": False, "lstrip": False, "rstrip": False}
        changed = {"added_tokens": [start], "post_processor": None, "truncation": None, "padding": None}
        return _engine({**self.definition, **changed}, self.folder)


def token_text(value: Any) -> str:
    """A token named in a configuration file, written as text or as an object with `content`."""
    if isinstance(value, dict):
        value = cast(dict[str, Any], value).get("content")
    return value if isinstance(value, str) else ""


def read_object(path: Path, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    """The JSON object in a file of a model folder; `missing` where there is no file. Raises ModelError."""
    try:
        value: Any = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        if missing is not None:
            return missing
        raise ModelError("the file is missing", where=str(path), next="The model folder is not whole.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"not JSON: {error}", where=str(path), next="The file may be damaged.") from error
    if not isinstance(value, dict):
        raise ModelError("not a JSON object", where=str(path), next="The file may be damaged.")
    return cast(dict[str, Any], value)


def _engine(definition: dict[str, Any], folder: Path) -> Any:
    from tokenizers import Tokenizer as Engine

    try:
        return Engine.from_str(json.dumps(definition, ensure_ascii=False))
    except Exception as error:  # the library raises plain Exception for any fault in the definition
        raise ModelError(f"not a tokenizer: {error}", where=str(folder / "tokenizer.json")) from error


def _byte_table(definition: dict[str, Any], added: dict[int, str]) -> list[bytes]:
    model = cast(dict[str, Any], definition["model"])
    entries: Any = model["vocab"]
    listed = cast(list[list[Any]], entries if isinstance(entries, list) else [])  # Unigram: texts with their scores
    vocabulary = {str(entry[0]): index for index, entry in enumerate(listed)} or cast(dict[str, int], entries)
    decoders = _decoders(definition.get("decoder"))
    byte_level = "ByteLevel" in decoders
    letters = _byte_letters()
    fallback = bool(model.get("byte_fallback"))
    blank = "Metaspace" in decoders or "Replace" in decoders
    table = [b""] * (max([*vocabulary.values(), *added, -1]) + 1)
    for text, identity in vocabulary.items():
        if byte_level and all(letter in letters for letter in text):
            table[identity] = bytes(letters[letter] for letter in text)
        elif fallback and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            table[identity] = bytes([int(text[3:5], 16)])
        else:
            table[identity] = (text.replace("▁", " ") if blank else text).encode("utf-8", "replace")
    for identity, text in added.items():
        table[identity] = text.encode()
    return table


def _decoders(value: Any) -> set[str]:
    if not isinstance(value, dict):
        return set()
    decoder = cast(dict[str, Any], value)
    nested = cast(list[Any], decoder.get("decoders") or [])
    return {str(decoder.get("type"))}.union(*(_decoders(item) for item in nested))


def _byte_letters() -> dict[str, int]:
    """Byte-level BPE writes printable Latin-1 bytes as themselves and the others as letters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(hidden)}
