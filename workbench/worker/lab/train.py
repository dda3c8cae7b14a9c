"""LoRA on a model that acts in the router lab: one session a step, loss on what the assistant writes, AdamW.

fp32 master weights, bf16 compute, logits only where there is loss. The learning rate follows the larger of the shares
of time and of sessions used, so that a run ends annealed however busy the machine is.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM

from workbench.errors import ModelError
from workbench.worker.lab import checkpoint
from workbench.worker.lab.data import Sessions, read_sessions
from workbench.worker.lab.lora import add_adapters, write_adapter

Say = Callable[[dict[str, Any]], None]
_RECOMPUTE_FROM = 2500
"""Tokens of a session from which activations are computed twice instead of kept (0.8 MB a token)."""
_SMOOTHING = 0.9


@dataclass(frozen=True, slots=True)
class Plan:
    """A training run. `minutes` is its whole length over all resumes; `base` names the model and its weights hash."""

    model: str
    data: str
    output: str
    base: dict[str, Any]
    recipe: dict[str, Any]
    minutes: float
    checkpoint_minutes: float = 5.0
    threads: int = 2
    rank: int = 16
    alpha: float = 32.0
    rate: float = 1.5e-3
    betas: tuple[float, float] = (0.9, 0.98)
    warmup: int = 12
    last: float = 0.05  # of the learning rate
    clip: float = 1.0
    seed: int = 0

    def run(self, digest: str) -> dict[str, Any]:
        """What makes a run this run: a checkpoint of another one is not continued."""
        left_out = ("model", "data", "output", "checkpoint_minutes", "threads")
        kept = {key: value for key, value in asdict(self).items() if key not in left_out}
        return {**kept, "betas": list(self.betas), "data_sha256": digest}


def train(plan: Plan, say: Say) -> dict[str, Any]:
    """Train, or continue; returns the facts that stand in `training.json`. Raises ModelError.

    The adapter is written at every checkpoint, so that a run that was ended early has left one.
    """
    torch.set_num_threads(plan.threads)
    output = Path(plan.output)
    sessions = read_sessions(Path(plan.data))
    model = _load(Path(plan.model))
    trained = add_adapters(model, plan.rank, plan.alpha, plan.seed)
    optimizer = torch.optim.AdamW(trained.values(), lr=plan.rate, betas=plan.betas, weight_decay=0.0)
    run = plan.run(sessions.digest)
    facts = checkpoint.load(output / "checkpoint", trained, optimizer, run)
    state = _State(**(facts["state"] if facts else {}))
    if not facts:
        state.held = [held_out_loss(model, sessions)]
    say({"sessions": sessions.trained, "step": state.step, "held_out_loss": state.held[-1], "resumed": bool(facts)})

    def keep() -> None:
        size = write_adapter(output, trained, plan.rank, plan.alpha, _about(plan, run, state))
        facts = {"run": run, "step": state.step, "state": asdict(state)}
        checkpoint.save(output / "checkpoint", trained, optimizer, facts)
        say({"kept": str(output), "step": state.step, "adapter_bytes": size, "held_out_loss": state.held[-1]})

    limit, saved = plan.minutes * 60, time.monotonic()
    with _stopping() as stopped:
        while state.step < sessions.trained and state.seconds < limit and not stopped():
            began = time.monotonic()
            for group in optimizer.param_groups:
                group["lr"] = plan.rate * _share(plan, state, limit, sessions.trained)
            _step(plan, model, trained, optimizer, sessions, state)
            state.seconds += time.monotonic() - began
            say({"step": state.step, "loss": state.loss, "tokens": state.tokens, "seconds": round(state.seconds, 1)})
            if time.monotonic() - saved > plan.checkpoint_minutes * 60:
                state.held.append(held_out_loss(model, sessions))
                keep()
                saved = time.monotonic()
        finished = not stopped()
    if finished:
        state.finished = True
        state.held.append(held_out_loss(model, sessions))
    keep()
    return _about(plan, run, state)


def _load(folder: Path) -> nn.Module:
    try:
        model = LlamaForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, attn_implementation="sdpa", use_safetensors=True, local_files_only=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"it cannot be loaded: {error}", where=str(folder)) from error
    return model.requires_grad_(False)


@dataclass(slots=True)
class _State:
    step: int = 0
    tokens: int = 0
    learned: int = 0
    seconds: float = 0.0
    loss: float = 0.0  # a moving mean
    held: list[float] = field(default_factory=list)  # held-out loss at the start and at every checkpoint
    curve: list[tuple[int, float]] = field(default_factory=list)  # step, loss
    finished: bool = False


def _step(
    plan: Plan,
    model: nn.Module,
    trained: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    sessions: Sessions,
    state: _State,
) -> None:
    ids, learn = sessions[state.step]
    loss = session_loss(model, torch.from_numpy(ids.astype("int64")), torch.from_numpy(learn))
    loss.backward()
    norm = nn.utils.clip_grad_norm_(trained.values(), plan.clip)
    value = float(loss.detach())
    if not math.isfinite(value) or not math.isfinite(float(norm)):
        raise ModelError(
            f"the loss of step {state.step} is not a number", where="training", next="Lower the learning rate."
        )
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    state.loss = value if not state.step else _SMOOTHING * state.loss + (1 - _SMOOTHING) * value
    state.step += 1
    state.tokens += len(ids)
    state.learned += int(learn.sum())
    if state.step % 10 == 1:
        state.curve.append((state.step, round(state.loss, 5)))


def session_loss(model: Any, ids: Tensor, learn: Tensor) -> Tensor:
    """Mean cross-entropy, in nats, of the tokens of one session that `learn` marks; ids (tokens,)."""
    model.train()
    if len(ids) >= _RECOMPUTE_FROM:
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        model.activation_checkpointing_disable()
    hidden = model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
    wanted = torch.nonzero(learn[1:])[:, 0]  # position t predicts token t + 1
    logits = model.lm_head(hidden[wanted])
    return functional.cross_entropy(logits.float(), ids[wanted + 1])


def held_out_loss(model: Any, sessions: Sessions) -> float:
    """Mean loss over the sessions that are not trained on, each token alike."""
    total, count = 0.0, 0
    with torch.no_grad():
        for index in range(sessions.trained, sessions.trained + sessions.held):
            ids, learn = sessions[index]
            marked = int(learn[1:].sum())
            loss = session_loss(model, torch.from_numpy(ids.astype("int64")), torch.from_numpy(learn))
            total += float(loss) * marked
            count += marked
    return total / count


def _share(plan: Plan, state: _State, limit: float, steps: int) -> float:
    """Of the learning rate: a linear warm-up, then half a cosine down to `last`."""
    used = min(1.0, max(state.seconds / limit, state.step / steps))
    return min(1.0, (state.step + 1) / plan.warmup) * (
        plan.last + (1 - plan.last) * 0.5 * (1 + math.cos(math.pi * used))
    )


def _about(plan: Plan, run: dict[str, Any], state: _State) -> dict[str, Any]:
    figures = asdict(state)
    return {"base": plan.base, "licence": "Apache-2.0", "run": run, "torch": torch.__version__, **figures}


@contextmanager
def _stopping() -> Any:
    """A function that says whether to stop after this step: a signal came, or whoever started us is gone."""
    seen: list[int] = []
    parent = os.getppid()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda got, _: seen.append(got)) for number in numbers}
    try:
        yield lambda: bool(seen) or os.getppid() != parent
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
