"""Text, image and video to long video: pipelines and the sessions they run."""

from __future__ import annotations

from vidgen.pipelines.context_forcing import ContextForcingPipeline, ContextForcingPipelineOutput
from vidgen.pipelines.prompt_plan import PromptPlan, PromptPlanError, PromptSegment
from vidgen.pipelines.session import GenerationSession
from vidgen.pipelines.session_state import GenerationError, GenerationSettings, SessionFileError

__all__ = [
    "ContextForcingPipeline",
    "ContextForcingPipelineOutput",
    "GenerationError",
    "GenerationSession",
    "GenerationSettings",
    "PromptPlan",
    "PromptPlanError",
    "PromptSegment",
    "SessionFileError",
]
