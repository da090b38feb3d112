"""Qwen3-VL and Qwen2.5-VL, small and made here: the real classes, a processor trained on the words of scene graphs."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch

from scene_graph.schema import Vocabulary

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
KINDS = ("qwen3", "qwen2.5")


def make_tokenizer(texts: list[str]):
    """A byte-level BPE tokenizer in which frequent words of `texts`, and "yes" and "no", are single tokens."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from tokenizers.trainers import BpeTrainer
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=700,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts, *["yes no"] * 20], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=[token for token in SPECIAL if token not in ("<|endoftext|>", "<|im_end|>")],
    )


def triplet_texts(vocabulary: Vocabulary) -> list[str]:
    """Lines that have every name where a graph's text would have it."""
    pairs = itertools.product(vocabulary.entities, vocabulary.predicates)
    return [f"<SG> {entity},{entity},{predicate}; {entity},{entity},{predicate} </SG>" for entity, predicate in pairs]


def make_processor(kind: str, vocabulary: Vocabulary, pixels: int = 64 * 64):
    """The processor of `kind`; pictures get about `pixels` pixels."""
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen3VLProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    tokenizer = make_tokenizer(triplet_texts(vocabulary))
    # Both edges are numbers of pixels in all, whatever their names say.
    size = {"shortest_edge": pixels // 4, "longest_edge": pixels}
    image_processor = Qwen2VLImageProcessor(
        patch_size=16 if kind == "qwen3" else 14, merge_size=2, temporal_patch_size=2, size=size
    )
    video_class, processor_class = {
        "qwen3": (Qwen3VLVideoProcessor, Qwen3VLProcessor),
        "qwen2.5": (Qwen2VLVideoProcessor, Qwen2_5_VLProcessor),
    }[kind]
    return processor_class(
        image_processor=image_processor, tokenizer=tokenizer, video_processor=video_class(), chat_template=TEMPLATE
    )


def make_model(kind: str, tokenizer, seed: int = 0, max_length: int = 4096):
    """A random model of `kind` with somewhat more than a million parameters."""
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
    )

    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL}
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": max_length,
        # Qwen2.5 would otherwise stop at 151645, which this vocabulary doesn't have.
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "tie_word_embeddings": True,
    }
    tokens = {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": True,
    }
    torch.manual_seed(seed)
    if kind == "qwen3":
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
        config = Qwen3VLConfig(
            text_config={**text, "head_dim": 32, "rope_parameters": rope},
            vision_config={
                "depth": 3,
                "hidden_size": 96,
                "intermediate_size": 192,
                "num_heads": 4,
                "patch_size": 16,
                "out_hidden_size": 128,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0, 1],
            },
            **tokens,
        )
        return Qwen3VLForConditionalGeneration(config).eval()
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    config = Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": rope},
        vision_config={
            "depth": 3,
            "hidden_size": 96,
            "intermediate_size": 192,
            "num_heads": 4,
            "patch_size": 14,
            "out_hidden_size": 128,
            "window_size": 56,
            "fullatt_block_indexes": [2],
        },
        **tokens,
    )
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def save_qwen(folder: Path, kind: str, vocabulary: Vocabulary | None = None, seed: int = 0, pixels: int = 64 * 64):
    """A folder that `AutoProcessor` and `AutoModelForImageTextToText` load."""
    processor = make_processor(kind, vocabulary or Vocabulary.or4d(), pixels)
    model = make_model(kind, processor.tokenizer, seed)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
