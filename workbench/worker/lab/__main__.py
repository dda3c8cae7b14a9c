"""`python -m workbench.worker.lab PLAN.json`: train or merge as the plan says, one JSON object a line on stdout.

The last line is `{"done": facts}` or `{"error": {"what", "where", "next"}}` (exit code 1).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError


def say(fact: dict[str, Any]) -> None:
    """One line of progress."""
    print(json.dumps(fact), flush=True)


def main() -> int:
    """Run the plan's task."""
    plan: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    task = plan.pop("task")
    try:
        if task == "merge":
            from workbench.worker.lab.merge import merge

            say({"done": merge(Path(plan["model"]), Path(plan["adapter"]), Path(plan["output"]))})
        else:
            from workbench.worker.lab.train import Plan, train

            say({"done": train(Plan(**plan), say)})
    except WorkbenchError as error:
        say({"error": {"what": error.what, "where": error.where, "next": error.next}})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
