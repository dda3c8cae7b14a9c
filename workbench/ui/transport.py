"""Where the reader is: the token cursor, the playhead of a replay, following, speed. No screen in here."""

from __future__ import annotations

from dataclasses import dataclass

SPEEDS: tuple[int, ...] = (5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560, 5120)
"""Tokens a second."""


@dataclass(slots=True)
class Transport:
    """The cursor is a token position; a continuation's tokens are numbered on from the end of the stream.

    With a `playhead`, tokens from it on are not shown. Moving the cursor past it takes it along, so that a paused
    replay can be searched; playing goes on from the cursor.
    """

    total: int = 0
    cursor: int = 0
    follow: bool = False
    playing: bool = False
    playhead: float | None = None
    speed_index: int = 4

    @property
    def speed(self) -> int:
        """Tokens a second."""
        return SPEEDS[self.speed_index]

    @property
    def shown(self) -> int:
        """How many positions may be shown: all, or those before the playhead."""
        return self.total if self.playhead is None else min(self.total, int(self.playhead))

    def move(self, position: int) -> None:
        """Put the cursor on a position; following ends, and the playhead comes along when passed."""
        self.follow = False
        self.place(position)

    def place(self, position: int) -> None:
        """Put the cursor on a position without ending the following."""
        self.cursor = max(0, min(position, self.total - 1))
        if self.playhead is not None and (self.playing or self.cursor >= self.playhead):
            self.playhead = float(self.cursor + 1)

    def play(self) -> None:
        """Start playing from the cursor, from the start when it stands at the end."""
        if self.cursor >= self.total - 1:
            self.cursor = 0
        self.playing, self.playhead = True, float(self.cursor + 1)

    def pause(self) -> None:
        self.playing = False

    def advance(self, seconds: float) -> bool:
        """Let time pass; True where the cursor moved. Playing ends with the last token."""
        if not self.playing or self.playhead is None:
            return False
        self.playhead = min(float(self.total), self.playhead + seconds * self.speed)
        before, self.cursor = self.cursor, max(0, int(self.playhead) - 1)
        if self.playhead >= self.total:
            self.playing = False
        return self.cursor != before or not self.playing

    def faster(self, step: int) -> None:
        """Double (`step` 1) or halve (−1) the speed."""
        self.speed_index = max(0, min(len(SPEEDS) - 1, self.speed_index + step))


def parse_seek(text: str, total: int, turn_starts: list[int]) -> int | None:
    """The position that `5,120`, `t8` or `40%` names; None where it names none. Turns count from 1."""
    word = text.strip().lower().replace(",", "").replace("_", "")
    try:
        if word.startswith("t"):
            turn = int(word[1:])
            return turn_starts[turn - 1] if 1 <= turn <= len(turn_starts) else None
        if word.endswith("%"):
            share = float(word[:-1])
            return round(share / 100 * (total - 1)) if 0 <= share <= 100 and total else None
        position = int(word)
    except ValueError:
        return None
    return position if 0 <= position < total else None
