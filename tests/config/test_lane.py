from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.config import axes
from workbench.config.lane import Configuration, from_json, parse_spec, parse_toml, read_spec
from workbench.config.machine import Accelerator
from workbench.errors import ConfigurationError

text = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=12).map(str.strip).filter(bool)
configurations = st.builds(
    Configuration,
    model=text,
    weights=st.sampled_from(["bf16", "fp32", "int8"]),
    kv=st.sampled_from(["bf16", "int8", "int4"]),
    path=st.sampled_from(["prefill", "decode"]),
    chunk=st.integers(1, 10_000),
    temperature=st.sampled_from([0.0, 0.7, 1.25]),
    seed=st.integers(-(2**31), 2**31),
    extra=st.dictionaries(st.sampled_from(["kv_group", "fa", "n_batch"]), text, max_size=2).map(
        lambda pairs: tuple(sorted(pairs.items()))
    ),
)


@given(configurations)
def test_every_printed_form_reads_back_to_the_same_configuration(configuration: Configuration) -> None:
    assert parse_spec(configuration.to_line()) == configuration
    assert parse_toml(configuration.to_toml()) == configuration
    assert from_json(configuration.to_json()) == configuration
    assert from_json(configuration.to_json()).key() == configuration.key()


def test_a_line_takes_unnamed_axes_from_its_base() -> None:
    base = Configuration(model="m", chunk=256)
    lane = parse_spec("transformers:kv=int4", base)
    assert (lane.model, lane.chunk, lane.kv, lane.weights) == ("m", 256, "int4", "bf16")


def test_a_quoted_value_may_hold_commas_and_quotes() -> None:
    assert parse_spec('transformers:model="a,b=\\"c\\""').model == 'a,b="c"'


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("", "is not a lane"),
        ("Transformers:kv=int8", "is not a lane"),
        ("transformers:kv", "is not key=value"),
        ("transformers:kv=", "has no value"),
        ("transformers:kv=int8,kv=int4", "given twice"),
        ("llamacpp:fa=on,attn=off", "given twice"),
        ("transformers:chunk=many", "must be a whole number"),
        ("transformers:chunk=0", "below 1"),
        ("transformers:path=sideways", "unknown"),
        ("transformers:temperature=-1", "not a temperature"),
        ("transformers:temperature=nan", "not a temperature"),
        ("transformers:top_p=0", "not in (0, 1]"),
        ('transformers:model="open', "is not key=value"),
        ('transformers:model="\\q"', "is not well quoted"),
    ],
)
def test_a_bad_line_says_what_is_wrong(spec: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says.replace("(", r"\(").replace("]", r"\]")):
        parse_spec(spec)


def test_a_bad_table_says_what_is_wrong(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigurationError, match="unknown key 'kvv'"):
        from_json({"kvv": "int8"})
    with pytest.raises(ConfigurationError, match="must be of type int"):
        from_json({"chunk": True})
    with pytest.raises(ConfigurationError, match="not TOML"):
        parse_toml("kv = ")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_spec(str(tmp_path / "absent.toml"))
    (tmp_path / "lane.toml").write_text('kv = "int4"\n')
    assert read_spec(str(tmp_path / "lane.toml")).kv == "int4"


