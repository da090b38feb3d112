"""A simulated operating room in the layout of 4D-OR: exact labels, the real long tail, several cameras."""

from __future__ import annotations

from scene_graph.simulator.render import Renderer
from scene_graph.simulator.world import (
    Look,
    Person,
    SceneState,
    SimulatedTake,
    SimulatorConfig,
    Study,
    make_take,
    plan_study,
)
from scene_graph.simulator.writer import simulate

__all__ = [
    "Look",
    "Person",
    "Renderer",
    "SceneState",
    "SimulatedTake",
    "SimulatorConfig",
    "Study",
    "make_take",
    "plan_study",
    "simulate",
]
