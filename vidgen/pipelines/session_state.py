"""What a session is made of: its fixed settings, the state that every chunk replaces, and the file of both."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vidgen.memory import KVMemory, make_memory
from vidgen.models.streaming_vae import StreamingVAEDecoder
from vidgen.pipelines.prompt_plan import PromptPlan
from vidgen.runtime.checkpoint import load_safetensors, save_safetensors
from vidgen.runtime.checks import check_whole
from vidgen.runtime.errors import VidgenError, suggestion

if TYPE_CHECKING:
    from vidgen.pipelines.context_forcing import ContextForcingPipeline

SESSION_SCHEMA = 1
PROMPT_SWITCHES = ("recache", "keep", "flush")
# Enough values of each weight to tell two checkpoints apart, few enough to read in no time.
FINGERPRINT_VALUES = 16
# Fields of SessionState that are plain values; the others are tensors or write themselves.
PLAIN_FIELDS = (
    "latent_ids",
    "active_prompts",
    "requested_switch",
    "first_block",
    "emits_input",
    "time_origin",
    "chunk_index",
    "num_frames_emitted",
)


class GenerationError(VidgenError):
    """A generation cannot start or continue."""


class SessionFileError(VidgenError):
    """A session file is unreadable or belongs to another model or version."""


@dataclasses.dataclass(frozen=True)
class GenerationSettings:
    """What stays fixed during a session.

    Attributes:
        height: pixels.
        width: pixels.
        fps: frames per second, which turns the prompt plan's seconds into frames.
        num_frames: frames to generate, those of a conditioning video not counted; `None` for no end.
        num_inference_steps: denoising steps of a chunk.
        guidance_scale: classifier-free guidance; 1 is off.
        negative_prompts: one per sample.
        prompt_switch: what happens to the memory when the plan changes the prompt: `"recache"` recomputes the keys and
            values of sink and newest frames under the new prompt, `"keep"` leaves them, `"flush"` drops all but the
            sink and the last chunk.
        undo_depth: chunks that `undo` can take back.
        decode: whether `step` returns frames rather than latents.
    """

    height: int
    width: int
    fps: float
    num_frames: int | None
    num_inference_steps: int
    guidance_scale: float
    negative_prompts: tuple[str, ...]
    prompt_switch: str = "recache"
    undo_depth: int = 1
    decode: bool = True

    def __post_init__(self) -> None:
        check_prompt_switch(self.prompt_switch)
        check_whole(0, undo_depth=self.undo_depth)


def check_prompt_switch(mode: str) -> None:
    """Raise a `GenerationError` unless `mode` names a way of switching prompts."""
    if mode not in PROMPT_SWITCHES:
        raise GenerationError(f"Unknown prompt_switch {mode!r}: {suggestion(str(mode), PROMPT_SWITCHES)}")


@dataclasses.dataclass
class SessionState:
    """What changes from chunk to chunk. Copies share tensors, which are replaced and never written to."""

    memory: KVMemory
    decoder: StreamingVAEDecoder
    plans: list[PromptPlan]
    latents: torch.Tensor  # (batch, channels, frames, h, w) clean latents that a recache may need, on the CPU
    latent_ids: list[int]
    pending_frames: torch.Tensor | None  # (batch, frames, height, width, 3) uint8: decoded input, not emitted yet
    active_prompts: list[str] | None = None
    requested_switch: str | None = None  # by set_prompt, for the next chunk
    first_block: int = 0  # latent frames of the very first block
    emits_input: bool = True  # whether given frames are part of the output
    time_origin: int = 0  # frames of the conditioning video, which the prompt plan and num_frames don't count
    chunk_index: int = 0
    num_frames_emitted: int = 0

    def copy(self) -> SessionState:
        return dataclasses.replace(
            self,
            memory=self.memory.clone(),
            decoder=self.decoder.clone(),
            plans=list(self.plans),
            latent_ids=list(self.latent_ids),
        )


# --- files ------------------------------------------------------------------------------------------------------


def pipeline_fingerprint(pipe: ContextForcingPipeline) -> dict[str, str]:
    """Hash of the parts of a pipeline that decide what a session generates."""

    def config_of(component: Any) -> str:
        config = {name: value for name, value in dict(component.config).items() if not name.startswith("_")}
        return json.dumps(config, sort_keys=True, default=str)

    fingerprint = {"scheduler": hashlib.sha256((type(pipe.scheduler).__name__ + config_of(pipe.scheduler)).encode())}
    for name in ("transformer", "vae"):
        component = getattr(pipe, name)
        digest = hashlib.sha256(config_of(component).encode())
        for parameter_name, parameter in component.named_parameters():
            digest.update(parameter_name.encode())
            if parameter.device.type != "meta":
                stride = max(1, parameter.numel() // FINGERPRINT_VALUES)
                values = parameter.detach().flatten()[::stride][:FINGERPRINT_VALUES]
                digest.update(values.float().cpu().numpy().tobytes())
        fingerprint[name] = digest
    return {name: digest.hexdigest() for name, digest in fingerprint.items()}


def save_session(
    path: str | Path,
    pipe: ContextForcingPipeline,
    settings: GenerationSettings,
    state: SessionState,
    sample_seeds: Sequence[int],
    noise: torch.Tensor | None,
) -> None:
    """Write what a session needs to continue, and the fingerprint of its pipeline, to one safetensors file."""
    tensors = {f"memory.{name}": tensor for name, tensor in state.memory.state_dict().items()}
    tensors |= {f"decoder.{name}": tensor for name, tensor in state.decoder.state_dict().items()}
    tensors["latents"] = state.latents
    if state.pending_frames is not None:
        tensors["pending_frames"] = state.pending_frames
    if noise is not None:
        tensors["noise"] = noise
    header = {
        "schema": SESSION_SCHEMA,
        "fingerprint": pipeline_fingerprint(pipe),
        "settings": dataclasses.asdict(settings),
        "memory": {
            "name": state.memory.name,
            "config": dataclasses.asdict(state.memory.config),
            "num_frames_per_block": state.memory.num_frames_per_block,
        },
        "sample_seeds": list(sample_seeds),
        "plans": [plan.to_list() for plan in state.plans],
        "state": {name: getattr(state, name) for name in PLAIN_FIELDS},
    }
    save_safetensors(tensors, path, {"vidgen_session": json.dumps(header)})


def load_session(
    path: str | Path, pipe: ContextForcingPipeline
) -> tuple[GenerationSettings, SessionState, list[int], torch.Tensor | None]:
    """Settings, state, sample seeds and given noise (or `None`) of a file that `save_session` wrote.

    Raises:
        SessionFileError: when the file isn't a session, comes from a newer version, or from other models than `pipe`.
        CheckpointError: when the file is missing or damaged.
    """
    tensors, metadata = load_safetensors(path)
    if "vidgen_session" not in metadata:
        raise SessionFileError(f"{path} is a safetensors file, but not a saved session.")
    try:
        header = json.loads(metadata["vidgen_session"])
        schema, fingerprint = int(header["schema"]), dict(header["fingerprint"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SessionFileError(f"{path} is damaged: its header can't be read ({type(error).__name__}).") from error
    if schema > SESSION_SCHEMA:
        raise SessionFileError(
            f"{path} has session schema {schema}; this version reads up to {SESSION_SCHEMA}. Update vidgen."
        )
    expected = pipeline_fingerprint(pipe)
    different = [name for name, digest in expected.items() if fingerprint.get(name) != digest]
    if different:
        raise SessionFileError(
            f"{path} was saved with another {' and '.join(different)} (configuration, weights, dtype or LoRA); "
            "continue it with the pipeline that began it."
        )
    try:
        settings, state = _read_session(pipe, header, tensors)
        _check_shapes(pipe, settings, state, tensors, len(header["sample_seeds"]))
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, RuntimeError) as error:
        raise SessionFileError(f"{path} is damaged: {str(error) or type(error).__name__}") from error
    state.memory.to(pipe._execution_device)
    return settings, state, header["sample_seeds"], tensors.get("noise")


def _read_session(
    pipe: ContextForcingPipeline, header: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> tuple[GenerationSettings, SessionState]:
    settings = dict(header["settings"])
    settings["negative_prompts"] = tuple(settings["negative_prompts"])
    state = SessionState(
        memory=make_memory(
            header["memory"]["name"], header["memory"]["num_frames_per_block"], **header["memory"]["config"]
        ),
        decoder=StreamingVAEDecoder(pipe.vae),
        plans=[PromptPlan.parse(plan) for plan in header["plans"]],
        latents=tensors["latents"],
        pending_frames=tensors.get("pending_frames"),
        **{name: header["state"][name] for name in PLAIN_FIELDS},
    )
    for component, prefix in ((state.memory, "memory."), (state.decoder, "decoder.")):
        entries = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        component.load_state_dict(entries)
    return GenerationSettings(**settings), state


def _check_shapes(
    pipe: ContextForcingPipeline,
    settings: GenerationSettings,
    state: SessionState,
    tensors: dict[str, torch.Tensor],
    batch: int,
) -> None:
    """A file whose parts don't fit each other would fail in the middle of a chunk, in words that say nothing."""
    config, factor = pipe.transformer.config, pipe.vae_scale_factor_spatial
    height, width = settings.height // factor, settings.width // factor
    tokens = (height // config.patch_size[1]) * (width // config.patch_size[2])
    rows = batch * (2 if settings.guidance_scale > 1 else 1)
    slots = (rows, state.memory.num_slots, tokens, config.num_attention_heads, config.attention_head_dim)
    wanted = {"latents": (batch, config.in_channels, len(state.latent_ids), height, width)}
    if state.memory.num_slots:
        wanted |= {
            f"memory.{kind}.{layer}": slots for kind in ("keys", "values") for layer in range(config.num_layers)
        }
    if len(state.plans) != batch:
        raise SessionFileError(f"it has {len(state.plans)} prompt plans for {batch} samples.")
    for name, shape in wanted.items():
        if tuple(tensors[name].shape) != shape:
            raise SessionFileError(f"{name} has shape {tuple(tensors[name].shape)} where {shape} belongs.")
