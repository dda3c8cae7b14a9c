"""Opening the app on a synthetic session, and reading what it drew."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from textual.pilot import Pilot

from workbench.config.settings import Settings
from workbench.config.theme import load_themes
from workbench.ui.app import WorkbenchApp

ROOT = Path(__file__).resolve().parents[2]
THEMES, _ = load_themes([ROOT / "themes"])
WIDE, SMALL = (160, 45), (80, 24)


def make_app(settings: Settings | None = None, **arguments: Any) -> WorkbenchApp:
    return WorkbenchApp(THEMES, settings, **arguments)


@asynccontextmanager
async def opened(
    size: tuple[int, int] = WIDE, settings: Settings | None = None, **arguments: Any
) -> AsyncIterator[tuple[WorkbenchApp, Pilot[None]]]:
    """An app that has drawn what it was given."""
    app = make_app(settings, **arguments)
    async with app.run_test(size=size) as pilot:
        await settle(pilot)
        yield app, pilot


async def settle(pilot: Pilot[None]) -> None:
    """Wait for the workers that read files and build boards, and for the frames that follow."""
    for _ in range(10):
        await pilot.pause()
        waiting = [worker for worker in pilot.app.workers if not worker.is_finished]
        if not waiting:
            break
        await asyncio.gather(*(worker.wait() for worker in waiting), return_exceptions=True)
    await pilot.pause()


async def press(pilot: Pilot[None], *keys: str) -> None:
    for key in keys:
        await pilot.press(key)
    await settle(pilot)


def rows_of(app: WorkbenchApp, id: str | None = None) -> list[str]:
    """The text of the screen, or of one widget, line by line."""
    if id is None:
        return ["".join(segment.text for segment in strip) for strip in app.screen._compositor.render_strips()]
    widget = app.screen.query_one(f"#{id}")
    return ["".join(segment.text for segment in widget.render_line(y)) for y in range(widget.size.height)]


def text_of(app: WorkbenchApp, id: str | None = None) -> str:
    return "\n".join(rows_of(app, id))
