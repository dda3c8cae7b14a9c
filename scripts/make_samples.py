"""Makes the sample sessions from rows of session files: `make_samples.py MODEL_FOLDER SESSIONS_FOLDER`.

MODEL_FOLDER is the converted embedded model, SESSIONS_FOLDER holds short.jsonl and long.jsonl. The demo is cut at a
turn boundary so that its render and 128 tokens more fit the model's 8,192.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from workbench.session.script import Session, load_session
from workbench.session.template import Renderer, fit, render

DEMO_TOKENS = 8192 - 128


def main(model: Path, rows: Path) -> None:
    """Write dice.json, demo.json and refactor-long.json into sessions/ and print their sizes."""
    renderer = Renderer.load(model)
    dice = load_session(f"{rows}/short.jsonl#pydanticai-deepseek-deferred-capability-with-thinking")
    coding = load_session(f"{rows}/long.jsonl#pi-coding-opus45-seg3")
    demo = fit(coding, renderer, DEMO_TOKENS).session
    samples: dict[str, tuple[str, Session]] = {
        "dice": ("A dice game with two tools (short)", dice),
        "demo": ("Refactoring a coding agent: the first turns", demo),
        "refactor-long": ("Refactoring a coding agent: the whole session (100k+ tokens)", coding),
    }
    for name, (title, session) in samples.items():
        named = replace(session, id=name, title=title, meta={**session.meta, "row": session.id})
        path = Path(__file__).parents[1] / "sessions" / f"{name}.json"
        path.write_text(json.dumps(named.to_json(), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        facts = render(named, renderer).facts
        print(
            f"{name}: {facts['tokens']:,} tokens, {facts['generated_tokens']:,} of them generated, {named.turns} turns"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
