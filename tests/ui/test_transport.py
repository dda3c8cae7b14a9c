from __future__ import annotations

import pytest

from workbench.ui.transport import SPEEDS, Transport, parse_seek


def test_playing_shows_tokens_at_the_chosen_speed_and_stops_at_the_end():
    transport = Transport(total=100, cursor=10, speed_index=SPEEDS.index(40))
    transport.play()
    assert transport.shown == 11
    assert transport.advance(0.5)
    assert (transport.cursor, transport.shown) == (30, 31)
    transport.advance(60)
    assert (transport.cursor, transport.shown, transport.playing) == (99, 100, False)


def test_playing_from_the_end_begins_anew():
    transport = Transport(total=100, cursor=99)
    transport.play()
    assert transport.shown == 1


def test_a_paused_replay_can_be_searched_ahead_and_keeps_what_was_shown_behind():
    transport = Transport(total=100, cursor=10)
    transport.play()
    transport.pause()
    transport.move(50)
    assert transport.shown == 51
    transport.move(5)
    assert transport.shown == 51
    transport.play()
    assert transport.shown == 6


def test_the_cursor_stays_inside_and_moving_ends_following():
    transport = Transport(total=10, follow=True)
    transport.move(99)
    assert (transport.cursor, transport.follow) == (9, False)
    transport.move(-5)
    assert transport.cursor == 0
    assert not transport.advance(1)


def test_speed_has_ends():
    transport = Transport()
    for _ in range(30):
        transport.faster(1)
    assert transport.speed == SPEEDS[-1]
    for _ in range(30):
        transport.faster(-1)
    assert transport.speed == SPEEDS[0]


@pytest.mark.parametrize(
    ("text", "position"),
    [("512", 512), ("1,000", 1000), (" t2 ", 300), ("T1", 20), ("40%", 1600), ("100%", 3999), ("0", 0)]
    + [(bad, None) for bad in ("", "t0", "t3", "4000", "-1", "140%", "x", "t", "%", "nan%", "1e3")],
)
def test_places_are_read_in_three_ways_and_anything_else_is_none(text, position):
    assert parse_seek(text, 4000, [20, 300]) == position