@pytest.mark.parametrize(
    ("spec", "says", "works"),
    [
        ("transformers:kv=q8_0", "cannot do kv=q8_0", "bf16|fp32|int8|int4"),
        ("transformers:weights=nvfp4", "cannot do weights=nvfp4", "bf16|fp32|int8"),
        ("transformers:draft=dflash2", "cannot do draft=dflash2", "none"),
        ("nonesuch:kv=int8", "no engine 'nonesuch'", "transformers"),
        ("transformers:fa=on", "no key 'fa'", "kv_group"),
    ],
)
def test_a_value_that_an_engine_cannot_do_is_refused_with_what_works(spec: str, says: str, works: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        axes.check(parse_spec(spec))
    assert says in str(refused.value)
    assert works in refused.value.next


NEEDS = {"server": "url=http://127.0.0.1:1", "draft_model": "@m", "eagle3": "@m", "dflash": "@m", "dspark": "@m"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_declared_value_of_every_engine_passes(device: Accelerator) -> None:
    for name, engine in axes.ENGINES.items():
        for axis in engine.axes:
            for value in engine.values(axis, device):
                line = f"{name}:{axis}={value}{NEEDS.get(value, '')},{NEEDS.get(name, '')}".rstrip(",")
                configuration = parse_spec(line)
                if device == "cuda" and axis == "attn" and value == "TURBOQUANT":
                    configuration = parse_spec("vllm:attn=TURBOQUANT,kv=turboquant_k8v4")
                assert axes.refusal(configuration, device) is None


@pytest.mark.parametrize(
    ("spec", "device", "says", "works"),
    [
        ("vllm:kv=int4_per_token_head", "cpu", "computes nonsense", "auto|fp8"),
        ("vllm:attn=FLASHINFER", "cpu", "ignores it and runs CPU_ATTN", "auto|CPU_ATTN"),
        ("vllm:weights=int8_per_channel_weight_only", "cpu", "no effect", "checkpoint"),
        ("vllm:attn=FLASH_ATTN,kv=nvfp4", "cuda", "cannot read a KV cache of nvfp4", "attn=auto"),
        ("vllm:batch_invariant=on", "cpu", "no effect without an NVIDIA GPU", "Leave it out"),
        ("vllm:draft=eagle3", "cpu", "needs the drafter's weights", "eagle3@PATH"),
        ("vllm:width=4", "cpu", "no effect without a drafter", "name a draft"),
        ("llamacpp:kv=q8_0,fa=off", "cpu", "without flash attention", "q8_0/f16"),
        ("llamacpp:kv=int8", "cpu", "cannot do kv=int8", "q8_0"),
        ("llamacpp:kv=q8_0/int8", "cpu", "cannot do kv=q8_0/int8", "q8_0"),
        ("llamacpp:gpu_layers=9", "cpu", "no effect without a GPU", "Leave it out"),
        ("transformers:device=cuda", "cpu", "device=cuda is not here", "auto|cpu"),
        ("transformers:device=cpu:7", "cpu", "device=cpu:7 is not here", "auto|cpu"),
        ("vllm:device=auto:1", "cuda", "device=auto:1 is not here", "auto|cuda"),
        ("llamacpp:n_ubatch=many", "cpu", "is not a number above 0", "32"),
        ("vllm:logprobs=0", "cpu", "logprobs=0 is not auto, trace, full, a number above 0", "256"),
        ("vllm:kv_space=0.0", "cpu", "kv_space=0.0 is not a number of GiB above 0", "4"),
        ("vllm:kv_space=-1", "cpu", "kv_space=-1 is not a number of GiB above 0", "4"),
        ("vllm:gpu_memory=0.0", "cuda", "gpu_memory=0.0 is not a share of up to 1", "0.9"),
        ("vllm:tensor_parallel=0", "cpu", "tensor_parallel=0 is not a number above 0", "tensor_parallel="),
        ("server:", "cpu", "needs its address", "http"),
        ("server:url=ftp://x", "cpu", "is not", "http"),
        ("server:url=http://x,kv=fp8", "cpu", "cannot do kv=fp8", "served"),
    ],
)
def test_what_a_device_or_a_combination_forbids_is_refused_with_the_reason(
    spec: str, device: Accelerator, says: str, works: str
) -> None:
    refused = axes.refusal(parse_spec(spec), device)
    assert refused is not None
    assert says in str(refused)
    assert works in refused.next


def test_a_password_in_an_address_is_refused_and_not_repeated() -> None:
    refused = axes.refusal(parse_spec("server:url=http://me:secret@host:1/v1"))
    assert refused is not None and "holds a name or password" in str(refused)
    assert "secret" not in str(refused) and "key_env" in refused.next


def test_a_thousand_threads_are_refused() -> None:
    refused = axes.refusal(parse_spec("llamacpp:threads=9999"))
    assert refused is not None and "starve" in str(refused)
    assert axes.refusal(parse_spec("llamacpp:threads=2")) is None


def test_an_engine_has_defaults_and_a_name_of_its_own_for_an_axis() -> None:
    lane = parse_spec("llamacpp:fa=off", Configuration(kv="int4", extra=(("kv_group", "32"),)))
    assert (lane.weights, lane.kv, lane.attn, lane.extra) == ("BF16", "f16", "off", ())
    assert lane.to_line() == "llamacpp:weights=BF16,kv=f16,fa=off"
    assert axes.refusal(parse_spec("llamacpp:kv=q8_0/f16,fa=off"), "cpu") is None
    assert from_json({"engine": "vllm"}) == parse_spec("vllm:")
