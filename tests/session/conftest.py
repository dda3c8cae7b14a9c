"""A tiny byte-level tokenizer and the templates of several model families, written in our own words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from workbench.session.template import Renderer

SPECIAL = (
    "<|end|>", "<|im_start|>", "<|im_end|>", "<|begin|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>",
    "<|calls|>", "<|/calls|>", "<|call|>", "<|/call|>", "<|sep|>", "<|output|>", "<|/output|>", "<|eos|>",
)  # fmt: skip
ORDINARY = ("<tool_call>", "</tool_call>", "<think>", "</think>")

CHATML = """
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""

LLAMA3 = """
{{- bos_token -}}
{%- set system = '' -%}
{%- if messages[0].role == 'system' -%}
  {%- set system = messages[0].content | trim -%}{%- set messages = messages[1:] -%}
{%- endif -%}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' -}}
{%- if tools is not none -%}
  {{- 'Tools:\n' -}}
  {%- for t in tools -%}{{- t | tojson(indent=4) + '\n\n' -}}{%- endfor -%}
{%- endif -%}
{{- system + '<|eot_id|>' -}}
{%- for m in messages -%}
  {%- if m.role == 'tool' -%}
    {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' -}}
    {%- if m.content is mapping -%}{{- m.content | tojson -}}{%- else -%}{{- m.content -}}{%- endif -%}
    {{- '<|eot_id|>' -}}
  {%- elif 'tool_calls' in m -%}
    {%- if m.tool_calls | length != 1 -%}{{- raise_exception('one call at a time') -}}{%- endif -%}
    {%- set call = m.tool_calls[0].function -%}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' -}}
    {{- call.arguments | tojson -}}
    {{- '}<|eot_id|>' -}}
  {%- else -%}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}{%- endif -%}
"""

