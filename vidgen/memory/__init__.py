"""Which past a causal video model keeps, and where its keys sit in time."""

from __future__ import annotations

import difflib
from typing import Any

from vidgen.memory.full import FullMemory, FullMemoryConfig
from vidgen.memory.kv_memory import KeyValues, KVMemory, KVMemoryConfig, MemoryConfigError
from vidgen.memory.sliding_window import SlidingWindowMemory, SlidingWindowMemoryConfig
from vidgen.memory.slow_fast import SlowFastMemory, SlowFastMemoryConfig

__all__ = [
    "FullMemory",
    "FullMemoryConfig",
    "KVMemory",
    "KVMemoryConfig",
    "KeyValues",
    "MemoryConfigError",
    "SlidingWindowMemory",
    "SlidingWindowMemoryConfig",
    "SlowFastMemory",
    "SlowFastMemoryConfig",
    "make_memory",
]

MEMORIES: dict[str, tuple[type[KVMemory], type[KVMemoryConfig]]] = {
    "full": (FullMemory, FullMemoryConfig),
    "sliding_window": (SlidingWindowMemory, SlidingWindowMemoryConfig),
    "slow_fast": (SlowFastMemory, SlowFastMemoryConfig),
}


def make_memory(
    memory: str | KVMemoryConfig, num_frames_per_block: int = 3, max_frames: int | None = None, **options: Any
) -> KVMemory:
    """Build an empty memory from a name or a configuration.

    Args:
        memory: `"slow_fast"`, `"sliding_window"`, `"full"`, or one of their configurations.
        num_frames_per_block: latent frames of a chunk.
        max_frames: latent frames of the whole video; sizes the full memory when it is named without a configuration.
        options: fields of the named memory's configuration.

    Raises:
        MemoryConfigError: for an unknown name or option.
    """
    if isinstance(memory, KVMemoryConfig):
        memory_class = next((cls for cls, config in MEMORIES.values() if type(memory) is config), None)
        if memory_class is None or options:
            raise MemoryConfigError(f"{type(memory).__name__} with options {options} does not describe a memory.")
        return memory_class(memory, num_frames_per_block)
    if not isinstance(memory, str) or memory not in MEMORIES:
        near = difflib.get_close_matches(str(memory), MEMORIES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise MemoryConfigError(f"Unknown memory {memory!r}; allowed: {', '.join(MEMORIES)}.{hint}")
    memory_class, config_class = MEMORIES[memory]
    if memory == "full" and max_frames is not None:
        options.setdefault("max_frames", max_frames)
    unknown = set(options) - set(config_class.__dataclass_fields__)
    if unknown:
        allowed = ", ".join(config_class.__dataclass_fields__)
        raise MemoryConfigError(f"Unknown option {sorted(unknown)[0]!r} of memory {memory!r}; allowed: {allowed}.")
    return memory_class(config_class(**options), num_frames_per_block)
