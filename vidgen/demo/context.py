"""What every tab of the demo works with, and how a package adds a tab of its own."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vidgen.demo.turns import Turns
from vidgen.demo.uploads import UploadLimits
from vidgen.demo.visitors import Visitors
from vidgen.memory import MemoryConfigError
from vidgen.runtime.errors import ConfigError, VidgenError, suggestion

if TYPE_CHECKING:
    from vidgen.pipelines import ContextForcingPipeline, WorldModelPipeline

TAB_ENTRY_POINTS = "vidgen.demo_tabs"


@dataclass(frozen=True)
class DemoConfig:
    """How much the demo gives to whom.

    Attributes:
        output: folder of everything that it writes, and the only one that it serves files from.
        max_visitors: pages that are kept at a time.
        idle_seconds: how long a page must have been idle before its place goes to somebody new.
        forget_seconds: how long an idle page is kept at most.
        max_seconds: longest video.
        queue_size: requests that may wait.
        uploads: what is taken from visitors.
        tab_models: model folders for tabs of other packages, by the name of the tab's entry point.
    """

    output: Path
    max_visitors: int = 8
    idle_seconds: float = 60.0
    forget_seconds: float = 900.0
    max_seconds: float = 120.0
    queue_size: int = 32
    uploads: UploadLimits = field(default_factory=UploadLimits)
    tab_models: Mapping[str, Sequence[Path]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("max_visitors", "max_seconds", "queue_size"):
            if not getattr(self, name) >= 1:
                raise ConfigError(f"{name}={getattr(self, name)}; allowed: at least 1.")
        for name in ("idle_seconds", "forget_seconds"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}={getattr(self, name)}; allowed: 0 or more.")


@dataclass(frozen=True)
class DemoContext:
    """What tabs share.

    Attributes:
        config: the limits.
        video: the model of long video.
        worlds: world models by name, each with the folder that it was loaded from.
        visitors: who is here. A tab keeps what belongs to a visitor as a part of them, by a name of its own.
        turns: to compute within, `with context.turns.turn():`.
    """

    config: DemoConfig
    video: ContextForcingPipeline
    worlds: Mapping[str, tuple[WorldModelPipeline, Path]]
    visitors: Visitors
    turns: Turns = field(default_factory=Turns)


@dataclass(frozen=True)
class DemoTab:
    """A tab.

    Attributes:
        title: on the tab.
        build: called once within the tab, with gradio imported; makes components and events.
        order: tabs are sorted by it; the tabs of vidgen have 10 and 20.
    """

    title: str
    build: Callable[[DemoContext], None]
    order: int = 100


def installed_tabs(context: DemoContext) -> list[DemoTab]:
    """The tabs of other packages.

    An entry point of the group `vidgen.demo_tabs` names a function `(context) -> DemoTab | None`; `None` where the
    tab has nothing to show, as when what it needs isn't installed. One that fails is left out with a warning.

    Raises:
        VidgenError: a tab can't use the models given for it, or models were given for a tab that isn't there.
    """
    found = {}
    for entry_point in entry_points(group=TAB_ENTRY_POINTS):
        try:
            tab = entry_point.load()(context)
            if tab is not None and not isinstance(tab, DemoTab):
                raise TypeError(f"it gives a {type(tab).__name__}; allowed: DemoTab or None")
        except VidgenError:
            raise
        except Exception as error:  # another package's code, which may fail in any way
            warnings.warn(
                f"the demo tab {entry_point.name!r} ({entry_point.value}) is left out: "
                f"{type(error).__name__}: {error}",
                stacklevel=2,
            )
            continue
        if tab is not None:
            found[entry_point.name] = tab
    for name in context.config.tab_models:
        if name not in found:
            raise VidgenError(
                f"a model is given for the demo tab {name!r}, which isn't here: {suggestion(name, found)}."
            )
    return list(found.values())


def shown(function: Callable[..., Any]) -> Callable[..., Any]:
    """Turns what a visitor can put right into a message on the page, in an event's function or generator."""
    import gradio

    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def generate(*args: Any, **kwargs: Any) -> Any:
            try:
                yield from function(*args, **kwargs)
            except (VidgenError, MemoryConfigError) as error:
                raise gradio.Error(str(error), duration=15, print_exception=False) from error

        return generate

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (VidgenError, MemoryConfigError) as error:
            raise gradio.Error(str(error), duration=15, print_exception=False) from error

    return call
