"""The parser of every command; a command is named `module.function` and imported when it runs."""

from __future__ import annotations

import argparse
from typing import Any

from workbench import __version__
from workbench.config.lane import EMBEDDED_MODEL
from workbench.config.schemes import GROUPS, SCHEMES
from workbench.run.sweep import AXES

_SESSION = "FILE.json, FILE.jsonl#ID, or a sample session's name"
_MODEL = "a folder, a GGUF file, a hub id, or a name from `models`"


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command."""
    parser = argparse.ArgumentParser(
        prog="workbench", description="Is the model you run still the model that was published?"
    )
    parser.add_argument("--version", action="version", version=f"workbench {__version__}")
    parser.set_defaults(command="app.start", session=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    run = _command(commands, "run", "run.run", "record or reuse the reference, run the lanes, print the table")
    _add_session(run)
    run.add_argument("--lane", action="append", default=[], metavar="SPEC", help="engine:key=value,... or a TOML file")
    run.add_argument("--sweep", choices=AXES, help="each --lane (the reference, if none) with every value of an axis")
    run.add_argument("--floor", action="store_true", help="measure the noise floor as well")
    run.add_argument("--parallel", type=int, default=1, metavar="N", help="lanes at once, where memory allows")
    run.add_argument(
        "--repeat",
        type=int,
        default=1,
        metavar="N",
        help="run each lane (the reference, if none) N times and compare the runs bit by bit",
    )
    run.add_argument("--json", action="store_true", help="print the comparison as JSON")

    _add_record(commands)
    _add_ladder(commands)

    demo = _command(
        commands, "demo", "run.demo", "the demo session with three lanes: the app, or headless without a terminal"
    )
    demo.add_argument("--headless", action="store_true", help="print the table although there is a terminal")
    demo.add_argument("--json", action="store_true", help="print the comparison as JSON (headless)")
    demo.add_argument("-o", "--output", metavar="FILE.wbs", help="where to save the session")

    replay = _command(commands, "replay", "files.replay", "the app on a saved session, without any engine")
    replay.add_argument("file", metavar="FILE")
    replay.add_argument("--text", action="store_true", help="print the session with its divergence instead")

    compare = _command(commands, "compare", "files.compare", "the table of a saved session's lanes")
    compare.add_argument("files", metavar="FILE", nargs="+")
    compare.add_argument("--depth", action="store_true", help="each lane by depth, and where it leaves the noise floor")
    compare.add_argument("--matrix", action="store_true", help="every lane against every other (text and JSON)")
    form = compare.add_mutually_exclusive_group()
    for name in ("json", "csv", "markdown"):
        form.add_argument(f"--{name}", action="store_true")

    floor = _command(commands, "floor", "run.floor", "measure the noise floor of a saved session's reference")
    floor.add_argument("file", metavar="FILE")
    floor.add_argument("--json", action="store_true")

    export = _command(commands, "export", "files.export", "per-position rows of a saved session")
    export.add_argument("file", metavar="FILE")
    export.add_argument("--format", choices=("csv", "jsonl", "parquet"), default="csv")
    export.add_argument("-o", "--output", metavar="FILE", help="where to; Parquet needs it and the extra `parquet`")
    export.add_argument("--lane", metavar="NAME", help="only this lane")

    _add_models(commands)
    _add_engines(commands)
    _add_quantize(commands)
    _add_logits(commands)

    template = _command(
        commands, "template", "template.template", "where the prompts of two engines first differ, and their sampling"
    )
    template.add_argument("session", metavar="SESSION", help=_SESSION)
    template.add_argument("--model", metavar="NAME|PATH", help=_MODEL)
    template.add_argument("--lane", action="append", default=[], metavar="SPEC", help="engine:key=value,...; give two")
    template.add_argument("--json", action="store_true")

    _add_lab(commands)

    doctor = _command(commands, "doctor", "machine.doctor", "engines, versions, devices, memory, and what is missing")
    doctor.add_argument("--json", action="store_true")
    places = _command(
        commands, "paths", "machine.show_paths", "where configuration, models, traces and saved sessions live"
    )
    places.add_argument("--json", action="store_true")
    return parser


def _command(commands: Any, name: str, function: str, about: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=about, description=about)
    parser.set_defaults(command=function)
    return parser


def _add_models(commands: Any) -> None:
    models = _command(commands, "models", "machine.models", "list, add, verify and remove models")
    models.add_argument("action", choices=("list", "add", "remove", "verify", "clean"), nargs="?", default="list")
    models.add_argument("target", nargs="?", metavar="NAME|PATH", help="for clean: models, traces, environments, logs")
    models.add_argument("--name", help="the name to add it under")
    models.add_argument("--json", action="store_true")


def _add_engines(commands: Any) -> None:
    engines = _command(commands, "engines", "engines.engines", "list, install, add, check and remove what runs engines")
    engines.add_argument("action", choices=("list", "install", "add", "check", "remove"), nargs="?", default="list")
    engines.add_argument("engine", nargs="?", metavar="ENGINE", help="see `workbench engines`; check: all without one")
    engines.add_argument(
        "--python", metavar="PATH", help="add: the Python that runs the engine; install: the one to make it from"
    )
    engines.add_argument("--json", action="store_true")
    engines.epilog = (
        "install makes an environment of its own for an engine; your pip configuration and CMAKE_ARGS apply, so that "
        "CMAKE_ARGS='-DGGML_CUDA=on' workbench engines install llamacpp builds for an NVIDIA GPU. add uses a Python "
        "where the engine is installed already; remove takes that back, or deletes what install made."
    )


def _add_record(commands: Any) -> None:
    record = _command(commands, "record", "run.record", "only the reference trace")
    _add_session(record)
    record.add_argument("--lane", metavar="SPEC", help="the reference (same as --reference)")
    record.add_argument("--export-reference", metavar="FILE.wbref", help="write it to a file that others can use")
    record.add_argument("--no-text", action="store_true", help="leave all text but the token ids out of that file")


def _add_ladder(commands: Any) -> None:
    ladder = _command(commands, "ladder", "ladder.ladder", "which knob did it: one axis at a time between two lanes")
    ladder.add_argument("session", metavar="SESSION", help=_SESSION)
    ladder.add_argument(
        "--from", dest="start", metavar="SPEC", default="transformers:weights=bf16", help="the reference"
    )
    ladder.add_argument("--to", dest="stop", metavar="SPEC", required=True, help="where its axes lead to")
    ladder.add_argument("--model", metavar="NAME|PATH", help=_MODEL)
    ladder.add_argument("-o", "--output", metavar="FILE.wbs", help="where to save; an unfinished run there is resumed")
    ladder.add_argument("--fit", action="store_true", help="cut a session that is too long at a turn boundary")
    ladder.add_argument("--json", action="store_true", help="print the comparison and the ladder as JSON")


def _add_quantize(commands: Any) -> None:
    quantize = _command(commands, "quantize", "quantize.quantize", "make quantized weights of a model by llmcompressor")
    quantize.add_argument("model", metavar="MODEL", nargs="?", help=f"{_MODEL}; default: the embedded one")
    quantize.add_argument("--scheme", required=True, choices=tuple(SCHEMES), help="a lane names it as its weights")
    quantize.add_argument("--group", choices=GROUPS, help="inputs that share a scale; default: the scheme's own")
    quantize.add_argument(
        "--calibrate", action="append", default=[], metavar="SESSION", help=f"text to calibrate on: {_SESSION}"
    )
    quantize.add_argument(
        "--ignore", action="append", default=[], metavar="MODULE", help="a Linear that is left alone, beside lm_head"
    )
    quantize.add_argument("-o", "--output", metavar="FOLDER", help="where to; default: the cache that lanes use")
    quantize.add_argument("--json", action="store_true", help="print the manifest as JSON")
    quantize.epilog = (
        "The folder is in the compressed-tensors format, which transformers and vLLM load; quantization.json beside "
        "the weights says how it was made. A run that was stopped leaves nothing and begins anew."
    )


def _add_logits(commands: Any) -> None:
    about = "llama.cpp's files of log-probabilities (--kl-divergence-base): write, look at, score against"
    logits = commands.add_parser("logits", help=about, description=about)
    jobs = logits.add_subparsers(title="jobs", metavar="JOB", required=True)
    record = _command(jobs, "record", "logits.record", "write such a file of a session's or a text's windows")
    record.add_argument("source", metavar="SESSION|TEXT.txt", help=f"{_SESSION}; or a text file")
    record.add_argument("-o", "--output", metavar="FILE", required=True)
    record.add_argument("--window", type=int, default=512, metavar="N", help="tokens of a window (512)")
    record.add_argument("--windows", type=int, default=0, metavar="N", help="how many at most (all)")
    score = _command(jobs, "score", "logits.score", "what llama-perplexity --kl-divergence prints, of any lane")
    score.add_argument("file", metavar="FILE")
    for job in (record, score):
        job.add_argument("--lane", metavar="SPEC", required=True, help="llamacpp:... or transformers:...")
        job.add_argument("--json", action="store_true")
    show = _command(jobs, "show", "logits.show", "what such a file holds")
    show.add_argument("file", metavar="FILE")
    show.add_argument("--json", action="store_true")


def _add_lab(commands: Any) -> None:
    about = "the router lab: make sessions, train the embedded model to act in it, merge the adapter"
    lab = commands.add_parser("lab", help=about, description=about)
    jobs = lab.add_subparsers(title="jobs", metavar="JOB", required=True)
    generate = _command(jobs, "generate", "lab.generate", "sessions with questions whose calls and answers are known")
    generate.add_argument("-o", "--output", metavar="FILE.jsonl", required=True)
    generate.add_argument("--seed", type=int, default=0)
    generate.add_argument("--sessions", type=int, default=10, metavar="N")
    generate.add_argument("--tokens", type=int, default=7000, metavar="N", help="of each session, about (7000)")
    generate.add_argument("--split", choices=("train", "test"), default="test", help="test: names that training lacks")
    generate.add_argument("--model", metavar="FOLDER", help="whose tokens to count (the embedded model's)")
    train = _command(jobs, "train", "lab.train", "train the adapter; the same command goes on after an interruption")
    train.add_argument("--minutes", type=float, default=60.0, metavar="N", help="of training in all (60)")
    train.add_argument(
        "--tokens", type=int, default=0, metavar="N", help="of training data (as many as the time takes)"
    )
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--threads", type=int, default=0, metavar="N", help="(as many as there are cores)")
    train.add_argument("--checkpoint", type=float, default=5.0, metavar="MINUTES", help="between checkpoints (5)")
    train.add_argument("--model", metavar="NAME|PATH", default=EMBEDDED_MODEL, help="%(default)s")
    train.add_argument("--restart", action="store_true", help="throw away what an interrupted training left")
    train.add_argument("-o", "--output", metavar="FOLDER", help="for data, checkpoint and adapter")
    train.add_argument("--json", action="store_true")
    merge = _command(jobs, "merge", "lab.merge", "the embedded model with the adapter merged in, as a model of its own")
    merge.add_argument("adapter", metavar="FOLDER", nargs="?", help="what `lab train` wrote")
    merge.add_argument("--model", metavar="NAME|PATH", default=EMBEDDED_MODEL, help="%(default)s")
    merge.add_argument("-o", "--output", metavar="FOLDER", help="instead of the model cache")
    merge.add_argument("--json", action="store_true")


def _add_session(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "session", metavar="SESSION", nargs="?", help=f"{_SESSION}; with a FILE.wbref the one in it, if left out"
    )
    parser.add_argument("--model", metavar="NAME|PATH", help=_MODEL)
    parser.add_argument(
        "--reference",
        metavar="SPEC|FILE.wbref",
        default="transformers:weights=bf16",
        help="how it is recorded, or the file of one that was recorded elsewhere; default: %(default)s",
    )
    parser.add_argument("-o", "--output", metavar="FILE.wbs", help="where to save; an unfinished run there is resumed")
    parser.add_argument("--fit", action="store_true", help="cut a session that is too long at a turn boundary")
