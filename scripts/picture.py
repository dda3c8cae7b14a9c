"""Draws the main screen from a saved session as an SVG without remote fonts: `picture.py FILE.wbs OUT.svg [KEYS...]`.

The app itself makes the picture: it opens the file as `workbench replay` does, gets the keys, and exports its screen.
"""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

from workbench import paths
from workbench.config.theme import load_themes
from workbench.store.playback import load_state
from workbench.store.saved import SavedSession
from workbench.ui.app import WorkbenchApp

SIZE = (160, 45)
FONT = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace"


def main(file: Path, out: Path, keys: list[str]) -> None:
    """Write the picture."""
    themes, _ = load_themes([paths.themes_dir()])
    with SavedSession.open(file) as saved:
        svg = asyncio.run(draw(WorkbenchApp(themes, state=load_state(saved)), keys))
    svg = re.sub(r"@font-face\s*\{.*?\}", "", svg, flags=re.DOTALL)
    svg = svg.replace("Fira Code, monospace", FONT)
    assert "url(http" not in svg
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(svg, encoding="utf-8")


async def draw(app: WorkbenchApp, keys: list[str]) -> str:
    """The screen after the keys, as SVG."""
    async with app.run_test(size=SIZE) as pilot:
        await app.workers.wait_for_complete()
        await pilot.pause()
        for key in keys:
            await pilot.press(key)
            await app.workers.wait_for_complete()
            await pilot.pause()
        return app.export_screenshot(title="workbench")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
