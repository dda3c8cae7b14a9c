"""What one side of a layer's KV cache, its keys or its values, is stored as: plain, or quantised by groups.

Groups lie along head_dim, one scale a token and group; or, for keys by KIVI's rule (arXiv:2402.02750), along tokens,
one scale a channel and group of tokens. int8, int4 and int2 are unsigned codes with a float16 scale and minimum,
x ~ code * scale + minimum; float16 rather than bfloat16, whose 8 bits of mantissa would cost about as much as the int8
codes themselves. fp8 is e4m3 with a float16 scale. A token is quantised once: when it arrives, or, behind a window of
the newest tokens that stay exact, when it leaves the window. That is decided at the end of each pass, before attention
reads, so that a chunk longer than the window carries the errors within itself.
"""

from __future__ import annotations

from typing import Any

import torch

from workbench.config.rules import PAIR_WORDS

BITS = {"int8": 8, "int4": 4, "int2": 2}
FP8 = "fp8"
QUANTIZED = (*BITS, FP8)
PLAIN = {"bf16": torch.bfloat16, "fp32": torch.float32}
CPU_BLOCK, DEVICE_BLOCK = 1024, 16384
"""Tokens dequantised at a time. 8,192 tokens of 3 heads of 64 took 0.71 ms in blocks of 1,024, 1.11 ms at once: L2."""
_FP8_MAX = float(torch.finfo(torch.float8_e4m3fn).max)


def word(keys: str, values: str) -> str:
    """The configuration's word for what two sides store: the inverse of `rules.keys_and_values`."""
    if keys == values:
        return keys
    bits = {name: digits for digits, name in PAIR_WORDS.items()}
    return f"k{bits.get(keys, keys)}v{bits.get(values, values)}"


