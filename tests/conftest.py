"""Settings every test shares: no network, one thread per xdist worker, slow and gpu tests only where they belong."""

from __future__ import annotations

import os

# Before anything imports huggingface_hub, which reads it once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

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


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved `ContextForcingPipeline` with random weights: 32x48 pixels, 12 frames per second, 2 steps per chunk."""
    from diffusers import AutoencoderKLWan
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

    from vidgen.models.causal_wan import CausalWanTransformer3DModel
    from vidgen.pipelines import ContextForcingPipeline
    from vidgen.schedulers import FlowConsistencyScheduler

    words = ["<pad>", "<unk>", "a", "meadow", "desert", "at", "dawn", "in", "the", "rain"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        text_config = UMT5Config(vocab_size=16, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
        pipe = ContextForcingPipeline(
            tokenizer=PreTrainedTokenizerFast(
                tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", model_max_length=8
            ),
            text_encoder=UMT5EncoderModel(text_config),
            vae=AutoencoderKLWan(
                base_dim=4,
                z_dim=16,
                dim_mult=[1, 1, 1],
                num_res_blocks=1,
                temperal_downsample=[True, True],
                in_channels=12,
                out_channels=12,
                patch_size=2,
                scale_factor_spatial=8,
                scale_factor_temporal=4,
            ),
            transformer=CausalWanTransformer3DModel(
                num_attention_heads=2,
                attention_head_dim=12,
                text_dim=16,
                freq_dim=16,
                ffn_dim=32,
                num_layers=1,
            ),
            scheduler=FlowConsistencyScheduler(timesteps=[1000, 500]),
            fps=12.0,
            default_height=32,
            default_width=48,
            max_sequence_length=8,
        )
    folder = tmp_path_factory.mktemp("models") / "tiny"
    pipe.save_pretrained(folder)
    return str(folder)
