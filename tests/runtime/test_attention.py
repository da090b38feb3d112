"""What would be wrong: a backend reported as usable that then fails, or a silent switch to another backend."""

from __future__ import annotations

import pytest
import torch

from vidgen.runtime.attention import AttentionBackendError, list_attention_backends, resolve_attention_backend


@pytest.fixture(scope="module")
def backends():
    return list_attention_backends("cpu")


def test_backends_reported_usable_match_plain_attention(backends):
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 128, 2, 32, generator=generator).unbind(0)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    ).transpose(1, 2)
    usable = [name for name, reason in backends.items() if reason is None]
    assert "native" in usable
    for name in usable:
        output = dispatch_attention_fn(query, key, value, backend=name)
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-4)


def test_every_unusable_backend_says_why_in_one_line(backends):
    reasons = {name: reason for name, reason in backends.items() if reason is not None}
    assert "flash_hub" in reasons, "a CUDA kernel can't be usable on the CPU"
    for name, reason in reasons.items():
        assert reason and "\n" not in reason, name


def test_probing_leaves_the_active_backend_alone():
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    before = _AttentionBackendRegistry.get_active_backend()[0]
    list_attention_backends("cpu")
    assert _AttentionBackendRegistry.get_active_backend()[0] == before


@pytest.mark.parametrize("name", ["native", "auto", "sdpa", "NATIVE"])
def test_common_names_mean_native(name):
    assert resolve_attention_backend(name) == "native"


def test_unknown_name_gets_the_nearest_one():
    with pytest.raises(AttentionBackendError, match="unknown attention backend 'nativ': did you mean 'native'"):
        resolve_attention_backend("nativ")


def test_unusable_backend_is_refused_not_replaced(backends):
    name = next(name for name, reason in backends.items() if reason is not None)
    with pytest.raises(AttentionBackendError, match=f"attention backend '{name}' can't run on cpu"):
        resolve_attention_backend(name)


@pytest.mark.gpu
def test_native_kernels_work_on_cuda_in_bfloat16():
    backends = list_attention_backends("cuda")
    assert backends["native"] is None
    assert backends["_native_flash"] is None
