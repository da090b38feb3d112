"""Text, image and video to long video, and playable worlds: pipelines and the sessions they run."""

from __future__ import annotations

from vidgen.pipelines.context_forcing import ContextForcingPipeline, ContextForcingPipelineOutput
from vidgen.pipelines.play import ScriptError, load_starts, parse_script
from vidgen.pipelines.prompt_plan import PromptPlan, PromptPlanError, PromptSegment
from vidgen.pipelines.session import GenerationSession
from vidgen.pipelines.session_state import GenerationError, GenerationSettings, SessionFileError
from vidgen.pipelines.world_model import WorldModelOutput, WorldModelPipeline
from vidgen.pipelines.world_session import WorldSession, WorldSessionError, WorldSnapshot

__all__ = [
    "ContextForcingPipeline",
    "ContextForcingPipelineOutput",
    "GenerationError",
    "GenerationSession",
    "GenerationSettings",
    "PromptPlan",
    "PromptPlanError",
    "PromptSegment",
    "ScriptError",
    "SessionFileError",
    "WorldModelOutput",
    "WorldModelPipeline",
    "WorldSession",
    "WorldSessionError",
    "WorldSnapshot",
    "load_starts",
    "parse_script",
]
