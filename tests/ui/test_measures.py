from __future__ import annotations

import numpy as np

from tests.ui.states import grow, make_state, rewind, set_status
from workbench.store.state import Columns
from workbench.ui.board import Board
from workbench.ui.measures import EXCLUDED, FLIP, KL_LEVELS, densest, depth_start, depth_stop, speeds


def test_figures_are_those_of_the_written_valid_positions():
    state = make_state()
    lane = state.lanes[3]
    lane.rows.column("valid")[5:9] = 0
    measures = Board(state).views[3].measures
    used = state.stream["generated"][1:].astype(bool) & lane.rows.column("valid").astype(bool)
    kl, flips = lane.rows.column("kl")[used], lane.rows.column("rank")[used] != 1
    assert measures.n == used.sum()
    assert np.isclose(measures.kl_mean, kl.mean(dtype=np.float64))
    assert measures.flip_rate == flips.mean()
    assert np.isclose(measures.nll, -lane.rows.column("logprob")[used].mean(dtype=np.float64))
    assert np.allclose(measures.tv, [lane.rows.column(name)[used].mean() for name in ("tv", "tv_high")])
    assert measures.curve(1024)[2].sum() == flips.sum() == (measures.codes & FLIP).astype(bool).sum()
    assert (measures.codes[6:10] & 7).tolist() == [EXCLUDED] * 4


def test_levels_begin_at_their_thresholds():
    state = make_state()
    lane = state.lanes[1]
    values = [0.0, *(step for t in KL_LEVELS for step in (np.nextafter(np.float32(t), np.float32(0)), t))]
    lane.rows.column("kl")[: len(values)] = values
    codes = Board(state).views[1].measures.codes
    assert (codes[1 : 1 + len(values)] & 7).tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4]


def test_growing_in_pieces_gives_the_same_as_all_at_once():
    state = make_state()
    whole = Board(state).views[2].measures
    everything = rewind(state.lanes[2], 100)
    board = Board(state)
    measures = board.views[2].measures
    assert measures.edge == 101
    while len(state.lanes[2].rows) < len(everything["kl"]):
        grow(state.lanes[2], everything, 333)
        assert state.lanes[2].record.id in board.update()
    assert np.array_equal(measures.codes, whole.codes)
    assert (measures.n, measures.flips) == (whole.n, whole.flips)
    assert np.isclose(measures.kl_sum, whole.kl_sum)
    assert measures.deepest == whole.deepest


def test_a_lane_that_is_measured_anew_starts_from_nothing():
    state = make_state()
    board = Board(state)
    rewind(state.lanes[1], 10)
    board.update()
    assert board.views[1].measures.edge == 11
    assert not (board.views[1].measures.codes[11:] & FLIP).any()


def test_rows_that_a_resumed_lane_fills_in_are_taken_in():
    state = make_state()
    rows = state.lanes[1].rows
    rows.column("valid")[100:200] = 0
    board = Board(state)
    assert (board.views[1].measures.codes[101:201] & 7 == EXCLUDED).all()
    rows.column("valid")[100:200] = 1
    assert board.update() == {2}
    assert not (board.views[1].measures.codes[101:201] & 7 == EXCLUDED).any()


def test_a_lane_that_scores_from_a_later_position_keeps_its_places():
    state = make_state()
    lane = state.lanes[1]
    names = tuple(lane.rows._arrays)
    late = Columns("rows", 1001)
    late.append(1001, {name: lane.rows.column(name)[1000:] for name in names})
    lane.rows, whole = late, Board(make_state()).views[1].measures
    measures = Board(state).views[1].measures
    assert measures.edge == len(state.stream["ids"])
    assert np.array_equal(measures.codes[1001:], whole.codes[1001:])


def test_flips_are_found_forwards_and_backwards():
    measures = Board(make_state()).views[3].measures
    flips = np.flatnonzero(measures.codes & FLIP).tolist()
    assert [measures.next_flip(-1, 1), measures.next_flip(flips[0], 1)] == flips[:2]
    assert measures.next_flip(flips[1], -1) == flips[0]
    assert measures.next_flip(flips[-1], 1) is None
    assert measures.next_flip(flips[0], -1) is None


def test_depth_bins_are_those_of_the_metrics_page():
    starts = depth_start(np.array([0, 2047, 2048, 40_000, 65_536, 98_303, 98_304, 131_072]))
    assert starts.tolist() == [0, 0, 2048, 32_768, 65_536, 65_536, 98_304, 131_072]
    assert [depth_stop(start) for start in (0, 2048, 32_768, 65_536, 98_304)] == [2048, 4096, 65_536, 98_304, 131_072]


def test_speeds_come_from_the_statistics_and_else_from_the_columns():
    state = make_state()
    lane = state.lanes[1]
    decode, prefill = speeds(lane)
    assert round(decode, 1) == 64.0 and round(prefill) == 640
    set_status(lane, "done", stats={"decode": {"median_tps": 12.5}, "prefill_tokens": 198, "prefill_seconds": 2.0})
    assert speeds(lane) == (12.5, 99.0)


def test_only_the_densest_slices_are_marked_where_flips_are_many():
    assert densest([0, 1, 0, 2]) == [False, False, False, True]
    assert sum(densest([1] * 60)) == 0 or sum(densest([1] * 60)) == 60
    assert densest([0] * 10 + [1] + [0] * 10) == [False] * 10 + [True] + [False] * 10
