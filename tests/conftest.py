"""What every test shares: no network, one thread per xdist worker, slow and gpu tests only where they belong, and the
tiny models."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Before anything imports huggingface_hub, which reads it once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from scene_graph.pipeline import SGGICLPipeline
    from scene_graph.schema import Sample
    from vidgen.controls import ControlEncoder
    from vidgen.pipelines import ContextForcingPipeline, WorldModelPipeline

TINY_WORDS = ["a", "meadow", "desert", "coast", "at", "dawn", "night", "in", "the", "rain", "snow", "with", "birds"]
TEXT_WORDS = [
    "meadow",
    "river",
    "dawn",
    "rain",
    "storm",
    "lantern",
    "harbor",
    "snow",
    "birds",
    "train",
    "window",
    "night",
]

if "PYTEST_XDIST_WORKER" in os.environ:
    # Several workers share the cores: more threads than cores slow small operations several-fold.
    torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        no_gpu = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(no_gpu)
    if "slow" not in (config.option.markexpr or ""):
        slow = [item for item in items if "slow" in item.keywords]
        if slow:
            config.hook.pytest_deselected(items=slow)
            items[:] = [item for item in items if "slow" not in item.keywords]


def build_pipeline(seed: int = 0, **overrides: Any) -> ContextForcingPipeline:
    """A whole pipeline of the real classes with random weights, small enough to generate a chunk in milliseconds."""
    # Here and not above: most tests need none of these.
    from diffusers import AutoencoderKLWan
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

    from vidgen.models.causal_wan import CausalWanTransformer3DModel
    from vidgen.pipelines import ContextForcingPipeline
    from vidgen.schedulers import FlowConsistencyScheduler

    vocabulary = {word: index for index, word in enumerate(["<pad>", "</s>", "<unk>", *TINY_WORDS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        text_config = UMT5Config(
            vocab_size=len(vocabulary), d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0
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
        text_encoder = UMT5EncoderModel(text_config)
    with torch.no_grad():
        # An untrained network barely hears its inputs; tests of prompts and memory need one that does.
        transformer.proj_out.weight.mul_(4)
        for block in transformer.blocks:
            block.attn2.to_out[0].weight.mul_(4)
            block.attn1.to_out[0].weight.mul_(4)
    parts = {
        "tokenizer": PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=64
        ),
        "text_encoder": text_encoder.eval(),
        "vae": vae.eval(),
        "transformer": transformer.eval(),
        "scheduler": FlowConsistencyScheduler(num_inference_steps=2),
        "fps": 12,
        "default_height": 16,
        "default_width": 32,
        "max_sequence_length": 8,
    }
    pipe = ContextForcingPipeline(**{**parts, **overrides})
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="session")
def make_pipeline() -> Callable[..., ContextForcingPipeline]:
    """Builds a fresh tiny pipeline from a seed, with given components or settings in place of its own."""
    return build_pipeline


def build_world_model(
    encoder: ControlEncoder | None = None, window: int = 4, forcing: str | None = None, **settings: Any
) -> WorldModelPipeline:
    """A world model of 8 x 8 pixels and 2 denoising steps; no weight is zero, so that every input reaches the output.

    Without an encoder it is steered by recorded motion with the choices "forward" and "turn left".
    """
    from diffusers import AutoencoderKL

    from vidgen.controls import ControlEncoder, DeltaControls, planar_delta_spec
    from vidgen.models.world_dit import WorldDiT
    from vidgen.pipelines import WorldModelPipeline
    from vidgen.schedulers import flow_sampler

    if encoder is None:
        moves = planar_delta_spec("cells", **{"forward": {"forward": 0.5}, "turn left": {"turn left": 0.4}})
        encoder = ControlEncoder(DeltaControls(moves), "vector", units=(0.5, 0.5, 0.4))
    torch.manual_seed(0)
    transformer = WorldDiT(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=2,
        ffn_dim=16,
        num_layers=2,
        control_type=encoder.control_type,
        control_dim=encoder.control_dim,
        control_frame=encoder.control_frame,
        window=window,
        rope_dims=(4, 2, 2),
        freq_dim=16,
        forcing=forcing,
    )
    for parameter in transformer.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.3)
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        layers_per_block=1,
        latent_channels=2,
        norm_num_groups=4,
        scaling_factor=1.3,
        shift_factor=0.1,
    )
    settings = {"controls": encoder.to_dict(), "fps": 8, "num_inference_steps": 2, "context_sigma": 0.3, **settings}
    pipe = WorldModelPipeline(transformer.eval(), vae.eval(), flow_sampler(2), **settings)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="session")
def make_world_model() -> Callable[..., WorldModelPipeline]:
    """Builds a tiny world model for a control encoder, a window, and settings of the pipeline."""
    return build_world_model


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny pipeline saved: 32x48 pixels, 12 frames per second, 2 steps per chunk, prompts of a whole sentence."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    build_pipeline(default_height=32, default_width=48, max_sequence_length=64).save_pretrained(folder)
    return str(folder)


def run_in_two_processes(script: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        output, errors = process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its workers; killed, it would leave them behind
        process.communicate()
        raise
    assert process.returncode == 0, errors[-4000:]
    return output


@pytest.fixture(scope="session")
def run_two_processes() -> Callable[..., str]:
    """Calls torchrun with a script and its arguments; returns what both processes printed, fails if one fails."""
    return run_in_two_processes


def build_scene_pipeline(scenes: Sequence[Sample], max_triplets: int = 8) -> SGGICLPipeline:
    """A scene-graph pipeline of 32 x 32 pixels that draws its examples from labeled scenes; random weights, scaled so
    that pictures and examples change the answer."""
    from scene_graph.pipeline import SGGICLConfig, SGGICLPipeline
    from scene_graph.predictors import TinyPredictor, TinySGGModel
    from scene_graph.reranker import TinyReranker
    from scene_graph.retrieval import PredictorEncoder, RetrievalConfig, SceneIndex
    from scene_graph.router import FEATURE_NAMES, AdaptiveRouter
    from scene_graph.schema import TailSplit, Vocabulary

    vocabulary = Vocabulary.or4d()
    tail = TailSplit(
        ("closeTo",), ("drilling", "sawing"), {"closeTo": 1.0, "drilling": 0.05, "sawing": 0.05}, 0.1, "train"
    )
    torch.manual_seed(0)
    model = TinySGGModel(
        vocabulary.entities,
        vocabulary.predicates,
        image_size=32,
        max_triplets=max_triplets,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    predictor = TinyPredictor(model, vocabulary)
    index = SceneIndex.build(scenes, PredictorEncoder(predictor), tail, vocabulary)
    features = np.random.default_rng(0).normal(size=(20, len(FEATURE_NAMES)))
    router = AdaptiveRouter().fit(features, np.arange(20) % 2 == 0)
    reranker = TinyReranker(image_size=32, channels=16, num_maps=1, hidden_size=8).eval()
    retrieval = RetrievalConfig(pool=6, dedup_seconds=0.0, tail_quota=1)
    return SGGICLPipeline(predictor, index, router, reranker, SGGICLConfig(num_examples=2, retrieval=retrieval))


@pytest.fixture(scope="session")
def make_scene_pipeline() -> Callable[..., SGGICLPipeline]:
    """Builds a tiny scene-graph pipeline from labeled scenes."""
    return build_scene_pipeline


def make_text(index: int) -> str:
    generator = torch.Generator().manual_seed(index)
    words = [TEXT_WORDS[int(number)] for number in torch.randint(len(TEXT_WORDS), (60,), generator=generator)]
    return "".join(f"the {first} and the {second}.\n" for first, second in zip(words[::2], words[1::2]))


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 text files in two folders."""
    folder = tmp_path_factory.mktemp("texts")
    for index in range(40):
        path = folder / f"part{index % 2}" / f"file{index}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(make_text(index))
    return folder


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with a few merges."""
    from vidgen.language.corpus import train_tokenizer

    return train_tokenizer([make_text(index) for index in range(8)], 300, 64)


@pytest.fixture(scope="session")
def save_language_model(byte_tokenizer) -> Callable[..., Path]:
    """Writes a model with random weights and its tokenizer to a folder; keyword arguments change its config."""

    def save(folder: Path, kind: str = "llama", **changes) -> Path:
        from transformers import AutoConfig, AutoModelForCausalLM

        sizes = {
            "vocab_size": len(byte_tokenizer),
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 2048,
            "eos_token_id": byte_tokenizer.eos_token_id,
            "bos_token_id": byte_tokenizer.bos_token_id,
            "pad_token_id": byte_tokenizer.pad_token_id,
        }
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **{**sizes, **changes})
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        byte_tokenizer.save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="session")
def tiny_lm_folder(tmp_path_factory, save_language_model) -> Path:
    """The folder of a tiny Llama."""
    return save_language_model(tmp_path_factory.mktemp("models") / "tiny-lm")
