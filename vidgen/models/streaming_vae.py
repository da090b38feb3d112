"""Streaming encode and decode around diffusers' `AutoencoderKLWan`, with the stream's state kept outside the module.

`AutoencoderKLWan` is causal in time: each of its 3D convolutions needs only the last two frames of its input. One-shot
`vae.encode` / `vae.decode` keep those frames in the module while they loop over time, and forget them at the end. Here
the same loop is cut anywhere: the feature maps live in a list owned by the stream, so a video of any length is coded
in constant memory, several streams share one VAE, and a stream can be cloned, saved and restored. The results equal
those of the one-shot calls, on most CPUs bit for bit, else up to rounding.

Time is counted as in the VAE: the first latent frame stands for one frame, every later one for four.
"""

from __future__ import annotations

import copy
from typing import Self

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, patchify, unpatchify

from vidgen.runtime.errors import CheckpointError, VidgenError

# `AutoencoderKLWan` encodes one frame, then groups of four, whatever its temporal compression.
FRAMES_PER_GROUP = 4

# What an entry of the feature cache is, as saved. diffusers marks a temporal upsampler that has seen one frame by a
# string.
_EMPTY, _MARKER, _TENSOR = 0, 1, 2
_UPSAMPLER_MARKER = "Rep"


class _VAEStream:
    """State shared by both directions: the feature cache, how far the stream is, and what its inputs look like."""

    _input_name: str
    _frame_name: str

    def __init__(self, vae: AutoencoderKLWan) -> None:
        if not isinstance(vae, AutoencoderKLWan):
            raise VidgenError(f"vae is a {type(vae).__name__}; streaming needs a diffusers AutoencoderKLWan.")
        self.vae = vae
        self.reset()

    def reset(self) -> None:
        """Forgets the stream; the next call starts a new video."""
        self._feature_cache: list[torch.Tensor | str | None] = [None] * self._num_cache_entries()
        self._input_shape: tuple[int, int, int] | None = None
        self._num_frames = 0

    def clone(self) -> Self:
        """Returns an independent stream at the same point, over the same VAE.

        Cached tensors are replaced and never written to, so both streams share them and a clone costs no memory until
        they diverge.
        """
        clone = copy.copy(self)
        clone._feature_cache = list(self._feature_cache)
        return clone

    @property
    def num_frames(self) -> int:
        """Input frames consumed so far: latent frames for a decoder, frames for an encoder."""
        return self._num_frames

    @property
    def nbytes(self) -> int:
        """Bytes held by the feature cache; fixed from the third step of a stream on."""
        return sum(entry.nbytes for entry in self._feature_cache if isinstance(entry, torch.Tensor))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the stream as a flat dictionary of tensors, as safetensors stores them."""
        kinds, tensors = [], {}
        for index, entry in enumerate(self._feature_cache):
            if isinstance(entry, torch.Tensor):
                tensors[f"feature_cache.{index}"] = entry.contiguous()
                kinds.append(_TENSOR)
            else:
                kinds.append(_EMPTY if entry is None else _MARKER)
        tensors["feature_cache_kinds"] = torch.tensor(kinds, dtype=torch.uint8)
        tensors["input_shape"] = torch.tensor(self._input_shape or (0, 0, 0), dtype=torch.int64)
        tensors["num_frames"] = torch.tensor([self._num_frames], dtype=torch.int64)
        return tensors

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Continues a stream saved by `state_dict`.

        Args:
            state_dict: What `state_dict` returned, for a VAE of the same configuration and data type.

        Raises:
            CheckpointError: If entries are missing or unknown, or were made by another architecture or data type. The
                stream is then left as it was.
        """
        state_dict = dict(state_dict)
        try:
            kinds = state_dict.pop("feature_cache_kinds").tolist()
            input_shape = tuple(state_dict.pop("input_shape").tolist())
            num_frames = int(state_dict.pop("num_frames").item())
        except KeyError as error:
            raise CheckpointError(f"{type(self).__name__} state has no entry {error}.") from error
        expected = {f"feature_cache.{index}" for index, kind in enumerate(kinds) if kind == _TENSOR}
        if state_dict.keys() != expected:
            missing, unknown = sorted(expected - state_dict.keys()), sorted(state_dict.keys() - expected)
            raise CheckpointError(
                f"{type(self).__name__} state: missing entries {missing}, unknown entries {unknown}."
            )
        if len(kinds) != len(self._feature_cache):
            raise CheckpointError(
                f"{type(self).__name__} state has {len(kinds)} cache entries, this VAE needs "
                f"{len(self._feature_cache)}; load it with the VAE that made it."
            )
        for name, tensor in state_dict.items():
            if tensor.dtype != self.vae.dtype:
                raise CheckpointError(
                    f"{type(self).__name__} state entry {name} is {tensor.dtype}, the VAE is {self.vae.dtype}; "
                    f"load the VAE with dtype={tensor.dtype}."
                )
        values = {_EMPTY: None, _MARKER: _UPSAMPLER_MARKER}
        self._feature_cache = [
            state_dict[f"feature_cache.{index}"] if kind == _TENSOR else values[kind]
            for index, kind in enumerate(kinds)
        ]
        self._input_shape = input_shape if num_frames else None
        self._num_frames = num_frames

    def _estimate_nbytes(self, inputs_shape: tuple[int, ...]) -> int:
        # Running the same step on the meta device gives the exact bytes of the cache with no arithmetic.
        with torch.device("meta"):
            vae = AutoencoderKLWan.from_config(self.vae.config)
            # Not `vae.to`: ModelMixin warns about casts, and these weights are never used.
            stream = type(self)(torch.nn.Module.to(vae, self.vae.dtype))
            stream._run(torch.empty(inputs_shape, dtype=self.vae.dtype))
        return stream.nbytes

    def _num_cache_entries(self) -> int:
        return sum(isinstance(module, WanCausalConv3d) for module in self._coder().modules())

    def _coder(self) -> torch.nn.Module:
        raise NotImplementedError

    def _check_inputs(self, inputs: torch.Tensor, num_channels: int) -> None:
        name = self._input_name
        if inputs.ndim != 5 or inputs.shape[1] != num_channels or 0 in inputs.shape:
            raise VidgenError(
                f"{name} has shape {tuple(inputs.shape)}; expected (batch, {num_channels}, frames, height, width) "
                "with no empty dimension."
            )
        shape = (inputs.shape[0], *inputs.shape[-2:])
        if self._input_shape is not None and shape != self._input_shape:
            raise VidgenError(
                f"{name} has (batch, height, width) = {shape}, but this stream started with {self._input_shape}; "
                "keep it, or call reset() to start a new video."
            )
        finite = torch.isfinite(inputs).all(dim=1).all(dim=-1).all(dim=-1)
        if not finite.all():
            sample, frame = (~finite).nonzero()[0].tolist()
            raise VidgenError(
                f"{name} holds NaN or infinity in {self._frame_name} {self._num_frames + frame} of the stream "
                f"(batch element {sample}); the stream is unchanged, pass finite values."
            )

    def _run(self, inputs: torch.Tensor) -> torch.Tensor:
        """Runs all steps on a copy of the cache and commits it at the end, so that a failed call changes nothing."""
        # Model offloading hooks `vae.decode`, which is not called here, so its hook is.
        hook = getattr(self.vae, "_hf_hook", None)
        if hook is not None and hasattr(hook, "pre_forward"):
            hook.pre_forward(self.vae)
        inputs = inputs.to(self.vae.dtype)
        feature_cache = [
            entry.to(inputs.device) if isinstance(entry, torch.Tensor) else entry for entry in self._feature_cache
        ]
        outputs = self._steps(inputs, feature_cache)
        self._feature_cache = feature_cache
        self._input_shape = (inputs.shape[0], *inputs.shape[-2:])
        self._num_frames += inputs.shape[2]
        return outputs

    def _steps(self, inputs: torch.Tensor, feature_cache: list[torch.Tensor | str | None]) -> torch.Tensor:
        raise NotImplementedError

    def _check_tiling(self, height: int, width: int) -> None:
        # Tiles overlap and are blended: ignoring the setting would silently give other frames.
        if self.vae.use_tiling and (
            height > self.vae.tile_sample_min_height or width > self.vae.tile_sample_min_width
        ):
            raise VidgenError(
                f"Tiling is enabled on the VAE and frames of {height}x{width} exceed one tile; streaming codes whole "
                "frames, so call vae.disable_tiling()."
            )

    def _latent_statistics(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        config = self.vae.config
        mean = torch.tensor(config.latents_mean).view(1, config.z_dim, 1, 1, 1)
        inverse_std = 1.0 / torch.tensor(config.latents_std).view(1, config.z_dim, 1, 1, 1)
        return mean.to(latents.device, latents.dtype), inverse_std.to(latents.device, latents.dtype)


class StreamingVAEDecoder(_VAEStream):
    """Decodes latent frames into frames, any number at a time, in constant memory.

    Args:
        vae: The VAE; it is shared, not copied, and never holds state of the stream.

    Example:
        ```py
        decoder = StreamingVAEDecoder(pipeline.vae)
        for latents in chunks:  # (batch, channels, 3, height / 8, width / 8)
            frames = decoder.decode(latents)  # 9 frames, then 12 per chunk
        ```
    """

    _input_name = "latents"
    _frame_name = "latent frame"

    def _coder(self) -> torch.nn.Module:
        return self.vae.decoder

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Decodes the next latent frames of the stream.

        Args:
            latents: Float tensor (batch, z_dim, latent frames, latent height, latent width), normalized by the VAE's
                `latents_mean` and `latents_std` as the transformer sees them.

        Returns:
            Frames (batch, channels, frames, height, width) in [-1, 1], in the VAE's data type: one for the first
            latent frame of a stream, four for each later one.

        Raises:
            VidgenError: If the shape does not continue the stream, or a latent frame holds NaN or infinity.
        """
        self._check_inputs(latents, self.vae.config.z_dim)
        spatial_ratio = self.vae.spatial_compression_ratio
        self._check_tiling(latents.shape[-2] * spatial_ratio, latents.shape[-1] * spatial_ratio)
        return self._run(latents)

    def estimate_nbytes(self, batch_size: int, latent_height: int, latent_width: int) -> int:
        """Bytes the stream will hold once under way, whatever the length of the video."""
        return self._estimate_nbytes((batch_size, self.vae.config.z_dim, 3, latent_height, latent_width))

    def _steps(self, inputs: torch.Tensor, feature_cache: list[torch.Tensor | str | None]) -> torch.Tensor:
        mean, inverse_std = self._latent_statistics(inputs)
        hidden_states = self.vae.post_quant_conv(inputs / inverse_std + mean)
        frames = []
        for index in range(inputs.shape[2]):
            first_chunk = self._num_frames + index == 0
            sample = self.vae.decoder(
                hidden_states[:, :, index : index + 1],
                feat_cache=feature_cache,
                feat_idx=[0],
                first_chunk=first_chunk,
            )
            if self.vae.config.patch_size is not None:
                sample = unpatchify(sample, patch_size=self.vae.config.patch_size)
            frames.append(sample)
        return torch.cat(frames, dim=2).clamp(min=-1.0, max=1.0)


class StreamingVAEEncoder(_VAEStream):
    """Encodes frames into latent frames, group by group, in constant memory.

    The first call takes 1 + 4k frames and later calls take 4k, as the VAE groups them.

    Args:
        vae: The VAE; it is shared, not copied, and never holds state of the stream.
    """

    _input_name = "frames"
    _frame_name = "frame"

    def _coder(self) -> torch.nn.Module:
        return self.vae.encoder

    @torch.no_grad()
    def encode(self, frames: torch.Tensor) -> torch.Tensor:
        """Encodes the next frames of the stream to the mode of their posterior.

        Args:
            frames: Float tensor (batch, channels, frames, height, width) in [-1, 1]; height and width are multiples of
                the VAE's spatial compression ratio.

        Returns:
            Latents (batch, z_dim, latent frames, latent height, latent width), normalized by the VAE's `latents_mean`
            and `latents_std`, in the VAE's data type.

        Raises:
            VidgenError: If the shape does not continue the stream, the frames do not fill whole groups, or a frame
                holds NaN or infinity.
        """
        config = self.vae.config
        patch_size = config.patch_size or 1
        self._check_inputs(frames, config.in_channels // patch_size**2)
        height, width = frames.shape[-2:]
        ratio = patch_size * 2 ** (len(config.dim_mult) - 1)
        if height % ratio or width % ratio:
            nearest = tuple(max(ratio, round(size / ratio) * ratio) for size in (height, width))
            raise VidgenError(
                f"frames are {height}x{width}; height and width must be multiples of {ratio}, "
                f"for example {nearest[0]}x{nearest[1]}."
            )
        self._check_num_frames(frames.shape[2])
        self._check_tiling(height, width)
        return self._run(frames)

    def estimate_nbytes(self, batch_size: int, height: int, width: int) -> int:
        """Bytes the stream will hold once under way, whatever the length of the video."""
        config = self.vae.config
        num_channels = config.in_channels // (config.patch_size or 1) ** 2
        return self._estimate_nbytes((batch_size, num_channels, 1 + 2 * FRAMES_PER_GROUP, height, width))

    def _check_num_frames(self, num_frames: int) -> None:
        first = 0 if self._num_frames else 1
        if num_frames >= first and (num_frames - first) % FRAMES_PER_GROUP == 0:
            return
        below = num_frames - (num_frames - first) % FRAMES_PER_GROUP
        allowed = [count for count in (below, below + FRAMES_PER_GROUP) if count > 0]
        rule = "1 + 4k frames at the start" if first else "4k frames after the start"
        raise VidgenError(
            f"frames holds {num_frames} frames; an encoder stream takes {rule}: pass {' or '.join(map(str, allowed))}."
        )

    def _steps(self, inputs: torch.Tensor, feature_cache: list[torch.Tensor | str | None]) -> torch.Tensor:
        if self.vae.config.patch_size is not None:
            inputs = patchify(inputs, patch_size=self.vae.config.patch_size)
        first = 0 if self._num_frames else 1
        groups = [inputs[:, :, :first]] if first else []
        groups += inputs[:, :, first:].split(FRAMES_PER_GROUP, dim=2) if inputs.shape[2] > first else []
        moments = [self.vae.encoder(group, feat_cache=feature_cache, feat_idx=[0]) for group in groups]
        latents = self.vae.quant_conv(torch.cat(moments, dim=2)).chunk(2, dim=1)[0]
        mean, inverse_std = self._latent_statistics(latents)
        return (latents - mean) * inverse_std
