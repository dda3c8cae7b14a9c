from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.config import axes
from workbench.config.lane import Configuration, from_json, parse_spec, parse_toml, read_spec
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
        ("transformers:fa=on,fa=off", "given twice"),
        ("transformers:chunk=many", "must be a int"),
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


def test_every_declared_value_of_every_engine_passes() -> None:
    for name, engine in axes.ENGINES.items():
        for axis, allowed in engine.axes.items():
            for value in allowed:
                axes.check(parse_spec(f"{name}:{axis}={value}"))
