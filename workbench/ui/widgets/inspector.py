"""The token under the cursor: what the reference and every visible lane would have said there, under its own lane."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rich.segment import Segment
from rich.style import Style

from workbench.session.regions import ROLE_NAMES
from workbench.ui.board import KIND_NAMES, Board, LaneView
from workbench.ui.marks import interval, rank_words
from workbench.ui.pieces import quoted
from workbench.ui.widgets.gauges import kl_step
from workbench.ui.widgets.lines import Lines, Row, fill, grid, thousands

HEIGHT, COMPACT_HEIGHT = 6, 3
RANKS = 4
TEXT_COLUMN, BAR = 5, 8
WIDEST = 48  # probabilities stay near their tokens where a pane is wide


@dataclass(frozen=True, slots=True)
class Guess:
    """One candidate of a distribution."""

    token: int
    logprob: float


class Inspector(Lines):
    """Top ids with probabilities per lane, and the lane's divergence at the token."""

    def line(self, y: int, width: int) -> list[Segment]:
        ink, board = self.desk.ink, self.desk.board
        if board is None:
            return Row(width, ink.text).segments()
        if y == 0:
            return self._title(board, width)
        views = board.panes(width)
        if self.desk.compact:
            chosen = self._compact_views(board)
            return self._compact(board, chosen[y - 1], width) if y <= len(chosen) else Row(width, ink.text).segments()
        segments: list[Segment] = []
        for (x, cells), view in zip(grid(width, len(views)), views, strict=True):
            if x:
                segments.append(Segment("│", ink.rule))
            row = Row(cells, ink.text)
            segments += (self._rank(board, view, y, row) if y <= RANKS else self._verdict(board, view, row)).segments()
        return fill(segments, width, len(views), ink.text)

    def _title(self, board: Board, width: int) -> list[Segment]:
        ink, position = self.desk.ink, board.transport.cursor
        row = Row(width, ink.rule).add("─ ", ink.rule)
        if position >= board.count:
            row.add(f"token {thousands(position - board.count)} of the free continuation", ink.text)
        elif board.count:
            shared = board.shared
            kind = KIND_NAMES[int(shared.kinds[position])]
            part = ROLE_NAMES[int(shared.role[position])].replace("_", " ")
            row.add(f"token {thousands(position)}", ink.text)
            row.add(f" · turn {board.turn_at(position)} of {shared.turns} · {kind}", ink.muted)
            if part not in (kind, "structure"):
                row.add(f" · {part}", ink.muted)
            if not shared.generated[position]:
                row.add(" · context", ink.muted)
            token = int(board.state.stream["ids"][position])
            row.add(" · ", ink.muted).add(quoted(board.state.token_bytes(token), token), ink.strong)
        row.add(" ", ink.rule)
        left = row.left
        text = list("─" * left)
        if not self.desk.compact:
            for x, _ in grid(width, len(board.panes(width)))[1:]:
                if x - 1 >= width - left:
                    text[x - 1 - (width - left)] = "┬"
        return row.add("".join(text), ink.rule).segments()

    # ---- what is known at the token

    def guesses(self, board: Board, view: LaneView) -> list[Guess] | None:
        """The lane's best ids at the cursor; None while they are being read, empty where it has none."""
        position = board.transport.cursor
        if position >= board.count:
            index = position - board.count
            tail = view.lane.continuation
            if index >= len(tail):
                return []
            return [Guess(int(tail.column("ids")[index]), float(tail.column("logprobs")[index]))]
        if position < max(1, view.lane.rows.first) or position >= view.measures.edge:
            return []
        if view.measures.is_reference:
            row = self.desk.trace.get(position)
            if row is None:
                return None
            return [Guess(token, logprob) for token, logprob in row.head[:RANKS]]
        rows = view.lane.rows
        index = position - rows.first
        ids, logprobs = rows.column("top_ids")[index], rows.column("top_logprobs")[index]
        pairs = zip(ids.tolist(), logprobs.tolist(), strict=True)
        return [Guess(token, value) for token, value in pairs if token >= 0]  # an engine may name fewer

    def _rank(self, board: Board, view: LaneView, rank: int, row: Row) -> Row:
        ink = self.desk.ink
        guesses = self.guesses(board, view)
        if guesses is None:
            return row.to(TEXT_COLUMN).add("reading the trace" if rank == 1 else "", ink.muted)
        if rank > len(guesses):
            return row.to(TEXT_COLUMN).add("not measured here" if rank == 1 and not guesses else "", ink.muted)
        guess = guesses[rank - 1]
        mark, style = self._mark(board, view, guess, rank)
        probability = math.exp(min(0.0, guess.logprob))
        row.add(" ", ink.text).add(mark, style).add(f" {rank} ", ink.muted)
        text = quoted(board.state.token_bytes(guess.token), guess.token)
        end = min(row.width, WIDEST)
        room = max(4, end - TEXT_COLUMN - 8 - BAR - 1)
        row.add(text, style if mark != " " else ink.text, limit=room)
        row.to(end - BAR - 8).add(f"{probability:.3f}", ink.text).add(" ", ink.text)
        return row.add(_bar(probability, BAR), ink.accent if rank == 1 else ink.muted)

    def _mark(self, board: Board, view: LaneView, guess: Guess, rank: int) -> tuple[str, Style]:
        """`▸` at the stream's token; `◆` at a first choice that is not the reference's."""
        ink, position = self.desk.ink, board.transport.cursor
        if position >= board.count:
            return " ", ink.text
        if rank == 1 and not view.measures.is_reference and self._flipped(board, view):
            return "◆", ink.warning
        if guess.token == int(board.state.stream["ids"][position]):
            return "▸", ink.accent
        return " ", ink.text

    def _flipped(self, board: Board, view: LaneView) -> bool:
        rows, index = view.lane.rows, board.transport.cursor - view.lane.rows.first
        return 0 <= index < len(rows) and int(rows.column("rank")[index]) != 1

    def _verdict(self, board: Board, view: LaneView, row: Row) -> Row:
        ink, position = self.desk.ink, board.transport.cursor
        row.to(TEXT_COLUMN)
        guesses = self.guesses(board, view)
        if not guesses or position >= board.count:
            return row
        margin = guesses[0].logprob - guesses[1].logprob if len(guesses) > 1 else 0.0
        if view.measures.is_reference:
            trace = self.desk.trace.get(position)
            if trace is None:
                return row
            row.add("entropy ", ink.muted).add(f"{trace.entropy:.3f}", ink.text)
            return row.add("  margin ", ink.muted).add(f"{margin:.2f}", ink.text)
        rows, index = view.lane.rows, position - view.lane.rows.first
        if not rows.column("valid")[index]:
            return row.add("excluded: not a finite divergence", ink.warning)
        kl, rank = float(rows.column("kl")[index]), int(rows.column("rank")[index])
        least, gap = ("≥", " ") if view.measures.bounded else ("", "  ")
        row.add("KL ", ink.muted).add(f"{least}{kl:.4f}", ink.levels[kl_step(kl)] + Style(underline=False))
        if least:
            row.add(f"{gap}TV ", ink.muted).add(_interval(view, index), ink.text)
        row.add(f"{gap}rank ", ink.muted)
        row.add(rank_words(rank, view.lane.record), ink.warning if rank != 1 else ink.text)
        shown = f"{margin:.2f}"
        if least and row.left < len(shown) + 9:
            return row
        return row.add(f"{gap}margin ", ink.muted).add(shown, ink.text)

    # ---- two lines

    def _compact_views(self, board: Board) -> list[LaneView]:
        views, active = board.views, board.active
        chosen = [view for view in views if view.measures.is_reference]
        if active is not None and active not in chosen:
            chosen.append(active)
        return chosen

    def _compact(self, board: Board, view: LaneView, width: int) -> list[Segment]:
        ink = self.desk.ink
        row = Row(width, ink.text)
        row.add("  ref " if view.measures.is_reference else f"  {view.number:<4}", ink.muted)
        guesses = self.guesses(board, view)
        if guesses is None:
            return row.add("reading the trace", ink.muted).segments()
        if not guesses:
            return row.add("not measured here", ink.muted).segments()
        verdict: tuple[tuple[str, Style], ...] = ()
        rows, index = view.lane.rows, board.transport.cursor - view.lane.rows.first
        if not view.measures.is_reference and 0 <= index < len(rows) and board.transport.cursor < board.count:
            least = view.measures.bounded
            kl = f"≥{rows.column('kl')[index]:.3f}" if least else f"{rows.column('kl')[index]:.3f}"
            verdict = (
                (" KL ", ink.muted),
                (kl, ink.text),
                (f" TV {_interval(view, index)}" if least else "", ink.muted),
                (" ◆ " if self._flipped(board, view) else "   ", ink.warning),
            )
        room = width - row.used - sum(len(text) for text, _ in verdict)
        for guess in guesses:
            text = quoted(board.state.token_bytes(guess.token), guess.token)
            number = f"{math.exp(min(0.0, guess.logprob)):.3f}".lstrip("0") + "  "
            if row.used + len(text) + 1 + len(number) > room:
                break
            row.add(text + " ", ink.text).add(number, ink.muted)
        return (row.right(*verdict) if verdict else row).segments()


def _interval(view: LaneView, index: int) -> str:
    rows = view.lane.rows
    return interval(float(rows.column("tv")[index]), float(rows.column("tv_high")[index]))


def _bar(share: float, cells: int) -> str:
    halves = round(max(0.0, min(1.0, share)) * cells * 2)
    return "━" * (halves // 2) + ("╸" if halves % 2 else "")
