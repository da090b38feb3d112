"""Samplers that diffusers lacks."""

from __future__ import annotations

from vidgen.schedulers.flow_consistency import FlowConsistencyScheduler, FlowConsistencySchedulerOutput

__all__ = ["FlowConsistencyScheduler", "FlowConsistencySchedulerOutput"]
