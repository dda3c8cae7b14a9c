"""The tokenizer of a GGUF file as tokenizer.json, tokenizer_config.json and chat_template.jinja.

GGUF names its pre-tokenizer by a word and leaves the rules to the reader; the rules of the words that we know are here.
An unknown word is refused: text would be split differently and every token id after it would be another model's input.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workbench.errors import ModelError

CONTROL, USER_DEFINED = 3, 4  # GGUF token types

LLAMA3_PATTERN = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
PRE_TOKENIZERS: dict[str, tuple[str, str]] = {
    # word: (how digits and words are cut before byte-level encoding, pattern)
    "gpt-2": ("gpt2", ""),
    "smollm": ("digits", ""),
    "llama-bpe": ("pattern", LLAMA3_PATTERN),
    "qwen2": ("pattern", QWEN2_PATTERN),
}


def write_tokenizer(fields: dict[str, Any], folder: Path, context: int, where: str) -> dict[str, Any]:
    """Write the tokenizer's files into `folder`; returns facts (pre-tokenizer, tokens, merges). Raises ModelError."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    def value(name: str, default: Any = None) -> Any:
        field = fields.get(f"tokenizer.{name}")
        return default if field is None else field.contents()

    kind, word = value("ggml.model"), value("ggml.pre", "")
    if kind != "gpt2" or word not in PRE_TOKENIZERS:
        raise ModelError(
            f"tokenizer {kind!r} with pre-tokenizer {word!r} is not known here",
            where=where,
            next=f"Known: byte-level BPE with {', '.join(PRE_TOKENIZERS)}. Use the publisher's safetensors folder.",
        )
    tokens = _strings(fields["tokenizer.ggml.tokens"])
    merges = [tuple(merge.split(" ")) for merge in _strings(fields["tokenizer.ggml.merges"])]
    types = value("ggml.token_type", [1] * len(tokens))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens) or any(len(merge) != 2 for merge in merges) or len(types) != len(tokens):
        raise ModelError("the tokenizer's lists of tokens, merges and types do not fit together", where=where)
    # With `ignore_merges` a word that is a token as a whole is taken at once; Llama 3's own tokenizer does this.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=word == "llama-bpe"))  # pyright: ignore[reportArgumentType]
    how, pattern = PRE_TOKENIZERS[word]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=how != "pattern")
    if how == "digits":
        before = [pre_tokenizers.Digits(individual_digits=True), byte_level]
    elif how == "pattern":
        before = [pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level]
    else:
        before = [byte_level]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(before)  # pyright: ignore[reportAttributeAccessIssue]
    if word == "qwen2":
        tokenizer.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    added = [
        AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (CONTROL, USER_DEFINED)
    ]
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])
    tokenizer.save(str(folder / "tokenizer.json"))

    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {ours: value(f"ggml.{theirs}_token_id") for ours, theirs in named.items()}
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": bool(value("ggml.add_space_prefix", False)),
        **{f"{ours}_token": tokens[index] for ours, index in ids.items() if index is not None},
    }
    if template := value("chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    text = json.dumps(settings, indent=1, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    stop = {"bos_token_id": ids["bos"], "eos_token_id": ids["eos"], "pad_token_id": ids["pad"]}
    (folder / "generation_config.json").write_text(json.dumps(stop, indent=1), encoding="utf-8")
    return {
        "pre_tokenizer": word,
        "tokens": len(tokens),
        "merges": len(merges),
        "added_tokens": len(added),
        "add_bos": bool(value("ggml.add_bos_token", False)),
        "chat_template": bool(template),
        "built_by": "workbench, from the file's tokens, merges and pre-tokenizer word",
    }


def _strings(field: Any) -> list[str]:
    """The strings of an array field; its own `contents()` goes through one numpy scalar per byte count and is slow."""
    return [field.parts[index].tobytes().decode("utf-8") for index in field.data]
