from __future__ import annotations

import io
import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from workbench.protocol import events, wire

some_array = arrays_of.arrays(
    st.sampled_from([np.float32, np.float64, np.int32, np.int64, np.uint8, np.uint16, np.bool_]),
    arrays_of.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5),
)


@given(
    st.dictionaries(st.text(max_size=5), some_array, max_size=4), st.dictionaries(st.text(max_size=5), st.integers())
)
def test_a_frame_reads_back_bit_for_bit(arrays, header) -> None:  # type: ignore[no-untyped-def]
    header.pop("arrays", None)
    data = wire.pack(header, arrays)
    for got_header, got in (wire.unpack(data), wire.read_frame(io.BytesIO(data)) or ({}, {})):
        assert got_header == header
        assert got.keys() == arrays.keys()
        for name, array in arrays.items():
            assert got[name].dtype == array.dtype
            assert got[name].shape == array.shape
            assert got[name].tobytes() == array.tobytes()


def test_several_frames_follow_each_other_and_the_end_is_none() -> None:
    stream = io.BytesIO(wire.pack({"n": 1}) + wire.pack({"n": 2}))
    assert [wire.read_frame(stream), wire.read_frame(stream), wire.read_frame(stream)] == [
        ({"n": 1}, {}),
        ({"n": 2}, {}),
        None,
    ]


@given(st.data())
def test_a_cut_frame_is_an_error_never_a_shorter_array(data: st.DataObject) -> None:
    whole = wire.pack({"type": "Rows"}, {"kl": np.arange(7, dtype=np.float32)})
    cut = whole[: data.draw(st.integers(1, len(whole) - 1))]
    with pytest.raises(wire.WireError):
        wire.read_frame(io.BytesIO(cut))
    with pytest.raises(wire.WireError):
        wire.unpack(cut)


@given(st.binary(min_size=12, max_size=60))
def test_noise_is_an_error(noise: bytes) -> None:
    try:
        wire.unpack(noise)
    except wire.WireError:
        return
    head, body = struct.unpack_from("<IQ", noise)
    assert head + body + 12 == len(noise)  # only a frame that is one by chance gets here


@pytest.mark.parametrize(
    "described",
    [[["a", "|O8", [1]]], [["a", "<f4", [-1]]], [["a", "<f4", [2]]], [["a", "<f4"]], 3, [["a", "<f4", ["x"]]]],
)
def test_a_header_that_lies_about_its_arrays_is_an_error(described: object) -> None:
    head = json.dumps({"arrays": described}).encode()
    with pytest.raises(wire.WireError):
        wire.unpack(struct.pack("<IQ", len(head), 4) + head + b"\0\0\0\0")


def test_object_arrays_do_not_travel() -> None:
    with pytest.raises(wire.WireError, match="does not travel"):
        wire.pack({}, {"a": np.array([object()])})


@pytest.mark.parametrize(
    "event",
    [
        events.Start(3, {"kv": "int8"}, "/model", 512),
        events.Score(4, 1, True, arrays={"ids": np.arange(5, dtype=np.int32)}),
        events.Generate(5, 128, stop=(2, 3)),
        events.Rows(4, 17, arrays={"kl": np.zeros(3, np.float32)}),
        events.Failed(1, "refused", "what", "where", "next"),
        events.Stop(),
    ],
)
def test_an_event_comes_back_as_itself(event) -> None:  # type: ignore[no-untyped-def]
    header, arrays = events.encode(event)
    back = events.decode(*wire.unpack(wire.pack(header, arrays)))
    assert type(back) is type(event)
    assert events.encode(back)[0] == header


def test_an_unknown_event_or_field_is_an_error() -> None:
    with pytest.raises(wire.WireError, match="unknown event"):
        events.decode({"type": "Evil"}, {})
    with pytest.raises(wire.WireError, match="has no field"):
        events.decode({"type": "Cancel", "job": 1, "more": 2}, {})
    with pytest.raises(wire.WireError):
        events.decode({"type": "Cancel"}, {})
