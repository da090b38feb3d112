"""Samplers that diffusers lacks, and the settings of those it has."""

from __future__ import annotations

from vidgen.schedulers.flow_consistency import FlowConsistencyScheduler, FlowConsistencySchedulerOutput
from vidgen.schedulers.flow_sampler import denoise, flow_sampler

__all__ = ["FlowConsistencyScheduler", "FlowConsistencySchedulerOutput", "denoise", "flow_sampler"]
