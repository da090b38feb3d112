"""Attention backends by name.

vidgen's models call diffusers' `dispatch_attention_fn`, so every kernel diffusers knows (PyTorch's own SDPA variants,
FlexAttention, FlashAttention, SageAttention, xFormers) is a name and never an import in a model file. This module
answers two questions before a long run starts: which of these names work here, and why not the others.
"""

from __future__ import annotations

import importlib.util
import logging
import warnings

import torch

from .errors import VidgenError, suggestion

logger = logging.getLogger(__name__)

# Names people know from elsewhere. "auto" leaves the choice among PyTorch's kernels to PyTorch, call by call.
ALIASES = {"auto": "native", "sdpa": "native"}

_warned: set[str] = set()


class AttentionBackendError(VidgenError):
    """An attention backend is unknown, or can't run on the chosen device."""


def _probe(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Run one tiny attention call through backend `name`; return None, or the first line of what went wrong."""
    from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn

    hidden_states = torch.zeros(1, 128, 2, 64, device=device, dtype=dtype)  # (batch, sequence, heads, head_dim)
    try:
        # Kernels which PyTorch rejects explain themselves in a warning each; the error that follows is enough here.
        with warnings.catch_warnings(), torch.no_grad(), attention_backend(name):
            warnings.simplefilter("ignore")
            dispatch_attention_fn(hidden_states, hidden_states, hidden_states)
    except (RuntimeError, ValueError, TypeError, ImportError, AssertionError) as error:
        return str(error).strip().split("\n")[0] or type(error).__name__
    return None


def _why_hub_kernel_unusable(device: torch.device) -> str | None:
    """Judge a backend whose kernel is fetched from the Hub, without fetching it."""
    from huggingface_hub import constants

    if device.type != "cuda":
        return f"needs a CUDA device, not {device.type}"
    if importlib.util.find_spec("kernels") is None:
        return "needs the kernels package: pip install kernels"
    if constants.HF_HUB_OFFLINE:
        return "its kernel is downloaded from the Hub at first use, and HF_HUB_OFFLINE is set"
    return None


def list_attention_backends(
    device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> dict[str, str | None]:
    """Find out which of diffusers' attention backends work on a device, by running each on a tiny input.

    Args:
        device: Where the model is going to run.
        dtype: Precision of queries, keys and values. None: bfloat16 on CUDA, float32 elsewhere.

    Returns:
        Backend name -> None when usable, else the reason why not. Backends whose kernel lives on the Hub are judged by
        what is installed; nothing is downloaded.
    """
    from diffusers.models.attention_dispatch import AttentionBackendName

    device = torch.device(device)
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    return {backend.value: _why_unusable(backend.value, device, dtype) for backend in AttentionBackendName}


def _why_unusable(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    return _why_hub_kernel_unusable(device) if name.endswith("_hub") else _probe(name, device, dtype)


def resolve_attention_backend(name: str, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> str:
    """Turn a backend name given by a user into one that `model.set_attention_backend` accepts and that works.

    Args:
        name: A name diffusers knows, such as "native", "flex", "flash" or "xformers"; "auto" and "sdpa" mean "native".
        device: Where the model is going to run.
        dtype: Precision of queries, keys and values. None: bfloat16 on CUDA, float32 elsewhere.

    Returns:
        The name diffusers knows.

    Raises:
        AttentionBackendError: The name is unknown, or the backend can't run here. A working backend is never chosen in
            place of the one that was asked for.
    """
    from diffusers.models.attention_dispatch import AttentionBackendName

    device = torch.device(device)
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    known = [backend.value for backend in AttentionBackendName]
    resolved = ALIASES.get(name.lower(), name.lower())
    if resolved not in known:
        public = [backend for backend in known if not backend.startswith("_")]
        raise AttentionBackendError(f"unknown attention backend {name!r}: {suggestion(resolved, [*ALIASES, *public])}")
    reason = _why_unusable(resolved, device, dtype)
    if reason is not None:
        raise AttentionBackendError(
            f"attention backend {name!r} can't run on {device}: {reason} "
            "('native' always works; `vidgen doctor` lists the others)"
        )
    if resolved in ("flex", "_native_math") and device.type == "cpu" and resolved not in _warned:
        _warned.add(resolved)
        logger.warning("attention backend %r is slower than 'native' on the CPU", resolved)
    return resolved
