"""A tiny model with a tokenizer and a template, and a session for it: whole runs in seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers in float32 with a byte-level tokenizer of 258 ids."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny") / "llama"
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=258, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
    model.generation_config.eos_token_id = None
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*SPECIAL])
    # A little training: a lane that predicts worse than blind guessing is taken for nonsense, and should be.
    turn = (
        "<|im_start|>user\nRun number {0}, please.<|im_end|>\n<|im_start|>assistant\n<tool_call>\n"
        '{{"name": "run", "arguments": {{"n": {0}}}}}\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n'
        "ok ok ok \x1b[31m\n</tool_response><|im_end|>\n<|im_start|>assistant\nNumber {0} ran: it said ok.<|im_end|>\n"
    )
    ids = torch.tensor([tokenizer.encode("".join(turn.format(n) for n in range(4))).ids])
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(40):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "eos_token": SPECIAL[1], "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    return folder


@pytest.fixture(scope="session")
def tiny_session(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A session of six turns with one tool: about 1,500 of the tiny tokenizer's tokens."""
    tool = {
        "type": "function",
        "function": {"name": "run", "description": "Run.", "parameters": {"type": "object", "properties": {}}},
    }
    messages: list[dict[str, object]] = [{"role": "system", "content": "You run commands."}]
    for turn in range(6):
        call = {"id": f"c{turn}", "type": "function", "function": {"name": "run", "arguments": f'{{"n": {turn}}}'}}
        messages += [
            {"role": "user", "content": f"Run number {turn}, please."},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{turn}", "content": "ok " * 12 + "\x1b[31m<|im_end|>"},
            {"role": "assistant", "content": f"Number {turn} ran: it said ok."},
        ]
    path = tmp_path_factory.mktemp("session") / "tiny.json"
    path.write_text(json.dumps({"id": "tiny", "tools": [tool], "messages": messages}))
    return path


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folders, empty, in a folder of the test's own."""
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path / "home"
