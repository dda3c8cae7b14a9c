from __future__ import annotations

import pytest

from workbench.config.axes import check
from workbench.config.lane import parse_spec
from workbench.config.rules import keys_and_values
from workbench.errors import ConfigurationError


def test_a_pair_sets_keys_and_values_apart():
    assert keys_and_values("k8v4") == ("int8", "int4")
    assert keys_and_values("k16v2") == ("bf16", "int2")
    assert keys_and_values("int4") == ("int4", "int4")
    assert keys_and_values("q8_0/f16") == ("q8_0", "f16")


@pytest.mark.parametrize("kv", ["int2", "fp8", "k8v4", "k16v4", "k4v2", "int4,kv_keys=channel", "int4,kv_window=64"])
def test_schemes_pairs_and_their_own_keys_are_lanes(kv):
    check(parse_spec(f"transformers:kv={kv}"))


@pytest.mark.parametrize(
    ("kv", "word"),
    [
        ("k8v8", "alike"),
        ("k3v4", "cannot do kv=k3v4"),
        ("int8/int4", "llama.cpp's way"),
        ("bf16,kv_group=32", "no effect on kv=bf16"),
        ("bf16,kv_window=64", "no effect on kv=bf16"),
        ("k16v4,kv_keys=channel", "no effect on kv=k16v4"),
        ("int4,kv_keys=row", "kv_keys=row is not"),
        ("int4,kv_window=0", "kv_window=0 is not"),
    ],
)
def test_what_would_have_no_effect_or_cannot_be_is_refused(kv, word):
    with pytest.raises(ConfigurationError, match=word):
        check(parse_spec(f"transformers:kv={kv}"))
