"""The state of one running generation, which can be stepped, steered, saved, forked and undone at any chunk.

A step denoises one chunk against the memory, runs it once more at timestep 0 to get the keys and values of the *clean*
chunk, commits these, and decodes the frames (Context Forcing, arXiv 2602.06028, section 3; the sampler is the loop of
Self Forcing, arXiv 2506.08009). The noise of chunk `i`, that of its renoising steps included, comes from
`(sample seed, i)`: nothing depends on which process, call or batch produced the chunks before.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from vidgen.memory import KeyValues, KVMemory, make_memory
from vidgen.models.streaming_vae import StreamingVAEDecoder
from vidgen.pipelines.budget import describe_remedies, estimate_budget, format_bytes
from vidgen.pipelines.inputs import per_sample
from vidgen.pipelines.prompt_plan import PromptPlan
from vidgen.pipelines.session_state import (
    GenerationError,
    GenerationSettings,
    SessionState,
    check_prompt_switch,
    load_session,
    save_session,
)
from vidgen.runtime.checks import check_whole
from vidgen.runtime.device import generator_for
from vidgen.schedulers import FlowConsistencyScheduler

if TYPE_CHECKING:
    from vidgen.pipelines.context_forcing import ContextForcingPipeline


def num_chunks_until(num_frames: int, num_latents: int, num_frames_per_chunk: int, temporal_stride: int) -> int:
    """Chunks to generate until `num_frames` frames exist, when `num_latents` latent frames do."""
    num_needed = math.ceil((num_frames - 1) / temporal_stride) + 1
    return max(0, math.ceil((num_needed - num_latents) / num_frames_per_chunk))


class GenerationSession:
    """One running video (or batch of videos). Made by [`ContextForcingPipeline.session`].

    Args:
        pipe: the models; shared, never changed.
        settings: what stays fixed.
        plans: one prompt plan per sample.
        memory: an empty memory.
        sample_seeds: one seed per sample, from which all noise follows.
        noise: `(batch, channels, latent frames, h, w)` initial noise to use instead of drawn one.
        attention_kwargs: passed to the transformer, as `{"scale": …}` for LoRA.
        callback_on_step_end: called as `callback(pipe, step, timestep, {"latents": …})` after every denoising step;
            may return a dictionary with other `latents`.
        callback_on_chunk_end: called as `callback(session, chunk_index, frames)` before a chunk is emitted.

    Example:
        ```py
        session = pipe.session("a meadow at dawn", memory="slow_fast", generator=torch.Generator().manual_seed(0))
        for _ in range(5):
            frames = session.step()  # uint8 (frames, height, width, 3)
        session.set_prompt("a meadow in the rain")
        session.save("meadow.safetensors")
        ```
    """

    def __init__(
        self,
        pipe: ContextForcingPipeline,
        settings: GenerationSettings,
        plans: Sequence[PromptPlan],
        memory: KVMemory,
        sample_seeds: Sequence[int],
        noise: torch.Tensor | None = None,
        attention_kwargs: dict[str, Any] | None = None,
        callback_on_step_end: Callable | None = None,
        callback_on_chunk_end: Callable | None = None,
    ) -> None:
        self.pipe = pipe
        self.settings = settings
        self.sample_seeds = list(sample_seeds)
        self.noise = noise
        self.attention_kwargs = attention_kwargs
        self.callback_on_step_end = callback_on_step_end
        self.callback_on_chunk_end = callback_on_chunk_end

        self.num_frames_per_chunk = pipe.transformer.config.num_frames_per_block
        self.latent_shape = (
            pipe.transformer.config.in_channels,
            settings.height // pipe.vae_scale_factor_spatial,
            settings.width // pipe.vae_scale_factor_spatial,
        )
        channels, latent_height, latent_width = self.latent_shape
        self._state = SessionState(
            memory=memory,
            decoder=StreamingVAEDecoder(pipe.vae),
            plans=list(plans),
            latents=torch.empty(len(plans), channels, 0, latent_height, latent_width),
            latent_ids=[],
            pending_frames=None,
            first_block=self.num_frames_per_chunk,
        )
        self._history: list[SessionState] = []
        self._prompt_embeds: dict[str, torch.Tensor] = {}
        self._interrupt = False
        # Clean latents of the last chunk, and of the given frames when they belong to the output; on the CPU.
        self.last_latents: torch.Tensor | None = None
        self.input_latents: torch.Tensor | None = None
        self.timings = {"text": 0.0, "denoise": 0.0, "commit": 0.0, "decode": 0.0}

        # All known prompts now: the text encoder can then be offloaded for the whole run.
        prompts = [prompt for plan in plans for prompt in plan.prompts]
        for prompt in [*prompts, *(settings.negative_prompts if self.do_classifier_free_guidance else ())]:
            self._embed(prompt)

    # --- what the session is at ---------------------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        return len(self.sample_seeds)

    @property
    def do_classifier_free_guidance(self) -> bool:
        return self.settings.guidance_scale > 1

    @property
    def memory(self) -> KVMemory:
        """The memory after the last chunk."""
        return self._state.memory

    @property
    def plans(self) -> tuple[PromptPlan, ...]:
        """The prompt plan of each sample."""
        return tuple(self._state.plans)

    @property
    def chunk_index(self) -> int:
        """Chunks generated so far."""
        return self._state.chunk_index

    @property
    def num_frames_emitted(self) -> int:
        """Frames that `step` returned so far (frames that their latents stand for, without decoding)."""
        return self._state.num_frames_emitted

    @property
    def finished(self) -> bool:
        """Whether all requested frames exist; never true without `num_frames`."""
        if self.settings.num_frames is None:
            return False
        return self._num_pixel_frames(self._state.memory.num_frames) >= self._last_frame

    @property
    def num_frames_total(self) -> int | None:
        """Frames that all steps return together, those of a shown input included; `None` without an end."""
        if self.settings.num_frames is None:
            return None
        return self.settings.num_frames + (self._state.time_origin if self._state.emits_input else 0)

    @property
    def num_chunks_left(self) -> int | None:
        """Chunks until the end, `None` without one."""
        if self.settings.num_frames is None:
            return None
        return num_chunks_until(
            self._last_frame,
            self._state.memory.num_frames,
            self.num_frames_per_chunk,
            self.pipe.vae_scale_factor_temporal,
        )

    @property
    def statistics(self) -> dict[str, Any]:
        """Plain numbers about memory and progress."""
        return {
            "num_chunks": self.chunk_index,
            "num_frames_emitted": self.num_frames_emitted,
            "sample_seeds": list(self.sample_seeds),
            "memory": self.memory.statistics(),
        }

    @property
    def _last_frame(self) -> int:
        return self._state.time_origin + self.settings.num_frames

    def _num_pixel_frames(self, num_latent_frames: int) -> int:
        # The first latent frame stands for one frame, every later one for vae_scale_factor_temporal.
        return max(0, (num_latent_frames - 1) * self.pipe.vae_scale_factor_temporal + 1)

    @property
    def _num_surplus_frames(self) -> int:
        """Frames of the newest chunk that lie beyond the requested length."""
        if self.settings.num_frames is None:
            return 0
        return max(0, self._num_pixel_frames(self._state.memory.num_frames) - self._last_frame)

    @property
    def _plan_frame(self) -> int:
        """First frame of the next chunk in the time of the prompt plan."""
        num_latents = self._state.memory.num_frames
        return (self._num_pixel_frames(num_latents) if num_latents else 0) - self._state.time_origin

    # --- generating ---------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[np.ndarray | torch.Tensor]:
        """Yield chunk after chunk until the video is finished or `interrupt` was called."""
        while not self.finished:
            chunk = self.step()
            if chunk is None:
                return
            yield chunk

    def interrupt(self) -> None:
        """Stop at the next denoising step: that `step` returns `None` and leaves the session at its last whole chunk.

        Safe to call from a callback or another thread; the session can go on afterwards.
        """
        self._interrupt = True

    @torch.no_grad()
    def step(self) -> np.ndarray | torch.Tensor | None:
        """Generate the next chunk.

        Returns:
            uint8 `(frames, height, width, 3)`, with a leading batch axis for more than one sample, or, without
            decoding, latents `(batch, channels, frames, h, w)`; `None` when interrupted. Frames beyond `num_frames`
            are cut off.

        Raises:
            GenerationError: when the session is finished, memory runs out, or latents become non-finite; names the
                chunk. The session stays at its last whole chunk.
        """
        if self.finished:
            raise GenerationError(
                f"The session is finished: all {self.settings.num_frames} frames exist. Start a longer one, or undo()."
            )
        before, self._state = self._state, self._state.copy()
        try:
            chunk = self._generate_chunk()
        except torch.OutOfMemoryError as error:
            self._state = before
            request = (self.pipe, before.memory, self.settings, self.batch_size)
            budget = estimate_budget(*request)
            remedies = describe_remedies(*request, limit=budget.key_values - 1)
            raise GenerationError(
                f"Out of memory in chunk {before.chunk_index}: "
                f"keys and values need up to {format_bytes(budget.key_values)} of {format_bytes(budget.state)} beside "
                f"the weights. Each of these needs less (keys and values then): {remedies}."
            ) from error
        except BaseException:
            self._state = before
            raise
        if chunk is None:
            self._state = before
            return None
        history = [*self._history, before]
        self._history = history[max(0, len(history) - self.settings.undo_depth) :]
        return chunk

    def _generate_chunk(self) -> np.ndarray | torch.Tensor | None:
        state = self._state

        # 1. Prompts of this chunk
        prompts = [plan.prompt_at(self._plan_frame, self.settings.fps) for plan in state.plans]
        prompt_embeds = self._embed_batch(prompts)
        if state.active_prompts is not None:
            switched = [state.requested_switch is not None or a != b for a, b in zip(state.active_prompts, prompts)]
            if any(switched):
                self._switch_prompt(state.requested_switch or self.settings.prompt_switch, prompt_embeds, switched)
        state.active_prompts, state.requested_switch = prompts, None

        # 2. Denoise
        latents = self._denoise(prompt_embeds)
        if latents is None:
            return None
        if not bool(torch.isfinite(latents).all()):
            sample = int((~torch.isfinite(latents)).flatten(1).any(1).nonzero()[0])
            raise GenerationError(
                f"The latents of chunk {state.chunk_index}, sample {sample}, hold NaN or infinity. The session stays "
                "at the chunk before; try another dtype (float16 overflows easily) or seed."
            )

        # 3. Commit to the memory, then decode
        self._commit(latents, prompt_embeds)
        frames = self._decode(latents)
        self.last_latents = latents.cpu()
        state.chunk_index += 1
        chunk = self.last_latents if frames is None else self._emit(frames)
        state.num_frames_emitted = self._num_pixel_frames(state.memory.num_frames) - self._num_surplus_frames
        state.num_frames_emitted -= 0 if state.emits_input else state.time_origin
        if self.callback_on_chunk_end is not None:
            self.callback_on_chunk_end(self, state.chunk_index - 1, chunk)
        return chunk

    def _denoise(self, prompt_embeds: torch.Tensor) -> torch.Tensor | None:
        """One chunk from noise to float32 clean latents `(batch, channels, frames, h, w)`; `None` if interrupted."""
        started = time.perf_counter()
        device = self.pipe._execution_device
        index, num_frames = self._state.chunk_index, self.num_frames_per_chunk
        # A fresh scheduler: multistep solvers carry history which must not leak into the next chunk.
        scheduler = type(self.pipe.scheduler).from_config(self.pipe.scheduler.config)
        scheduler.set_timesteps(self.settings.num_inference_steps, device=device)
        renoises = isinstance(scheduler, FlowConsistencyScheduler) and scheduler.config.eta > 0

        # Drawn in float32 on the CPU, sample by sample: the same numbers on every device and in every batch.
        generators = [generator_for(seed, index) for seed in self.sample_seeds]
        channels, latent_height, latent_width = self.latent_shape

        def draw_noise() -> torch.Tensor:
            shape = (channels, num_frames, latent_height, latent_width)
            return torch.stack([torch.randn(shape, generator=generator) for generator in generators]).to(device)

        latents = draw_noise()
        if self.noise is not None:
            latents = self.noise[:, :, index * num_frames : (index + 1) * num_frames].to(device, torch.float32)
        for step, timestep in enumerate(scheduler.timesteps):
            velocity = self._predict(latents, timestep, prompt_embeds)
            last = step + 1 == len(scheduler.timesteps)
            options = {"noise": draw_noise()} if renoises and not last else {}
            latents = scheduler.step(velocity, timestep, latents, return_dict=False, **options)[0]
            if self.callback_on_step_end is not None:
                changed = self.callback_on_step_end(self.pipe, step, timestep, {"latents": latents}) or {}
                latents = changed.get("latents", latents)
            if self._interrupt:
                self._interrupt = False
                return None
        self.timings["denoise"] += time.perf_counter() - started
        return latents

    def _predict(self, latents: torch.Tensor, timestep: torch.Tensor, prompt_embeds: torch.Tensor) -> torch.Tensor:
        """Velocity of a noisy chunk, guided when guidance is on."""
        rows = torch.cat([latents, latents]) if self.do_classifier_free_guidance else latents
        velocity = self.pipe.transformer(
            hidden_states=rows.to(self.pipe.transformer.dtype),
            timestep=timestep.expand(len(rows)),
            encoder_hidden_states=prompt_embeds,
            kv_memory=self._state.memory,
            attention_kwargs=self.attention_kwargs,
        ).sample.float()
        if self.do_classifier_free_guidance:
            conditional, unconditional = velocity.chunk(2)
            velocity = unconditional + self.settings.guidance_scale * (conditional - unconditional)
        return velocity

    def _clean_key_values(
        self,
        latents: torch.Tensor,
        prompt_embeds: torch.Tensor,
        memory: KVMemory | None = None,
        frame_blocks: torch.Tensor | None = None,
        frame_positions: torch.Tensor | None = None,
    ) -> KeyValues:
        """Keys and values of clean latents: a forward at timestep 0."""
        device = self.pipe._execution_device
        rows = torch.cat([latents, latents]) if self.do_classifier_free_guidance else latents
        return self.pipe.transformer(
            hidden_states=rows.to(device, self.pipe.transformer.dtype),
            timestep=torch.zeros(len(rows), device=device),
            encoder_hidden_states=prompt_embeds,
            kv_memory=memory,
            frame_blocks=frame_blocks,
            frame_positions=frame_positions,
            return_key_values=True,
            attention_kwargs=self.attention_kwargs,
        ).key_values

    def _commit(self, latents: torch.Tensor, prompt_embeds: torch.Tensor) -> None:
        started = time.perf_counter()
        state = self._state
        first_id = state.memory.num_frames
        state.memory.commit(self._clean_key_values(latents, prompt_embeds, state.memory))

        # Keep only the latents that a recache could ask for.
        ids = [*state.latent_ids, *range(first_id, first_id + latents.shape[2])]
        needed = set(state.memory.frame_ids[0, self._recache_slots()].tolist())
        kept = [position for position, frame_id in enumerate(ids) if frame_id in needed]
        state.latents = torch.cat([state.latents, latents.float().cpu()], dim=2)[:, :, kept]
        state.latent_ids = [ids[position] for position in kept]
        self.timings["commit"] += time.perf_counter() - started

    def _decode(self, latents: torch.Tensor) -> torch.Tensor | None:
        """uint8 frames `(batch, frames, height, width, 3)` of the latents that follow, on the CPU."""
        if not self.settings.decode:
            return None
        started = time.perf_counter()
        pixels = self._state.decoder.decode(latents.to(self.pipe._execution_device, self.pipe.vae.dtype))
        frames = ((pixels.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
        self.timings["decode"] += time.perf_counter() - started
        return frames.permute(0, 2, 3, 4, 1).contiguous().cpu()

    def _emit(self, frames: torch.Tensor) -> np.ndarray:
        """Cut frames beyond the requested length, put the input's frames in front, drop the axis of a batch of one."""
        state = self._state
        frames = frames[:, : frames.shape[1] - self._num_surplus_frames]
        if state.pending_frames is not None:
            frames, state.pending_frames = torch.cat([state.pending_frames, frames], dim=1), None
        return frames.numpy() if self.batch_size > 1 else frames[0].numpy()

    @torch.no_grad()
    def prefill(self, latents: torch.Tensor, emit: bool, counts: bool) -> None:
        """Put given clean latents into the memory before anything is generated.

        Args:
            latents: `(batch, channels, frames, h, w)`; a remainder of whole chunks becomes the first, shorter block.
            emit: whether the first `step` also returns their decoded frames.
            counts: whether these frames count toward `num_frames` and the seconds of the prompt plan.
        """
        state = self._state
        num_latents = latents.shape[2]
        state.emits_input = emit
        state.first_block = num_latents % self.num_frames_per_chunk or self.num_frames_per_chunk
        if not counts:
            state.time_origin = self._num_pixel_frames(num_latents)
        state.active_prompts = [plan.prompt_at(0, self.settings.fps) for plan in state.plans]
        prompt_embeds = self._embed_batch(state.active_prompts)
        start, decoded = 0, []
        while start < num_latents:
            stop = start + (self.num_frames_per_chunk if start else state.first_block)
            block = latents[:, :, start:stop]
            self._commit(block, prompt_embeds)
            frames = self._decode(block)
            if emit and frames is not None:
                decoded.append(frames)
            start = stop
        self.input_latents = latents.float().cpu() if emit else None
        state.pending_frames = torch.cat(decoded, dim=1) if decoded else None

    # --- prompts ------------------------------------------------------------------------------------------------

    def _embed(self, prompt: str) -> torch.Tensor:
        """Embedding `(1, length, dim)` of one text. Texts are encoded one by one, so a batch changes nothing."""
        if prompt not in self._prompt_embeds:
            started = time.perf_counter()
            self._prompt_embeds[prompt] = self.pipe.encode_prompt(prompt, do_classifier_free_guidance=False)[0]
            self.timings["text"] += time.perf_counter() - started
        return self._prompt_embeds[prompt]

    def _embed_batch(self, prompts: Sequence[str]) -> torch.Tensor:
        """`(batch, length, dim)`, followed by the negative prompts' rows when guidance is on."""
        if self.do_classifier_free_guidance:
            prompts = [*prompts, *self.settings.negative_prompts]
        return torch.cat([self._embed(prompt) for prompt in prompts])

    def set_prompt(self, prompt: str | Sequence[str], mode: str | None = None) -> None:
        """Show another prompt from the next chunk on; the rest of the plan is dropped.

        Args:
            prompt: one text for all samples, or one per sample.
            mode: `"recache"`, `"keep"` or `"flush"`; default the session's `prompt_switch`.

        Raises:
            GenerationError: for an unknown mode, a wrong number of prompts, or what isn't text.
            PromptPlanError: for an empty prompt.
        """
        mode = self.settings.prompt_switch if mode is None else mode
        check_prompt_switch(mode)
        prompts = per_sample(prompt, self.batch_size, "prompt")
        frame = max(0, self._plan_frame)
        plans = [plan.switch_to(text, frame, self.settings.fps) for plan, text in zip(self._state.plans, prompts)]
        with torch.no_grad():
            for text in prompts:
                self._embed(text)
        self._state = dataclasses.replace(self._state, plans=plans, requested_switch=mode)

    def _recache_slots(self) -> list[int]:
        """Slots that a prompt switch recomputes: all, or sink and newest frames when there are slow ones between."""
        memory = self._state.memory
        slots = list(range(memory.num_slots))
        if not hasattr(memory.config, "slow"):
            return slots
        sink, newest = memory.config.sink, memory.config.fast - memory.num_frames_per_block
        return sorted({*slots[:sink], *slots[len(slots) - min(newest, len(slots)) :]})

    def _switch_prompt(self, mode: str, prompt_embeds: torch.Tensor, switched: list[bool]) -> None:
        """Adapt the memory to new prompts of the samples marked in `switched`."""
        memory = self._state.memory
        if mode == "keep" or memory.num_slots == 0:
            return
        if mode == "flush":
            if not all(switched):
                raise GenerationError(
                    "prompt_switch='flush' empties slots, which all samples of a batch share, but in chunk "
                    f"{self.chunk_index} only samples {[i for i, s in enumerate(switched) if s]} switch. "
                    "Switch all at the same time, use 'recache', or generate the samples one by one."
                )
            slots = list(range(memory.num_slots))
            sink = getattr(memory.config, "sink", 0)
            kept = [*slots[:sink], *slots[-self.num_frames_per_chunk :]]
            memory.keep(memory.frame_ids[0, sorted(set(kept))].unique())
            return

        slots = self._recache_slots()
        ids = memory.frame_ids[0, slots]
        where = [self._state.latent_ids.index(frame_id) for frame_id in ids.tolist()]
        latents = self._state.latents[:, :, where]
        positions = memory.key_positions()[:, slots]
        blocks = 1 + (ids - self._state.first_block).div(self.num_frames_per_chunk, rounding_mode="floor")

        if bool((positions.diff(dim=-1) == 1).all()):
            # Adjacent frames: repeat the original procedure, block by block, in a scratch memory.
            scratch = make_memory("full", self.num_frames_per_chunk, max_frames=len(slots))
            parts = []
            for block in blocks.unique():
                part = self._clean_key_values(latents[:, :, blocks == block], prompt_embeds, scratch)
                scratch.commit(part)
                parts.append(part)
            key_values = [tuple(torch.cat(tensors, dim=1) for tensors in zip(*layer)) for layer in zip(*parts)]
        else:
            device = self.pipe._execution_device
            key_values = self._clean_key_values(
                latents, prompt_embeds, frame_blocks=blocks.to(device), frame_positions=positions.to(device)
            )
        # Rows that didn't switch, the negative prompts' included, keep what they have: no frame has the id -1.
        rows = torch.tensor([*switched, *[False] * self.batch_size][: key_values[0][0].shape[0]])
        memory.recache(key_values, torch.where(rows[:, None, None], ids, -1))

    # --- time travel --------------------------------------------------------------------------------------------

    def fork(self) -> Self:
        """An independent session at the same point: the same future until prompts, seeds or chunks differ."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.sample_seeds = list(self.sample_seeds)
        twin._state = self._state.copy()
        twin._history = [state.copy() for state in self._history]
        twin._prompt_embeds = dict(self._prompt_embeds)
        twin.timings = dict(self.timings)
        return twin

    def undo(self, n: int = 1) -> None:
        """Take back the last `n` chunks, and prompts set since.

        Raises:
            GenerationError: when fewer chunks can be taken back.
        """
        if n not in range(1, len(self._history) + 1):
            raise GenerationError(
                f"undo({n!r}): {len(self._history)} chunks can be taken back. Sessions keep undo_depth="
                f"{self.settings.undo_depth}; start one with a larger undo_depth to go further."
            )
        self._state = self._history[-n]
        self._history = self._history[:-n]
        self.last_latents = None

    def extend(self, num_frames: int) -> None:
        """End after so many frames more, whatever the end was before, even if it was reached.

        Frames of a last chunk that lay beyond the old end were cut off and stay so: the video goes on after them.

        Args:
            num_frames: from the next chunk on.
        """
        check_whole(1, num_frames=num_frames)
        state = self._state.copy()
        state.num_frames_emitted += self._num_surplus_frames
        existing = self._num_pixel_frames(state.memory.num_frames) - state.time_origin
        self.settings = dataclasses.replace(self.settings, num_frames=existing + num_frames)
        self._state = state

    # --- files --------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the session to one safetensors file, which appears whole or not at all. Undo history isn't saved."""
        save_session(path, self.pipe, self.settings, self._state, self.sample_seeds, self.noise)

    @classmethod
    def load(cls, path: str | Path, pipe: ContextForcingPipeline, **callbacks: Any) -> GenerationSession:
        """Continue a saved session.

        Args:
            path: a file written by `save`.
            pipe: the same models and scheduler as when it was saved.
            callbacks: `callback_on_step_end`, `callback_on_chunk_end` and `attention_kwargs`, which files don't hold.

        Raises:
            SessionFileError: when the file isn't a session, comes from a newer version, or from other models.
            CheckpointError: when the file is missing or damaged.
        """
        settings, state, sample_seeds, noise = load_session(path, pipe)
        session = cls(pipe, settings, state.plans, state.memory, sample_seeds, noise=noise, **callbacks)
        session._state = state
        return session
