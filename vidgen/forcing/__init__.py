"""Objectives of causal video diffusion, one file per paradigm."""
