"""Which model a lane runs, and what it is called beside its reference."""

from __future__ import annotations

from pathlib import Path

from workbench.config.lane import Configuration, with_engine
from workbench.engines.gguf_model import plain_gguf
from workbench.engines.models import Model, find_model
from workbench.errors import ConfigurationError
from workbench.paths import expanded
from workbench.run.convert import converter
from workbench.run.prepare import Prepared, Say, check_model, told, transformers_python, usable_environment
from workbench.run.weights import check_weights
from workbench.session.tokenizer import Tokenizer


def lane_model(configuration: Configuration, reference: Configuration, prepared: Prepared, say: Say) -> Model:
    """The lane's model. Raises ConfigurationError where it cannot run this lane on the reference's tokens."""
    usable_environment(configuration.engine)
    model, tokens = prepared.model, len(prepared.rendered)
    if configuration.model == reference.model:
        check_model(configuration, model.facts, tokens)
        check_weights(configuration, model)
        return model
    path = expanded(configuration.model)
    if configuration.engine == "llamacpp" and path.suffix == ".gguf" and path.is_file():
        plain = plain_gguf(path, model, prepared.tokenizer, told(say))
        check_model(configuration, plain.facts, tokens)
        return plain
    other = find_model(configuration.model, converter(transformers_python), told(say))
    if Tokenizer.load(other.folder).hash != prepared.tokenizer.hash:
        raise ConfigurationError(
            f"{other.name} has another tokenizer than {model.name}",
            where=f"lane {configuration.to_line()}",
            next="Distributions over different tokens cannot be compared.",
        )
    check_model(configuration, other.facts, tokens)
    check_weights(configuration, other)
    return other


def free_name(configuration: Configuration, reference: Configuration, taken: set[str]) -> str:
    """What differs from the reference, made unique among the names that are `taken`."""
    # Beside another engine only what departs from that engine's own defaults is worth a word.
    mine, theirs = configuration.to_json(), with_engine(reference, configuration.engine).to_json()
    parts = [configuration.engine] if configuration.engine != reference.engine else []
    mine["model"], theirs["model"] = Path(str(mine["model"])).name, Path(str(theirs["model"])).name
    parts += [f"{axis} {mine[axis]}" for axis in mine if axis != "extra" and mine[axis] != theirs[axis]]
    parts += [f"{key} {value}" for key, value in configuration.extra]
    name = " · ".join(parts) or "reference again"
    return next(n for n in (name, *(f"{name} ({count})" for count in range(2, 1000))) if n not in taken)
