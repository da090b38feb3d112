"""What would be wrong: a model's own sampling settings that slip in, a prompt in another form than the model was
taught, an answer beyond the context, a decoder that changes the text."""

from __future__ import annotations

import pytest
import torch

from vidgen.language import load_language_model
from vidgen.language.generation import (
    GenerationRequestError,
    encode_prompt,
    generate_tokens,
    room_for_answer,
    stop_tokens,
)
from vidgen.runtime.errors import VidgenError

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[answer]{% if enable_thinking is false %}[no thoughts]{% endif %}{% endif %}"
)


@pytest.fixture
def lm(tiny_lm_folder):
    return load_language_model(tiny_lm_folder, device="cpu")


def test_greedy_tokens_are_the_most_probable_ones(lm):
    # Settings that come with many models.
    lm.model.generation_config.update(do_sample=True, temperature=0.6, top_k=2, repetition_penalty=1.5)
    input_ids = encode_prompt(lm, "the meadow and")
    tokens = generate_tokens(lm, input_ids, 12)
    sequence = torch.cat([input_ids[0], tokens])[None]
    best = lm.model(sequence).logits[0, input_ids.shape[1] - 1 : -1].argmax(-1)
    assert torch.equal(tokens, best)
    assert len(tokens) == 12 or int(tokens[-1]) in stop_tokens(lm)


def test_drawn_tokens_follow_from_the_seed_alone(lm):
    input_ids = encode_prompt(lm, "the")
    state = torch.random.get_rng_state()
    drawn = [generate_tokens(lm, input_ids, 10, temperature=1.0, seed=seed).tolist() for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert torch.equal(torch.random.get_rng_state(), state)


def test_an_instruct_model_is_asked_through_its_template(lm):
    plain = encode_prompt(lm, "why?")
    assert lm.tokenizer.decode(plain[0]) == "why?"
    with pytest.raises(GenerationRequestError, match="no chat template"):
        encode_prompt(lm, "why?", chat=True)
    lm.tokenizer.chat_template = TEMPLATE
    assert lm.tokenizer.decode(encode_prompt(lm, "why?")[0]) == "[user]why?[answer][no thoughts]"
    assert torch.equal(encode_prompt(lm, "why?", chat=False), plain)


def test_what_does_not_fit_is_refused(lm):
    lm.model.config.max_position_embeddings = 8
    input_ids = torch.ones(1, 6, dtype=torch.long)
    assert room_for_answer(lm, input_ids) == 2
    with pytest.raises(GenerationRequestError, match="max_new_tokens=3; behind 6 tokens of prompt .* has room for 2"):
        generate_tokens(lm, input_ids, 3)
    with pytest.raises(GenerationRequestError, match="the prompt has 8 tokens, the model's context 8"):
        room_for_answer(lm, torch.ones(1, 8, dtype=torch.long))
    for setting in ({"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.1}):
        with pytest.raises(GenerationRequestError, match=f"{next(iter(setting))}="):
            generate_tokens(lm, input_ids, 1, **setting)
    with pytest.raises(VidgenError, match="max_new_tokens=0"):
        generate_tokens(lm, input_ids, 0)
    with pytest.raises(GenerationRequestError, match="the prompt is empty"):
        encode_prompt(lm, " \n")


def test_a_decoder_by_name_gives_the_same_greedy_tokens(lm):
    input_ids = encode_prompt(lm, "the rain and the rain and the")
    plain = generate_tokens(lm, input_ids, 16)
    assert torch.equal(generate_tokens(lm, input_ids, 16, decoder="prompt_lookup"), plain)
    with pytest.raises(VidgenError, match="unknown drafter 'prompt_lokup'"):
        generate_tokens(lm, input_ids, 16, decoder="prompt_lokup")
