"""A whole pipeline of the real classes, small enough to generate a chunk in milliseconds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from vidgen.models.causal_wan import CausalWanTransformer3DModel
from vidgen.pipelines import ContextForcingPipeline
from vidgen.schedulers import FlowConsistencyScheduler

WORDS = ["a", "meadow", "desert", "coast", "at", "dawn", "night", "in", "the", "rain", "snow", "with", "birds"]


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=8
    )


def make_components(seed: int = 0) -> dict:
    torch.manual_seed(seed)
    text_config = UMT5Config(
        vocab_size=len(WORDS) + 3, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0
    )
    vae = AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        latents_mean=[0.1, 0.0, -0.1, 0.2],
        latents_std=[1.0, 1.2, 0.9, 1.1],
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=8,
        scale_factor_temporal=4,
    )
    transformer = CausalWanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=48,
        num_layers=2,
        rope_max_seq_len=64,
    )
    with torch.no_grad():
        # An untrained network barely hears its inputs; tests of prompts and memory need one that does.
        transformer.proj_out.weight.mul_(4)
        for block in transformer.blocks:
            block.attn2.to_out[0].weight.mul_(4)
            block.attn1.to_out[0].weight.mul_(4)
    return {
        "tokenizer": make_tokenizer(),
        "text_encoder": UMT5EncoderModel(text_config).eval(),
        "vae": vae.eval(),
        "transformer": transformer.eval(),
        "scheduler": FlowConsistencyScheduler(num_inference_steps=2),
    }


def build_pipeline(seed: int = 0, **overrides) -> ContextForcingPipeline:
    components = {**make_components(seed), **overrides}
    pipe = ContextForcingPipeline(**components, fps=12, default_height=16, default_width=32, max_sequence_length=8)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="session")
def make_pipeline() -> Callable[..., ContextForcingPipeline]:
    """Builds a fresh pipeline from a seed, with given components in place of the tiny ones."""
    return build_pipeline


@pytest.fixture(scope="session")
def pipe() -> ContextForcingPipeline:
    """The distilled pipeline: 16x32 pixels, 12 fps, 2 tokens per latent frame. Tests don't change it."""
    return build_pipeline()


@pytest.fixture(scope="session")
def ode_pipe() -> ContextForcingPipeline:
    """The same models with an ODE solver and guidance."""
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    return build_pipeline(scheduler=scheduler)
