from __future__ import annotations

import numpy as np

from workbench.metrics.depth import bins, edges


def test_bins_are_fine_at_first_and_32k_wide_from_64k_on() -> None:
    assert edges(131072) == [1024 * k for k in (0, 2, 4, 8, 16, 32, 64, 96, 128)]
    assert edges(131073)[-1] == 1024 * 160


def test_each_position_lands_in_the_one_bin_that_holds_it_and_empty_bins_are_left_out() -> None:
    positions = np.array([1, 2047, 2048, 40000, 131072])
    got = [(start, stop, positions[index].tolist()) for start, stop, index in bins(positions)]
    assert got == [
        (0, 2048, [1, 2047]),
        (2048, 4096, [2048]),
        (32768, 65536, [40000]),
        (131072, 163840, [131072]),
    ]
    assert bins(positions[:0]) == []
