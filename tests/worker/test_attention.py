from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from transformers.integrations import sdpa_attention

from workbench.config.axes import check
from workbench.config.lane import parse_spec
from workbench.errors import ConfigurationError
from workbench.worker.attention import allowing, effective, implementation
from workbench.worker.backends.transformers import make
from workbench.worker.loaded import Loaded

KERNELS = {
    "sdpa": ["sdpa-flash"],
    "sdpa-flash": ["sdpa-flash"],
    "sdpa-math": ["sdpa-math"],
    "eager": ["eager: none of torch's sdpa kernels"],
}


@pytest.mark.parametrize("attention", KERNELS)
def test_a_kernel_is_forced_and_read_back_from_what_ran(tiny, recorder, attention):
    backend = make()
    started = backend.start(parse_spec(f"transformers:attn={attention}"), tiny, 64, recorder())
    assert (started["attn"], started["attn_kernels"]) == (attention, KERNELS[attention])
    assert backend.loaded is not None
    assert backend.loaded.cache.length == 0
    backend.stop()


def test_every_kernel_gives_the_same_logits_up_to_rounding(tiny, loaded, stream):
    outputs = []
    for attention in KERNELS:
        model = loaded(tiny, "fp32", attention=implementation(attention))
        model = Loaded(model.model, model.cache, model.device, model.vocabulary, attention)
        with torch.inference_mode():
            outputs.append(torch.cat([model.forward(stream[:60], 60), model.forward(stream[60:61], 1)]))
    assert all(torch.allclose(outputs[0], output, atol=1e-5) for output in outputs)


def test_another_kernel_than_the_one_named_is_not_taken_for_it():
    ran = frozenset({"_scaled_dot_product_attention_math", "scaled_dot_product_attention"})
    assert effective("sdpa-flash", "sdpa", ran) == (None, ["sdpa-math"])
    assert effective("sdpa", "sdpa", ran) == ("sdpa", ["sdpa-math"])
    assert effective("eager", "eager", ran)[0] is None
    assert effective("sdpa", "sdpa", frozenset()) == (None, [])
    assert effective("owner/kernel", "owner/kernel", frozenset())[0] == "owner/kernel"


@pytest.mark.parametrize(
    "attention", ["sdpa-efficient", "flash_attention_2", "flash_attention_3", "kernels-community/flash-attn3"]
)
def test_what_needs_a_gpu_is_refused_on_a_cpu(attention):
    with pytest.raises(ConfigurationError, match=f"cannot do attn={attention}: it needs a GPU"):
        check(parse_spec(f"transformers:device=cpu,attn={attention}"))


@pytest.mark.parametrize("attention", ["flash_attention_2", "owner/kernel"])
def test_a_package_that_is_not_here_is_named(attention):
    with pytest.raises(ConfigurationError, match="needs the package"):
        implementation(attention)


def test_the_efficient_kernel_is_not_asked_to_share_keys_among_heads(monkeypatch):
    key = torch.zeros(1, 2, 4, 32)
    monkeypatch.setenv("TRANSFORMERS_SDPA_FORCE_GQA", "0")
    assert sdpa_attention.use_gqa_in_sdpa(None, key, key)
    with allowing("sdpa-flash"):
        assert sdpa_attention.use_gqa_in_sdpa(None, key, key)
    with allowing("sdpa-efficient"):
        assert not sdpa_attention.use_gqa_in_sdpa(None, key, key)
    assert sdpa_attention.use_gqa_in_sdpa(None, key, key)


def test_a_kernel_that_takes_no_mask_is_refused_before_the_second_chunk_needs_one(tiny, recorder, monkeypatch):
    flash = functional.scaled_dot_product_attention

    def as_cuda_does(*args, attn_mask=None, **kwargs):
        if attn_mask is not None:
            raise RuntimeError("No available kernel. Aborting execution.")
        return flash(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", as_cuda_does)
    backend = make()
    assert backend.start(parse_spec("transformers:attn=sdpa-flash,chunk=64"), tiny, 64, recorder())["attn"] is not None
    with pytest.raises(ConfigurationError, match="no such kernel"):
        backend.start(parse_spec("transformers:attn=sdpa-flash,chunk=32"), tiny, 64, recorder())
    backend.stop()
