"""Which server answers at an address, by what it says of itself."""

from __future__ import annotations

from typing import Any

from workbench.errors import ConfigurationError
from workbench.worker.servers.base import Dialect, Target
from workbench.worker.servers.connection import Connection
from workbench.worker.servers.llama_server import LlamaServer
from workbench.worker.servers.sglang import Sglang
from workbench.worker.servers.trtllm import Trtllm
from workbench.worker.servers.vllm import Vllm

DIALECTS: dict[str, type[Vllm] | type[Sglang] | type[Trtllm] | type[LlamaServer]] = {
    "vllm": Vllm,
    "sglang": Sglang,
    "trtllm": Trtllm,
    "llama-server": LlamaServer,
}
OWNERS = {"vllm": "vllm", "sglang": "sglang", "tensorrt_llm": "trtllm", "llamacpp": "llama-server"}
"""`owned_by` of the models' cards."""


def make_dialect(name: str, connection: Connection, target: Target) -> Dialect:
    """The dialect of a name."""
    return DIALECTS[name](connection, target)


def detect(connection: Connection) -> str:
    """The dialect of what answers. Raises ConfigurationError where that is unclear, EngineError where nothing does."""
    models = connection.find("/v1/models")
    cards: Any = models.get("data") if isinstance(models, dict) else None
    for card in cards if isinstance(cards, list) else []:
        owner = card.get("owned_by") if isinstance(card, dict) else None
        if isinstance(owner, str) and owner in OWNERS:
            return OWNERS[owner]
    props = connection.find("/props")
    if isinstance(props, dict) and "default_generation_settings" in props:
        return "llama-server"
    for path in ("/server_info", "/get_server_info", "/model_info", "/get_model_info"):
        info = connection.find(path)
        if isinstance(info, dict) and "model_path" in info:
            return "sglang"
    raise ConfigurationError(
        "it is not clear which server this is",
        where=str(connection.address),
        next=f"Name it: dialect={'|'.join(DIALECTS)}.",
    )
