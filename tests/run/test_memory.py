"""Estimates of what a lane takes follow what its engine really makes room for."""

from __future__ import annotations

import pytest

from workbench.config.lane import parse_spec
from workbench.errors import ConfigurationError
from workbench.run.memory import Shape, check_fits, estimate_bytes

SHAPE = Shape(parameters=135_000_000, layers=30, kv_heads=3, head_dim=64, vocabulary=49_152)
GIB = 1 << 30


@pytest.mark.parametrize("engine", ["transformers", "llamacpp"])
def test_a_chunk_beyond_the_session_takes_no_more_than_the_session(engine: str) -> None:
    whole, beyond = (estimate_bytes(parse_spec(f"{engine}:chunk={size}"), SHAPE, 805) for size in (805, 100_000))
    assert whole == beyond


def test_vllm_makes_room_for_what_it_is_told_to() -> None:
    assert estimate_bytes(parse_spec("vllm:chunk=100000"), SHAPE, 805) > 30 * GIB
    needed = estimate_bytes(parse_spec("vllm:kv_space=500"), SHAPE, 805)
    assert needed > 500 * GIB
    with pytest.raises(
        ConfigurationError, match=r"needs about 50\d\.\d GiB and 8\.0 GiB are free.*shorten ctx or chunk"
    ):
        check_fits(parse_spec("vllm:kv_space=500"), needed, 8 * GIB)
