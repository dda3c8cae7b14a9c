"""The tokenizer of a model folder as GGUF metadata.

GGUF names its pre-tokenizer by a word. It is found by what tokenizer.json says, never guessed: another word would split
text differently, and every token after it would be another model's input.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workbench.errors import ConfigurationError, ModelError
from workbench.worker.llama.writer import U32
from workbench.worker.quant.gguf_tokenizer import CONTROL, PRE_TOKENIZERS, USER_DEFINED

NORMAL, UNUSED = 1, 5  # GGUF token types, beside those of `gguf_tokenizer`
OTHERWISE = "Give the publisher's own file: model=FILE.gguf,weights=file."


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object, empty where there is no such file. Raises ModelError."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path.name} is damaged: {error}", where=str(path.parent)) from error
    if not isinstance(found, dict):
        raise ModelError(f"{path.name} is no JSON object", where=str(path.parent))
    return found


def tokenizer_metadata(folder: Path, config: dict[str, Any], width: int) -> dict[str, Any]:
    """The `tokenizer.*` entries for logits of `width` ids. A folder without tokenizer.json gives a file without one.

    Raises ConfigurationError for a kind of tokenizer that is not known here, ModelError for damage.
    """
    definition = read_object(folder / "tokenizer.json")
    if not definition:
        return {"tokenizer.ggml.model": "none"}
    settings = read_object(folder / "tokenizer_config.json")
    try:
        word = pre_tokenizer_word(definition, str(folder))
        tokens, types = _tokens(definition, width)
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in definition["model"]["merges"]]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ModelError(f"tokenizer.json is damaged: {error!r}", where=str(folder)) from error
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": word,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
    }
    ids = {token: index for index, token in enumerate(tokens)}
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    for ours, theirs in named.items():
        if (token := _token_id(settings.get(f"{ours}_token"), config.get(f"{ours}_token_id"), ids)) is not None:
            metadata[f"tokenizer.ggml.{theirs}_token_id"] = U32(token)
    metadata["tokenizer.ggml.add_space_prefix"] = False
    metadata["tokenizer.ggml.add_bos_token"] = _adds_bos(definition, settings)
    if template := _template(folder, settings):
        metadata["tokenizer.chat_template"] = template
    return metadata


def pre_tokenizer_word(definition: dict[str, Any], where: str) -> str:
    """GGUF's word for the pre-tokenizer of a tokenizer.json. Raises ConfigurationError."""
    model, shape = definition["model"], _shape(definition.get("pre_tokenizer"))
    normalizer = (definition.get("normalizer") or {}).get("type")
    for word, (how, pattern) in PRE_TOKENIZERS.items():
        expected = {
            "gpt2": [("ByteLevel", True)],
            "digits": [("Digits", True), ("ByteLevel", True)],
            "pattern": [("Split", pattern), ("ByteLevel", False)],
        }[how]
        same = shape == expected and normalizer == ("NFC" if word == "qwen2" else None)
        if model.get("type") == "BPE" and same and bool(model.get("ignore_merges")) == (word == "llama-bpe"):
            return word
    raise ConfigurationError(
        f"its tokenizer ({model.get('type')}, {' + '.join(name for name, _ in shape) or 'no pre-tokenizer'}) has no"
        " name in GGUF that is known here",
        where=where,
        next=f"Known: byte-level BPE with {', '.join(PRE_TOKENIZERS)}. {OTHERWISE}",
    )


def _shape(pre_tokenizer: Any) -> list[tuple[str, Any]]:
    """The steps of a pre-tokenizer, each with what matters of it."""
    if not pre_tokenizer:
        return []
    if pre_tokenizer["type"] == "Sequence":
        return [step for part in pre_tokenizer["pretokenizers"] for step in _shape(part)]
    kind = pre_tokenizer["type"]
    match kind:
        case "ByteLevel":
            usual = not pre_tokenizer.get("add_prefix_space")
            return [(kind, bool(pre_tokenizer.get("use_regex", True)) if usual else "prefix")]
        case "Digits":
            return [(kind, bool(pre_tokenizer.get("individual_digits")))]
        case "Split":
            plain = pre_tokenizer.get("behavior") == "Isolated" and not pre_tokenizer.get("invert")
            return [(kind, pre_tokenizer["pattern"].get("Regex") if plain else None)]
        case _:
            return [(kind, None)]


def _tokens(definition: dict[str, Any], width: int) -> tuple[list[str], list[int]]:
    """Text and type of each id up to `width`; ids that no token has are unused ones."""
    tokens = [f"[PAD{index}]" for index in range(width)]
    types = [UNUSED] * width
    for token, index in definition["model"]["vocab"].items():
        tokens[index], types[index] = token, NORMAL
    for entry in definition.get("added_tokens") or []:
        tokens[entry["id"]] = entry["content"]
        types[entry["id"]] = CONTROL if entry["special"] else USER_DEFINED
    return tokens, types


def _token_id(named: Any, number: Any, ids: dict[str, int]) -> int | None:
    text = named.get("content") if isinstance(named, dict) else named
    if isinstance(text, str) and text in ids:
        return ids[text]
    first = number[0] if isinstance(number, list) and number else number
    return first if isinstance(first, int) else None


def _adds_bos(definition: dict[str, Any], settings: dict[str, Any]) -> bool:
    """Whether this tokenizer puts its first control token in front by itself."""
    processor = definition.get("post_processor") or {}
    steps = processor.get("processors") or [processor]
    first = [step["single"][0] for step in steps if step.get("type") == "TemplateProcessing" and step.get("single")]
    return bool(settings.get("add_bos_token")) or any("SpecialToken" in item for item in first)


def _template(folder: Path, settings: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    written = settings.get("chat_template")
    return written if isinstance(written, str) else None
