"""Text from a causal language model: prompts as the model was taught to read them, plain or speculative decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from vidgen.runtime.checks import check_whole
from vidgen.runtime.errors import VidgenError

from .models import LanguageModel

if TYPE_CHECKING:
    from transformers import LogitsProcessor
    from transformers.generation import BaseStreamer

    from vidgen.language.decoding import Drafter


class GenerationRequestError(VidgenError):
    """A prompt doesn't fit the model, or a setting of the sampler is out of range."""


def encode_prompt(lm: LanguageModel, prompt: str, chat: bool | None = None) -> torch.Tensor:
    """Tokens of a prompt, int64 `(1, length)` on the model's device.

    Args:
        lm: the model.
        prompt: what to continue, or with a chat template what to answer.
        chat: put the prompt into the tokenizer's chat template, ready for the answer; by default where it has one.

    Raises:
        GenerationRequestError: the prompt is empty, or a chat is asked for and there is no template.
    """
    tokenizer = lm.tokenizer
    if not prompt.strip():
        raise GenerationRequestError("the prompt is empty; give a text to continue or to answer.")
    if chat and tokenizer.chat_template is None:
        raise GenerationRequestError("the tokenizer has no chat template; only an instruct model can be talked to.")
    if chat or (chat is None and tokenizer.chat_template is not None):
        encoded = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
            enable_thinking=False,  # templates that don't know it ignore it; the others would think aloud first
        )
    else:
        encoded = tokenizer(prompt, return_tensors="pt")
    return encoded["input_ids"].to(lm.device)


def room_for_answer(lm: LanguageModel, input_ids: torch.Tensor) -> int:
    """Tokens that the model's context has left behind a prompt `(1, length)`.

    Raises:
        GenerationRequestError: there are none.
    """
    context = lm.model.config.get_text_config().max_position_embeddings
    room = context - input_ids.shape[1]
    if room < 1:
        raise GenerationRequestError(
            f"the prompt has {input_ids.shape[1]} tokens, the model's context {context}; "
            "shorten it or use a model with a longer context."
        )
    return room


def check_room(lm: LanguageModel, input_ids: torch.Tensor, max_new_tokens: int) -> None:
    """Refuses more tokens than the context has left behind a prompt `(1, length)`.

    Raises:
        GenerationRequestError: says how many it has room for.
    """
    room = room_for_answer(lm, input_ids)
    if max_new_tokens > room:
        raise GenerationRequestError(
            f"max_new_tokens={max_new_tokens}; behind {input_ids.shape[1]} tokens of prompt the model's context has "
            f"room for {room}."
        )


def stop_tokens(lm: LanguageModel) -> list[int]:
    """Tokens that end an answer, those of the tokenizer first."""
    stated = lm.model.generation_config.eos_token_id
    stated = [] if stated is None else [stated] if isinstance(stated, int) else list(stated)
    own = [] if lm.tokenizer.eos_token_id is None else [lm.tokenizer.eos_token_id]
    return list(dict.fromkeys(own + stated))


def generate_tokens(
    lm: LanguageModel,
    input_ids: torch.Tensor,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    decoder: str | Drafter | None = None,
    logits_processor: Sequence[LogitsProcessor] = (),
    streamer: BaseStreamer | None = None,
) -> torch.Tensor:
    """The tokens that follow a prompt.

    Settings of the sampler that come with a model are not used: what isn't given here is off.

    Args:
        lm: the model.
        input_ids: int64 `(1, length)`.
        max_new_tokens: most tokens of the answer.
        temperature: 0 takes the most probable token.
        top_p: draw from the most probable tokens that have this probability together.
        seed: same machine, same seed, same tokens.
        decoder: drafter for speculative decoding, or the name of one, such as `"prompt_lookup"`; `None` decodes token
            by token. A drafter that is given keeps the `stats` of the run.
        logits_processor: changes of the logits, before temperature and `top_p`.
        streamer: gets the prompt and then the tokens as they come.

    Returns:
        int64 `(new tokens,)`, with the token that ended it, if one did.

    Raises:
        GenerationRequestError: there is no room for so many tokens, or a setting is out of range.
        ConfigError: the decoder is unknown.
    """
    from transformers import GenerationConfig, LogitsProcessorList

    check_whole(1, max_new_tokens=max_new_tokens)
    check_room(lm, input_ids, max_new_tokens)
    if not 0 <= temperature < float("inf"):
        raise GenerationRequestError(f"temperature={temperature}; it must be 0 or more, and finite.")
    if not 0 < top_p <= 1:
        raise GenerationRequestError(f"top_p={top_p}; it must be above 0 and at most 1.")
    sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0} if temperature else {}
    config = GenerationConfig(
        **{"do_sample": False, **sampling},
        max_new_tokens=max_new_tokens,
        repetition_penalty=1.0,
        eos_token_id=stop_tokens(lm) or None,
        pad_token_id=lm.tokenizer.pad_token_id,
    )
    given = {
        "generation_config": config,
        "logits_processor": LogitsProcessorList(logits_processor),
        "attention_mask": torch.ones_like(input_ids),
        "streamer": streamer,
    }
    devices = [lm.device] if lm.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)  # transformers draws from the global generator
        if decoder is None:
            tokens = lm.model.generate(input_ids, **given)
        else:
            from vidgen.language.decoding import generate, make_drafter

            drafter = make_drafter(decoder, lm.model) if isinstance(decoder, str) else decoder
            tokens = generate(lm.model, input_ids, drafter=drafter, **given)
    return tokens[0, input_ids.shape[1] :]
