"""What does each lane of the demo show on this machine? Runs the demo headless and prints the table README carries.

Exit code 1 where a lane did not finish, or where the order that the trace must show (int8 KV below int4 KV) is broken.
`--quick` runs the short sample session without the noise floor.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from workbench.cli.run import DEMO_LANES, DEMO_SESSION
from workbench.report import table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the short session, no floor")
    options = parser.parse_args()
    command = [sys.executable, "-m", "workbench", "run", "dice" if options.quick else DEMO_SESSION, "--json"]
    command += [word for lane in DEMO_LANES for word in ("--lane", lane)]
    command += [] if options.quick else ["--floor"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        return 1
    comparison = json.loads(done.stdout)
    print(table.markdown(comparison))
    kl = {lane["name"]: lane["kl"]["mean"] for lane in comparison["lanes"]}
    print(" · ".join(f"{name}: KL {mean:.5f}" for name, mean in kl.items()))
    return 0 if kl["kv int8"] < kl["kv int4"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
