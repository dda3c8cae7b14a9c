from __future__ import annotations

import numpy as np
import pytest

from tests.store.samples import equal, make_rows
from workbench.protocol.columns import KINDS
from workbench.protocol.wire import WireError
from workbench.store.columns import DamagedChunkError, absent, checksum, decode, encode


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [0, 1, 7, 1024])
def test_every_kind_comes_back_bit_for_bit(kind: str, rows: int) -> None:
    arrays = make_rows(kind, rows)
    back = decode(kind, rows, encode(kind, arrays))
    assert equal(back, arrays)
    assert not any(array.flags.writeable for array in back.values())


def test_not_a_number_and_infinity_keep_their_bits() -> None:
    arrays = make_rows("rows", 3)
    arrays["kl"][:] = np.array([0x7FC00001, 0xFF800000, 0x80000000], "<u4").view("<f4")
    back = decode("rows", 3, encode("rows", arrays))
    assert back["kl"].tobytes() == arrays["kl"].tobytes()


def test_any_flipped_bit_is_noticed() -> None:
    data = encode("trace", make_rows("trace", 40))
    for position in range(0, len(data) * 8, 61):
        broken = bytearray(data)
        broken[position // 8] ^= 1 << position % 8
        # Bits that the format ignores may be flipped; what comes back must then be the same.
        try:
            assert equal(decode("trace", 40, bytes(broken)), make_rows("trace", 40))
        except DamagedChunkError:
            continue


@pytest.mark.parametrize("length", [0, 1, 5, 100])
def test_a_cut_chunk_is_damaged(length: int) -> None:
    with pytest.raises(DamagedChunkError):
        decode("rows", 8, encode("rows", make_rows("rows", 8))[:length])


def test_another_kind_or_number_of_rows_is_damaged() -> None:
    data = encode("rows", make_rows("rows", 8))
    with pytest.raises(DamagedChunkError, match="holds 8 rows rows"):
        decode("rows", 9, data)
    with pytest.raises(DamagedChunkError):
        decode("continuation", 8, data)


def test_rows_that_are_not_whole_are_refused() -> None:
    arrays = make_rows("trace", 8)
    arrays["head_ids"] = arrays["head_ids"][:-1]
    with pytest.raises(WireError):
        encode("trace", arrays)


def test_absent_rows_are_invalid_and_not_numbers() -> None:
    rows = absent("rows", 3)
    assert not rows["valid"].any()
    assert np.isnan(rows["kl"]).all()
    assert rows["top_ids"].shape == (3, 4)


def test_the_checksum_knows_where_a_field_ends() -> None:
    assert checksum(1, "23") != checksum(12, "3")