QWEN3 = """
{%- if tools -%}
  {{- '<|im_start|>system\n' -}}
  {%- if messages[0].role == 'system' -%}{{- messages[0].content + '\n\n' -}}{%- endif -%}
  {{- '# Tools\n<tools>' -}}
  {%- for t in tools -%}{{- '\n' -}}{{- t | tojson -}}{%- endfor -%}
  {{- '\n</tools><|im_end|>\n' -}}
{%- elif messages[0].role == 'system' -%}
  {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' -}}
{%- endif -%}
{%- set ns = namespace(last=0) -%}
{%- for m in messages -%}
  {%- set wrapped = m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>') -%}
  {%- if m.role == 'user' and not wrapped -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}
    {{- '<|im_start|>user\n' + m.content + '<|im_end|>\n' -}}
  {%- elif m.role == 'assistant' -%}
    {%- set content = m.content -%}{%- set thought = '' -%}
    {%- if m.reasoning_content is string -%}
      {%- set thought = m.reasoning_content -%}
    {%- elif '</think>' in content -%}
      {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') -%}
      {%- set content = content.split('</think>')[-1].lstrip('\n') -%}
    {%- endif -%}
    {{- '<|im_start|>assistant\n' -}}
    {%- if loop.index0 > ns.last and (loop.last or thought) -%}
      {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') -}}
    {%- else -%}
      {{- content -}}
    {%- endif -%}
    {%- for c in m.tool_calls or [] -%}
      {%- if (loop.first and content) or not loop.first -%}{{- '\n' -}}{%- endif -%}
      {{- '<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' -}}
      {%- if c.function.arguments is string -%}
        {{- c.function.arguments -}}
      {%- else -%}
        {{- c.function.arguments | tojson -}}
      {%- endif -%}
      {{- '}\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\n' -}}
  {%- elif m.role == 'tool' -%}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
    {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' -}}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""

MISTRAL = """
{%- if messages[0].role == 'system' -%}
  {%- set system = messages[0].content -%}{%- set rest = messages[1:] -%}
{%- else -%}
  {%- set rest = messages -%}
{%- endif -%}
{{- bos_token -}}
{%- for m in rest -%}
  {%- if m.role == 'user' -%}
    {%- if tools and loop.first -%}
      {{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' -}}
    {%- endif -%}
    {%- if loop.first and system is defined -%}
      {{- '[INST] ' + system + '\n\n' + m.content + '[/INST]' -}}
    {%- else -%}
      {{- '[INST] ' + m.content + '[/INST]' -}}
    {%- endif -%}
  {%- elif m.tool_calls is defined -%}
    {{- '[TOOL_CALLS] [' -}}
    {%- for c in m.tool_calls -%}
      {%- if c.id | length != 9 -%}{{- raise_exception('ids must have nine letters') -}}{%- endif -%}
      {%- set text = c.function | tojson -%}
      {{- text[:-1] + ', "id": "' + c.id + '"}' -}}
      {%- if not loop.last -%}{{- ', ' -}}{%- endif -%}
    {%- endfor -%}
    {{- ']' + eos_token -}}
  {%- elif m.role == 'assistant' -%}
    {{- ' ' + m.content | trim + eos_token -}}
  {%- elif m.role == 'tool' -%}
    {{- '[TOOL_RESULTS] {"content": ' + m.content | tojson + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' -}}
  {%- else -%}
    {{- raise_exception('only user, assistant and tool') -}}
  {%- endif -%}
{%- endfor -%}
"""

GEMMA = """
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}{{- raise_exception('System role not supported') -}}{%- endif -%}
{%- for m in messages -%}
  {%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{- raise_exception('Roles must alternate') -}}{%- endif -%}
  {%- set role = 'model' if m.role == 'assistant' else m.role -%}
  {{- '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\n' -}}{%- endif -%}
"""

TAGGED = """
{%- for t in tools or [] -%}{{- t | tojson + '\n' -}}{%- endfor -%}
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\n' -}}
{%- if m.content -%}{{- m.content.strip() -}}{%- endif -%}
{%- for c in m.tool_calls or [] -%}
<tool_call>{{ c.function.name }}
{% for key, value in c.function.arguments.items() %}
<arg_key>{{ key }}</arg_key><arg_value>{{ value if value is string else value | tojson }}</arg_value>
{% endfor %}
</tool_call>
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""

DEEPSEEK = """
{{- bos_token -}}
{%- set ns = namespace(after_user=false, system='') -%}
{%- for m in messages if m.role == 'system' -%}{%- set ns.system = ns.system + m.content -%}{%- endfor -%}
{{- ns.system -}}
{%- for t in tools or [] -%}{{- '\\n' + t.function | tojson -}}{%- endfor -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}
    {%- set ns.after_user = true -%}{{- '<|user|>' + m.content -}}
  {%- elif m.role == 'tool' -%}
    {{- '<|output|>' + m.content + '<|/output|>' -}}
  {%- elif m.role == 'assistant' -%}
    {%- if ns.after_user -%}{{- '<|assistant|></think>' -}}{%- endif -%}
    {%- set ns.after_user = false -%}
    {{- m.content -}}
    {%- if m.tool_calls is defined -%}
      {{- '<|calls|>' -}}
      {%- for c in m.tool_calls -%}
        {{- '<|call|>' + c.function.name + '<|sep|>' + c.function.arguments + '<|/call|>' -}}
      {%- endfor -%}
      {{- '<|/calls|>' -}}
    {%- endif -%}
    {{- '<|eos|>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and ns.after_user -%}{{- '<|assistant|></think>' -}}{%- endif -%}
"""

STYLES = {
    "deepseek": (DEEPSEEK, "<|eos|>"),
    "chatml": (CHATML, "<|im_end|>"),
    "llama3": (LLAMA3, "<|eot_id|>"),
    "qwen3": (QWEN3, "<|im_end|>"),
    "mistral": (MISTRAL, "</s>"),
    "gemma": (GEMMA, "<end_of_turn>"),
    "tagged": (TAGGED, "<|im_end|>"),
}
"""Style → its template and the token that ends a turn."""

MakeRenderer = Callable[..., Renderer]


def write_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL),
        show_progress=False,
    )
    text = 'the weather in Paris is sunny {"name": "get_weather", "arguments": {"city": "Paris"}} assistant user\n'
    tokenizer.train_from_iterator([text] * 4, trainer)
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in ORDINARY])
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder


@pytest.fixture
def make_renderer(tmp_path: Path, tiny_tokenizer: Path) -> MakeRenderer:
    def make(style: str = "chatml", template: str = "", end: str = "") -> Renderer:
        source, eos = STYLES[style]
        folder = tmp_path / f"model-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        (folder / "tokenizer.json").write_bytes((tiny_tokenizer / "tokenizer.json").read_bytes())
        (folder / "chat_template.jinja").write_text(template or source, encoding="utf-8")
        config = {"bos_token": "<s>", "eos_token": end or eos}
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        return Renderer.load(folder)

    return make
