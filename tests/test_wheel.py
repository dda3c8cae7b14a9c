from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel built from this checkout is installed."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    target = folder / "site"
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-compile",
        "--target",
        str(target),
        str(wheel),
    ]
    subprocess.run(install, check=True, capture_output=True)
    return target


def workbench(site: Path, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(site), "WORKBENCH_HOME": str(home)}
    command = [sys.executable, "-P", "-m", "workbench", *arguments]
    return subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_wheel_carries_its_themes_and_sessions_and_finds_them(installed: Path, tmp_path: Path) -> None:
    done = workbench(installed, tmp_path, "paths", "--json")
    assert done.returncode == 0, done.stderr
    places = json.loads(done.stdout)
    for name in ("shipped themes", "sample sessions"):
        assert Path(places[name]).is_relative_to(installed)
    assert {path.name for path in Path(places["shipped themes"]).iterdir()} == {
        path.name for path in (ROOT / "themes").iterdir()
    }
    shipped = {path.name for path in Path(places["sample sessions"]).iterdir()}
    assert {"demo.json", "NOTICE.txt"} <= shipped
    assert not [name for name in shipped if name.endswith(".py")]


@pytest.mark.slow
def test_the_installed_wheel_runs_an_engine(installed: Path, tmp_path: Path, smollm2: Path) -> None:
    done = workbench(
        installed, tmp_path, "run", "dice", "--model", str(smollm2), "--lane", "transformers:kv=int8", "--json"
    )
    assert done.returncode == 0, done.stderr
    comparison = json.loads(done.stdout)
    assert comparison["lanes"][0]["status"] == "done"
    assert Path(comparison["file"]).is_relative_to(tmp_path)
