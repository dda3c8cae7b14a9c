"""Int8 weights: per-output-channel symmetric codes for a decoder's Linear layers, activations untouched (w8a16)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

PACKED_ROWS = 8
# Measured on one AVX-512 core (1,536 x 576, bf16, ms): 1 row bf16 0.11, packed kernel 0.05, dequantise + linear 0.34;
# 8 rows 0.16, 0.17, 0.35; 512 rows 0.77, 10.9, 1.13. So few rows take torch's packed kernel, many the plain product.


class Int8Linear(nn.Module):
    """A Linear whose weight is int8 codes (out, in) and one scale per output channel in the activations' dtype."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        scale = (weight.float().abs().amax(dim=1) / 127).to(weight.dtype)
        # Codes follow the rounded scale, so that rounding it costs no accuracy; an all-zero channel keeps code 0.
        safe = torch.where(scale > 0, scale, torch.ones_like(scale)).float()
        codes = torch.round(weight.float() / safe[:, None]).clamp_(-127, 127).to(torch.int8)
        self.codes = nn.Buffer(codes)
        self.scale = nn.Buffer(scale)
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out). Codes are exact in bf16, so the scale is applied to the product, not the weight."""
        rows = x.numel() // self.in_features
        if rows <= PACKED_ROWS and x.device.type == "cpu":
            flat = x.reshape(rows, self.in_features)
            out = torch.ops.aten._weight_int8pack_mm(flat, self.codes, self.scale)
            out = out.view(*x.shape[:-1], self.out_features)
        else:
            out = functional.linear(x, self.codes.to(x.dtype)) * self.scale
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, int8 per output channel"


def quantize_linears(model: nn.Module, prefix: str = "model.layers.") -> int:
    """Replace each Linear below `prefix` by its int8 form, freeing the original at once; returns how many."""
    names = [
        name for name, module in model.named_modules() if name.startswith(prefix) and isinstance(module, nn.Linear)
    ]
    for name in names:
        parent_name, _, leaf = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        setattr(parent, leaf, Int8Linear(getattr(parent, leaf)))
    return len(names)