class PlainStore:
    """Values as they are, in `dtype`: (heads, context, head_dim)."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.length = 0

    @property
    def kind(self) -> str:
        """The configuration's word, read from the tensor."""
        return {dtype: name for name, dtype in PLAIN.items()}[self.values.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes stored."""
        return self.values.nbytes

    def put(self, states: torch.Tensor) -> None:
        """Append states (heads, n, head_dim)."""
        stop = self.length + states.shape[1]
        self.values[:, self.length : stop].copy_(states)
        self.length = stop

    def read(self, output: torch.Tensor | None, block: torch.Tensor | None) -> torch.Tensor:
        """What is stored, (heads, length, head_dim): as it lies, or copied into `output` of another dtype."""
        stored = self.values[:, : self.length]
        return stored if output is None else output[:, : self.length].copy_(stored)

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens."""
        self.length = length

    def describe(self) -> str:
        """What the tensor is, in words."""
        return str(self.values.dtype).removeprefix("torch.")


class GroupedStore:
    """Codes with a scale (and a minimum) for each group; the newest tokens may be exact, in `tail`.

    `step` tokens are quantised together: 1, or a group's length where groups lie along tokens (`channel`). `codes` is
    uint8, (heads, context, groups, bytes) or by channel (heads, context / step, step, bytes).
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        kind: str,
        group: int,
        attended: torch.dtype,
        device: torch.device,
        window: int = 0,
        channel: bool = False,
    ) -> None:
        heads, context, head_dim = shape
        self.bits, self.group, self.channel = BITS.get(kind, 0), group, channel
        self.window, self.step = min(window, context), group if channel else 1
        self.head_dim, self.length, self.done = head_dim, 0, 0
        rows = -(-context // group) if channel else context
        within = (group, head_dim) if channel else (head_dim // group, group)
        packed = within[1] * (self.bits or 8) // 8
        per_scale = (1, head_dim) if channel else (within[0], 1)
        self.codes = torch.zeros((heads, rows, within[0], packed), dtype=torch.uint8, device=device)
        self.scale = torch.zeros((heads, rows, *per_scale), dtype=torch.float16, device=device)
        self.minimum = torch.zeros_like(self.scale) if self.bits else None
        room = min(context, self.window + self.step - 1)
        self.tail = torch.empty((heads, room, head_dim), dtype=attended, device=device) if room else None

    @property
    def kind(self) -> str:
        """The configuration's word, read from how the codes are read."""
        return {bits: name for name, bits in BITS.items()}.get(self.bits, FP8)

    @property
    def nbytes(self) -> int:
        """Bytes stored: codes, scales, minima, and the exact newest tokens."""
        return sum(x.nbytes for x in (self.codes, self.scale, self.minimum, self.tail) if x is not None)

    def put(self, states: torch.Tensor) -> None:
        """Append states (heads, n, head_dim), and quantise what lies behind the window, whole steps of it."""
        held = self.length - self.done
        pending = states if not held or self.tail is None else torch.cat((self.tail[:, :held].to(states), states), 1)
        self.length += states.shape[1]
        done = max(self.done, (self.length - self.window) // self.step * self.step)
        count = done - self.done
        if count:
            grouped = self._grouped(pending[:, :count])
            rows = slice(self.done // self.step, done // self.step)
            parts = quantize(grouped, self.bits, -2 if self.channel else -1)
            for store, part in zip((self.codes, self.scale, self.minimum), parts, strict=True):
                if store is not None and part is not None:
                    store[:, rows] = part
        if self.length > done:
            assert self.tail is not None
            self.tail[:, : self.length - done] = pending[:, count:]
        self.done = done

    def read(self, output: torch.Tensor | None, block: torch.Tensor | None) -> torch.Tensor:
        """What is stored, (heads, length, head_dim), dequantised into `output`, through `block` (float32) if given."""
        assert output is not None
        size = max(self.step, (self.done if block is None else block.shape[1]) // self.step * self.step)
        for start in range(0, self.done, size):
            stop = min(start + size, self.done)
            target = output[:, start:stop] if block is None else block[:, : stop - start]
            self._dequantize(start, stop, target)
            if block is not None:
                output[:, start:stop] = target
        if self.length > self.done:
            assert self.tail is not None
            output[:, self.done : self.length] = self.tail[:, : self.length - self.done]
        return output[:, : self.length]

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens. What was quantised stays so: the part of a group that a cut leaves becomes
        the newest tokens again, with the values it was rounded to."""
        base = min(self.done, length) // self.step * self.step
        if base < self.done and length > base:
            assert self.tail is not None
            whole = torch.empty(
                (self.codes.shape[0], self.step, self.head_dim), dtype=torch.float32, device=self.codes.device
            )
            self._dequantize(base, base + self.step, whole)
            self.tail[:, : length - base] = whole[:, : length - base]
        self.done, self.length = base, length

    def describe(self) -> str:
        """What the tensors are, in words."""
        name = f"int{self.bits}" if self.bits else "fp8 (e4m3)"
        how = f"per channel, groups of {self.group} tokens" if self.channel else f"per token, groups of {self.group}"
        scale = str(self.scale.dtype).removeprefix("torch.") + (" scale and minimum" if self.bits else " scale")
        exact = f"; the newest {self.window} tokens exact" if self.window else ""
        return f"{name} {how}, {scale}{exact}"

    def _grouped(self, states: torch.Tensor) -> torch.Tensor:
        heads, count, head_dim = states.shape
        if self.channel:
            return states.reshape(heads, count // self.step, self.step, head_dim)
        return states.reshape(heads, count, head_dim // self.group, self.group)

    def _dequantize(self, start: int, stop: int, target: torch.Tensor) -> None:
        """Write tokens `start` to `stop`, both at steps, into target (heads, stop − start, head_dim)."""
        rows = slice(start // self.step, stop // self.step)
        codes, minimum = self.codes[:, rows], self.minimum
        shape = (*codes.shape[:3], self.head_dim if self.channel else self.group)
        dequantize(
            codes, self.scale[:, rows], None if minimum is None else minimum[:, rows], self.bits, target.view(shape)
        )


def quantize(values: torch.Tensor, bits: int, dim: int = -1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Codes (..., last * bits / 8) uint8, scale and minimum float16 of groups along `dim`, which they keep with size 1.

    `bits` 0 is fp8 e4m3: a byte a value, no minimum. The codes follow the rounded scale and minimum. Packed bytes hold
    the last axis in as many equal parts as values fit a byte, the first part in the lowest bits.
    """
    values = values.float()
    if not bits:
        scale = (values.abs().amax(dim=dim, keepdim=True) / _FP8_MAX).half()
        step = scale.float()
        codes = (values / torch.where(step > 0, step, torch.inf)).clamp_(-_FP8_MAX, _FP8_MAX)
        return codes.to(torch.float8_e4m3fn).view(torch.uint8), scale, None
    low, high = values.aminmax(dim=dim, keepdim=True)
    levels = (1 << bits) - 1
    minimum = low.half()
    scale = ((high - low) / levels).half()
    step = scale.float()
    # A group of equal values, or one too narrow for float16, has scale 0: its codes are 0, its values the minimum.
    codes = (values - minimum.float()).div_(torch.where(step > 0, step, torch.inf)).round_().clamp_(0, levels)
    parts = codes.to(torch.uint8).chunk(8 // bits, dim=-1)
    packed = parts[0]
    for index, part in enumerate(parts[1:], 1):
        packed = packed | (part << (bits * index))
    return packed, scale, minimum


def dequantize(
    codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor | None, bits: int, out: torch.Tensor
) -> None:
    """Write the float32 values of `quantize`'s groups into `out`."""
    if not bits:
        out.copy_(codes.view(torch.float8_e4m3fn))
    elif bits == 8:
        out.copy_(codes)
    else:
        mask = (1 << bits) - 1
        for index, part in enumerate(out.chunk(8 // bits, dim=-1)):
            shifted = codes >> (bits * index) if index else codes
            part.copy_(shifted if index == 8 // bits - 1 else shifted & mask)
    out.mul_(scale.float())
    if minimum is not None:
        out.add_(minimum.float())


Store = PlainStore | GroupedStore


def make_store(
    kind: str, shape: tuple[int, int, int], attended: torch.dtype, device: torch.device, own: dict[str, Any]
) -> Store:
    """A side of one layer; `own` holds group, window and channel of a quantised one."""
    if kind in PLAIN:
        return PlainStore(shape, PLAIN[kind], device)
    return GroupedStore(shape, kind, int(own["group"]), attended, device, int(own["window"]), bool(own["channel"]))
