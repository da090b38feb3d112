"""The language companion: causal and diffusion language models of transformers on the runtime of the video library."""

from .models import LanguageModel, LanguageModelError, decoder_layers, load_language_model

__all__ = ["LanguageModel", "LanguageModelError", "decoder_layers", "load_language_model"]
