"""The past of a causal video model: keys and values per latent frame, kept in slots.

A memory stores *unrotated* keys, so that a frame may sit at any temporal position; the position is chosen when the
memory is read (`positions="bounded"`: the slot index; `"absolute"`: the frame index). What `commit` keeps is the only
difference between the memories.

Stored tensors are never written in place: `commit` builds new ones. Cloning a memory therefore copies references, a
retry or an undo is a clone kept aside, and autograd graphs that still hold old keys stay valid.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from vidgen.runtime.errors import VidgenError

KeyValues = list[tuple[torch.Tensor, torch.Tensor]]
RotateKeys = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

KV_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


class MemoryConfigError(VidgenError):
    """A memory was configured or used in a way that cannot work."""


_NUMBERS = {"int": int, "float": (int, float)}


@dataclasses.dataclass(frozen=True)
class KVMemoryConfig:
    """What every memory can be told.

    Attributes:
        positions: temporal positions of stored frames: `"bounded"` (slot index, never beyond the memory's size) or
            `"absolute"` (frame index, limited by the model's rotary table).
        kv_dtype: storage type of keys and values (a name in `KV_DTYPES`); `None` keeps the model's.
    """

    positions: str = "bounded"
    kv_dtype: str | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, wanted = getattr(self, field.name), _NUMBERS.get(field.type)
            if wanted is not None and (not isinstance(value, wanted) or isinstance(value, bool)):
                kind = "whole number" if field.type == "int" else "number"
                raise MemoryConfigError(f"{field.name}={value!r}; it must be a {kind}.")
        if self.positions not in ("bounded", "absolute"):
            raise MemoryConfigError(f"positions={self.positions!r}; allowed: 'bounded', 'absolute'.")
        if self.kv_dtype is not None and self.kv_dtype not in tuple(KV_DTYPES):
            raise MemoryConfigError(f"kv_dtype={self.kv_dtype!r}; allowed: None, {', '.join(map(repr, KV_DTYPES))}.")


class KVMemory(ABC):
    """Keys and values of past latent frames, `(batch, slots, tokens, heads, head_dim)` per layer.

    Args:
        config: the memory's settings.
        num_frames_per_block: latent frames of the chunk that will be denoised next; these take the last slots.
    """

    name: ClassVar[str]

    def __init__(self, config: KVMemoryConfig, num_frames_per_block: int = 3) -> None:
        if type(num_frames_per_block) is not int or num_frames_per_block < 1:
            raise MemoryConfigError(
                f"num_frames_per_block={num_frames_per_block!r}; it must be a whole number of at least 1."
            )
        self.config = config
        self.num_frames_per_block = num_frames_per_block
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        # (groups, batch, slots): one group, or one per layer when layers choose their frames separately
        self._frame_ids = torch.empty(1, 0, 0, dtype=torch.int64)
        self.num_frames = 0
        self.num_commits = 0
        self._forget_rotated()

    # --- reading -----------------------------------------------------------------------------------------------

    @property
    def num_slots(self) -> int:
        """Slots in use."""
        return self._frame_ids.shape[-1]

    @property
    def frame_ids(self) -> torch.Tensor:
        """`(batch, slots)` int64, which frame each slot holds (of the first layer when layers differ)."""
        return self._frame_ids[0]

    def layer_frame_ids(self, layer: int) -> torch.Tensor:
        """`(batch, slots)` int64, which frame each slot of a layer holds."""
        return self._frame_ids[layer if self._frame_ids.shape[0] > 1 else 0]

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Most slots ever stored between two chunks."""

    def key_positions(self, layer: int = 0) -> torch.Tensor:
        """`(1 or batch, slots)` temporal positions of the stored frames."""
        if self.config.positions == "absolute":
            return self.layer_frame_ids(layer)
        return torch.arange(self.num_slots).unsqueeze(0)

    def query_positions(self, num_frames: int) -> torch.Tensor:
        """`(1, num_frames)` temporal positions of the frames that follow."""
        first = self.num_frames if self.config.positions == "absolute" else self.num_slots
        return torch.arange(first, first + num_frames).unsqueeze(0)

    def read(self, layer: int, num_query_frames: int, rotate: RotateKeys) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Rotated keys and values of a layer for a chunk of `num_query_frames` frames.

        The rotated copy is made at the first read after a commit and reused by the other denoising steps.

        Args:
            layer: index of the transformer block.
            num_query_frames: frames of the chunk being denoised; no more than `num_frames_per_block`.
            rotate: maps `(batch, slots * tokens, heads, head_dim)` keys and `(1 or batch, slots)` positions to rotated
                keys.

        Returns:
            Keys and values, `(batch, slots * tokens, heads, head_dim)` each, or `None` when nothing is stored.
        """
        if num_query_frames > self.num_frames_per_block:
            raise MemoryConfigError(
                f"A chunk of {num_query_frames} latent frames was asked of a memory made for chunks of "
                f"{self.num_frames_per_block}; build it with num_frames_per_block={num_query_frames}."
            )
        if not self._keys:
            return None
        if layer not in self._rotated:
            keys = self._keys[layer].flatten(1, 2)
            # Arithmetic has no 8-bit type; bfloat16 holds every float8_e4m3fn number exactly.
            keys = keys.bfloat16() if keys.itemsize == 1 else keys
            self._rotated[layer] = rotate(keys, self.key_positions(layer)).detach()
        return self._rotated[layer], self._values[layer].flatten(1, 2)

    # --- writing -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def commit(self, key_values: KeyValues, promote: torch.Tensor | None = None) -> None:
        """Store the frames of a finished chunk and drop what the memory does not keep.

        Args:
            key_values: per layer the unrotated `(key, value)`, each `(batch, frames, tokens, heads, head_dim)`.
            promote: the caller's decision, in place of the memory's own, which samples keep a frame of this chunk for
                long; `(batch,)` or `(layers, batch)` bool. Read only by a commit with which the memory takes a
                decision, see the memory's class; given with any other commit it has no effect, so it may be passed
                every time.

        Raises:
            MemoryConfigError: when layers, batch or token sizes differ from what is stored.
        """
        self._check(key_values)
        # Freed before the new tensors are built, which lowers the peak by a third of the memory.
        self._forget_rotated()
        dtype = KV_DTYPES.get(self.config.kv_dtype or "", key_values[0][0].dtype)
        batch_size, num_frames = key_values[0][0].shape[:2]
        num_slots = self.num_slots
        new_ids = torch.arange(self.num_frames, self.num_frames + num_frames)
        if not self._keys:
            self._frame_ids = torch.empty(self._num_groups(len(key_values)), batch_size, 0, dtype=torch.int64)
        candidate_ids = torch.cat([self._frame_ids, new_ids.expand(*self._frame_ids.shape[:2], -1)], dim=-1)

        # (groups, batch, kept) indices into [stored slots | new frames], or None to keep them all
        kept = self._select(num_slots, num_frames, key_values, promote)
        keys, values = [], []
        for layer, (key, value) in enumerate(key_values):
            for stored, new, kept_tensors in ((self._keys, key, keys), (self._values, value, values)):
                new = new.detach().to(dtype)
                candidates = torch.cat([stored[layer], new], dim=1) if stored else new
                if kept is not None:
                    index = kept[layer if kept.shape[0] > 1 else 0].to(candidates.device)
                    candidates = candidates[torch.arange(batch_size, device=candidates.device)[:, None], index]
                kept_tensors.append(candidates.contiguous())
        self._keys, self._values = keys, values
        self._frame_ids = candidate_ids if kept is None else candidate_ids.gather(-1, kept)
        self.num_frames += num_frames
        self.num_commits += 1

    @torch.no_grad()
    def recache(self, key_values: KeyValues, frame_ids: torch.Tensor) -> None:
        """Replace the keys and values of stored frames, as after a prompt switch.

        Args:
            key_values: as for `commit`, one entry per frame in `frame_ids`.
            frame_ids: `(frames,)`, or `(batch, 1, frames)` when samples differ, int64; ids that are not stored are
                ignored.
        """
        for layer, (key, value) in enumerate(key_values):
            # (batch, slots, frames): which given frame belongs in which slot
            matches = self.layer_frame_ids(layer).unsqueeze(-1) == frame_ids.cpu()
            sample, slot, frame = (index.to(key.device) for index in matches.nonzero(as_tuple=True))
            for stored, new in ((self._keys, key), (self._values, value)):
                replaced = stored[layer].clone()
                replaced[sample, slot] = new[sample, frame].detach().to(replaced.dtype)
                stored[layer] = replaced
        self._forget_rotated()

    @torch.no_grad()
    def keep(self, frame_ids: torch.Tensor) -> None:
        """Drop every frame but the given ones (`(frames,)` int64), which all samples must hold."""
        groups, batch_size, _ = self._frame_ids.shape
        kept = (self._frame_ids.unsqueeze(-1) == frame_ids.cpu()).any(-1)
        # A frame may fill a slow and a fast slot: keep the later one, so that all samples keep equally many.
        later_copy = self._frame_ids.unsqueeze(-1) == self._frame_ids.unsqueeze(-2)
        kept &= ~later_copy.triu(1).any(-1)
        if not self._keys or not bool((kept.sum(-1) == len(frame_ids)).all()):
            raise MemoryConfigError(
                f"Frames {frame_ids.tolist()} are not all stored; slots hold {self.frame_ids.tolist()}."
            )
        index = kept.nonzero()[:, -1].view(groups, batch_size, len(frame_ids))
        sample = torch.arange(batch_size)[:, None]
        for stored in (self._keys, self._values):
            for layer, tensor in enumerate(stored):
                stored[layer] = tensor[sample, index[layer if groups > 1 else 0]].contiguous()
        self._frame_ids = self._frame_ids.gather(-1, index)
        self._forget_rotated()

    @abstractmethod
    def _select(
        self, num_slots: int, num_new: int, key_values: KeyValues, promote: torch.Tensor | None
    ) -> torch.Tensor | None:
        """`(groups, batch, kept)` indices into `[stored slots | new frames]`, or `None` to keep everything."""

    def _num_groups(self, num_layers: int) -> int:
        return 1

    def _forget_rotated(self) -> None:
        self._rotated: dict[int, torch.Tensor] = {}

    def _check(self, key_values: KeyValues) -> None:
        if not self._keys:
            return
        if len(key_values) != len(self._keys):
            raise MemoryConfigError(f"The memory holds {len(self._keys)} layers, the model gave {len(key_values)}.")
        stored, new = self._keys[0], key_values[0][0]
        if stored.shape[0] != new.shape[0] or stored.shape[2:] != new.shape[2:]:
            raise MemoryConfigError(
                "The memory belongs to another video or model: it holds (batch, tokens, heads, head_dim) = "
                f"{(stored.shape[0], *stored.shape[2:])}, the model gave {(new.shape[0], *new.shape[2:])}."
            )

    # --- bookkeeping -------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes held now: keys, values and the rotated copy of the keys."""
        tensors = [*self._keys, *self._values, *self._rotated.values()]
        return sum(tensor.nbytes for tensor in tensors)

    def estimate_nbytes(
        self, transformer_config: Mapping[str, Any], tokens_per_frame: int, batch_size: int, dtype: torch.dtype
    ) -> int:
        """Bytes this memory will hold once it is full, known before generation starts.

        Args:
            transformer_config: gives `num_layers`, `num_attention_heads` and `attention_head_dim`.
            tokens_per_frame: tokens of one latent frame.
            batch_size: videos generated together (twice that with classifier-free guidance).
            dtype: the model's type.
        """
        channels = transformer_config["num_attention_heads"] * transformer_config["attention_head_dim"]
        elements = self.capacity * tokens_per_frame * channels * batch_size * transformer_config["num_layers"]
        stored = KV_DTYPES.get(self.config.kv_dtype or "", dtype)
        # keys and values as stored, plus the rotated copy of the keys, which takes at least two bytes
        return elements * (2 * stored.itemsize + max(stored.itemsize, torch.bfloat16.itemsize))

    def clone(self) -> KVMemory:
        """An independent memory with the same content; tensors are shared until either one commits."""
        twin = copy.copy(self)
        twin._keys, twin._values, twin._rotated = list(self._keys), list(self._values), dict(self._rotated)
        return twin

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> KVMemory:
        """Move the stored tensors; returns `self`."""
        self._keys = [tensor.to(device=device, dtype=dtype) for tensor in self._keys]
        self._values = [tensor.to(device=device, dtype=dtype) for tensor in self._values]
        self._forget_rotated()
        return self

    def statistics(self) -> dict[str, Any]:
        """Plain numbers about the present content."""
        ages = (self.num_frames - self.frame_ids).tolist() if self._keys else []
        return {"num_frames": self.num_frames, "num_slots": self.num_slots, "slot_ages": ages, "nbytes": self.nbytes}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Everything as a flat dictionary of tensors, ready for safetensors."""
        header = {"name": self.name, "config": dataclasses.asdict(self.config), **self._scalars()}
        state = {
            "header": torch.tensor(list(json.dumps(header).encode()), dtype=torch.uint8),
            "frame_ids": self._frame_ids.clone(),
        }
        for layer, (key, value) in enumerate(zip(self._keys, self._values, strict=True)):
            state[f"keys.{layer}"], state[f"values.{layer}"] = key, value
        return state

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore what `state_dict` of a memory with the same configuration gave.

        Raises:
            MemoryConfigError: when the state comes from another kind of memory or another configuration.
        """
        header = json.loads(bytes(state["header"].tolist()).decode())
        expected = {"name": self.name, "config": dataclasses.asdict(self.config)}
        found = {"name": header.pop("name"), "config": header.pop("config")}
        if found != expected:
            raise MemoryConfigError(f"The saved memory is {found}, this one is {expected}.")
        if header.keys() != self._scalars().keys():
            raise MemoryConfigError(f"The saved memory holds {sorted(header)}, this one {sorted(self._scalars())}.")
        self.reset()
        num_layers = sum(name.startswith("keys.") for name in state)
        self._keys = [state[f"keys.{layer}"] for layer in range(num_layers)]
        self._values = [state[f"values.{layer}"] for layer in range(num_layers)]
        self._frame_ids = state["frame_ids"].clone()
        for name, value in header.items():
            setattr(self, name, value)

    def _scalars(self) -> dict[str, Any]:
        """Attributes that `state_dict` stores as JSON."""
        return {
            "num_frames": self.num_frames,
            "num_commits": self.num_commits,
            "num_frames_per_block": self.num_frames_per_block,
        }
