from __future__ import annotations

import pytest

from workbench.config.axes import check
from workbench.config.lane import parse_spec
from workbench.config.schemes import SCHEMES, Recipe, check_widths, recipe
from workbench.errors import ConfigurationError


def test_a_recipe_takes_the_schemes_own_group_and_never_touches_the_head():
    assert recipe("w4a16-awq") == Recipe("w4a16-awq", "64", ("lm_head",))
    assert recipe("w8a16").group == "channel"
    assert recipe("w4a16", "32", ("down_proj", "lm_head")).ignore == ("lm_head", "down_proj")
    assert recipe("nvfp4a16", "16").group == "16"


@pytest.mark.parametrize(
    ("scheme", "group", "word"),
    [
        ("w3a16", "", "no weight scheme"),
        ("w4a16", "48", "48"),
        ("nvfp4a16", "32", "groups of 16"),
        ("fp8", "64", "an output"),
    ],
)
def test_what_a_scheme_has_not_is_refused_by_name(scheme, group, word):
    with pytest.raises(ConfigurationError, match=word):
        recipe(scheme, group)


def test_groups_that_do_not_divide_are_refused_with_those_that_do():
    widths = {"layers.0.q_proj": 576, "layers.0.down_proj": 1536}
    check_widths(recipe("w4a16", "64"), widths, "model")
    check_widths(recipe("w8a16"), widths, "model")
    with pytest.raises(ConfigurationError) as refused:
        check_widths(recipe("w4a16", "128"), widths, "model")
    assert "128 do not divide the 576 inputs of layers.0.q_proj" in refused.value.what
    assert refused.value.next == "Use 32|64|channel."
    with pytest.raises(ConfigurationError, match="another scheme"):
        check_widths(recipe("nvfp4a16"), {"layers.0.q_proj": 40}, "model")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_is_a_lane_of_transformers(scheme):
    assert check(parse_spec(f"transformers:weights={scheme}")).weights == scheme


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        ("weights=int8,w_group=64", "no effect on weights=int8"),
        ("weights=w4a16,w_calibration=dice", "reads no calibration text"),
        ("weights=nvfp4a16,w_group=64", "groups of 16"),
        ("weights=w4a16,w_group=65", "w_group=65"),
    ],
)
def test_keys_that_would_have_no_effect_are_refused(spec, word):
    with pytest.raises(ConfigurationError, match=word):
        check(parse_spec(f"transformers:{spec}"))
