"""Any multimodal language model of transformers as a predictor of scene graphs, with or without a LoRA adapter.

Qwen2.5-VL, Qwen3-VL, LLaVA and whatever else `AutoModelForImageTextToText` loads and a chat template speaks for. What
a processor returns goes to the model whole: Qwen2.5-VL computes other logits, without a word, when it isn't told which
tokens are pictures.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from scene_graph.formats import parse_triplet_text
from scene_graph.predictors.base import (
    SETTINGS_NAME,
    Example,
    Prediction,
    SGGPredictor,
    TokenStats,
    examples_of,
)
from scene_graph.prompting import Message, SGGPromptBuilder
from scene_graph.schema import Sample, SceneGraphError, Vocabulary
from vidgen.runtime.checkpoint import atomic_write
from vidgen.runtime.device import select_device, select_dtype
from vidgen.train import lora

# `head surgeon,instrument table,closeTo; ` is 8 to 10 tokens; the marks around a graph, and names that are longer than
# usual in a graph of few triplets, need some more.
TOKENS_PER_TRIPLET = 10
EXTRA_TOKENS = 20

# The projections of the language part; those of the vision part keep their weights.
LORA_TARGETS = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"

# Everything up to the first character of a predicate, the third of three names.
_BEFORE_PREDICATE = re.compile(r"(?:^|;|<SG>)[^,;<>]*,[^,;<>]*,\s*(?=[^,;<>\s])")


def scene_graph_extra(package: str) -> SceneGraphError:
    """The error for a package that only some features need."""
    return SceneGraphError(f"{package} is not installed; it comes with: pip install vidgen[scene-graph]")


def add_lora(model: Any, rank: int = 16, alpha: int = 32, dropout: float = 0.0, targets: str = LORA_TARGETS) -> Any:
    """`vidgen.train.lora.add_lora` on the language part of a multimodal model."""
    return lora.add_lora(model, targets, lora.LoraConfig(rank, alpha, dropout))


def encode_chats(
    processor: Any, chats: Sequence[Sequence[Message]], ids: Sequence[str], for_generation: bool
) -> dict[str, torch.Tensor]:
    """Chats to everything a model wants to know of them.

    Args:
        processor: of transformers, with a chat template.
        chats: of the batch.
        ids: of the samples, for messages.
        for_generation: ask for an answer and pad on the left, where the answer doesn't begin; otherwise pad on the
            right.

    Raises:
        SceneGraphError: the processor refuses a chat, for instance for the number of its pictures, or pads on the
            wrong side.
    """
    side = "left" if for_generation else "right"
    try:
        encoded = processor.apply_chat_template(
            [list(chat) for chat in chats],
            tokenize=True,
            return_dict=True,
            add_generation_prompt=for_generation,
            processor_kwargs={"padding": True, "padding_side": side, "return_tensors": "pt"},
        )
    except (ValueError, IndexError, StopIteration) as error:
        raise SceneGraphError(f"samples {', '.join(ids)}: the processor can't read the chat: {error}") from error
    edge = encoded["attention_mask"][:, -1 if for_generation else 0]
    if not bool(edge.all()):
        raise SceneGraphError(
            f"{type(processor).__name__} doesn't pad on the {side}, as asked; answers would be computed after padding."
        )
    return dict(encoded)


def eos_ids(processor: Any) -> set[int]:
    """The tokens that end an answer."""
    return {processor.tokenizer.eos_token_id}


def answer_labels(
    processor: Any, chats: Sequence[Sequence[Message]], encoded: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Labels of right-padded chats: the last answer up to the token that ends it, -100 elsewhere.

    The answer's length is counted on the text, in which a picture is one placeholder, and taken from the end.

    Args:
        processor: as in `encode_chats`.
        chats: each with an answer as its last turn.
        encoded: of these chats.

    Raises:
        SceneGraphError: the text of a chat doesn't begin with that of its question, so where the answer begins isn't
            known, or the template doesn't end the answer.
    """
    labels = torch.full_like(encoded["input_ids"], -100)
    for row, chat in enumerate(chats):
        texts = [
            processor.apply_chat_template(list(part), tokenize=False, add_generation_prompt=prompt)
            for part, prompt in ((chat[:-1], True), (chat, False))
        ]
        question, whole = (processor.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
        if whole[: len(question)] != question or len(whole) == len(question):
            raise SceneGraphError(
                f"the chat template of {type(processor).__name__} doesn't put the answer after the question: "
                f"{texts[0][-60:]!r} and {texts[1][len(texts[0]) - 60 :]!r}."
            )
        length = int(encoded["attention_mask"][row].sum())
        begin = length - (len(whole) - len(question))
        ends = [place for place in range(begin, length) if int(encoded["input_ids"][row, place]) in eos_ids(processor)]
        if not ends:
            raise SceneGraphError(
                f"the chat template of {type(processor).__name__} doesn't end an answer with the token "
                f"{processor.tokenizer.eos_token!r}; a model trained so would never stop."
            )
        labels[row, begin : ends[0] + 1] = encoded["input_ids"][row, begin : ends[0] + 1]
    return labels


def predicate_first_tokens(tokenizer: Any, vocabulary: Vocabulary) -> list[int]:
    """The token with the first letter of each predicate, where an answer has it.

    Some tokenizers join the comma before a predicate with its first letters, so the names alone don't tell.
    """
    first = []
    before = f"<SG> {vocabulary.entities[0]},{vocabulary.entities[0]},"
    for predicate in vocabulary.predicates:
        ids = tokenizer(f"{before}{predicate}; ", add_special_tokens=False)["input_ids"]
        first.append(ids[_token_at(tokenizer, ids, len(before))])
    return first


def _token_at(tokenizer: Any, ids: Sequence[int], character: int) -> int:
    """The place of the token in whose text a character lies; texts of prefixes, as tokens alone may drop blanks."""
    low, high = 0, len(ids) - 1
    while low < high:
        middle = (low + high) // 2
        if len(_text(tokenizer, ids[: middle + 1])) > character:
            high = middle
        else:
            low = middle + 1
    return low


def _text(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class _PredicateRecorder:
    """A logits processor that changes nothing and keeps, of each step, what the statistics need.

    All logits of all steps would be gigabytes for a vocabulary of 150,000 tokens.
    """

    def __init__(self, first_tokens: Sequence[int]) -> None:
        self.first_tokens = list(first_tokens)
        self.predicates: list[torch.Tensor] = []  # (B, P) log-probabilities of the predicates' first tokens
        self.chosen: list[torch.Tensor] = []  # (B,) log-probability of the most probable token, which greedy takes

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        logprobs = scores.float().log_softmax(dim=-1)
        self.predicates.append(logprobs[:, self.first_tokens].cpu())
        self.chosen.append(logprobs.amax(dim=-1).cpu())
        return scores


class HFSceneGraphPredictor(SGGPredictor):
    """Greedy decoding of a multimodal language model.

    Args:
        model: of transformers, or of peft around one.
        processor: its processor, with a chat template.
        vocabulary: the names of its graphs.
        prompt: how it is asked; by default with one picture per example.
        max_triplets: most triplets of a training graph; about ten times as many tokens are written at most. The
            customary 300 are too few for graphs with closeTo in both directions.

    Raises:
        SceneGraphError: the processor has no chat template, or the prompt another vocabulary.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        vocabulary: Vocabulary,
        prompt: SGGPromptBuilder | None = None,
        max_triplets: int = 30,
    ) -> None:
        if getattr(processor, "chat_template", None) is None:
            raise SceneGraphError(
                f"{type(processor).__name__} has no chat template; use the processor of an instruction-tuned model."
            )
        if prompt is not None and prompt.vocabulary != vocabulary:
            raise SceneGraphError("the prompt was made for another vocabulary than the predictor's.")
        if max_triplets < 1:
            raise SceneGraphError(f"max_triplets={max_triplets}; it must be 1 or more.")
        self.model, self.processor, self.vocabulary = model.eval(), processor, vocabulary
        self.prompt = prompt or SGGPromptBuilder(vocabulary)
        self.max_triplets = max_triplets

    @classmethod
    def from_pretrained(
        cls,
        directory: str | os.PathLike,
        vocabulary: Vocabulary | None = None,
        adapter: str | os.PathLike | None = None,
        device: str | None = None,
        dtype: str | None = None,
        attn_implementation: str | None = None,
        max_pixels: int | None = None,
    ) -> HFSceneGraphPredictor:
        """Load a model from a folder or the hub's name.

        Args:
            directory: what `save_pretrained` wrote, or any model of the kind.
            vocabulary: the names of its graphs; needed unless the folder says it.
            adapter: folder of a LoRA adapter for the model.
            device: as `select_device` reads it.
            dtype: as `select_dtype` reads it.
            attn_implementation: such as `"sdpa"` or `"flash_attention_2"`.
            max_pixels: most pixels of a picture; larger ones are scaled down.

        Raises:
            SceneGraphError: transformers or peft is missing, or no vocabulary is known.
        """
        try:
            from transformers import AutoModelForImageTextToText, AutoProcessor
        except ImportError as error:
            raise scene_graph_extra("transformers") from error
        directory = str(directory)
        known = {}
        for folder in (adapter, directory):
            if folder is not None and (Path(folder) / SETTINGS_NAME).is_file():
                known = json.loads((Path(folder) / SETTINGS_NAME).read_text(encoding="utf-8"))
                break
        if vocabulary is None and "vocabulary" not in known:
            raise SceneGraphError(f"{directory} doesn't say which names its graphs have; give a vocabulary.")
        vocabulary = vocabulary or Vocabulary.from_dict(known["vocabulary"])

        base = directory
        if (Path(directory) / "adapter_config.json").is_file():
            config = json.loads((Path(directory) / "adapter_config.json").read_text(encoding="utf-8"))
            base, adapter = config["base_model_name_or_path"], directory
        device = select_device(device)
        model = AutoModelForImageTextToText.from_pretrained(
            base, dtype=select_dtype(dtype, device), attn_implementation=attn_implementation
        ).to(device)
        if adapter is not None:
            try:
                from peft import PeftModel
            except ImportError as error:
                raise scene_graph_extra("peft") from error
            model = PeftModel.from_pretrained(model, str(adapter))
        processor = AutoProcessor.from_pretrained(directory)
        if max_pixels is not None:
            if "longest_edge" not in dict(processor.image_processor.size):
                raise SceneGraphError(
                    f"{type(processor.image_processor).__name__} has pictures of a fixed size; leave max_pixels out."
                )
            processor.image_processor.size = {**dict(processor.image_processor.size), "longest_edge": max_pixels}
        prompt = SGGPromptBuilder.from_dict({**known["prompt"], "vocabulary": vocabulary.to_dict()}) if known else None
        return cls(model, processor, vocabulary, prompt, known.get("max_triplets", 30))

    def save_pretrained(self, directory: str | os.PathLike) -> None:
        """Write the model, or its adapter alone if it has one, the processor, and how the model is asked."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        self.model.save_pretrained(directory)
        self.processor.save_pretrained(directory)
        prompt = {key: value for key, value in self.prompt.to_dict().items() if key != "vocabulary"}
        settings = {"vocabulary": self.vocabulary.to_dict(), "prompt": prompt, "max_triplets": self.max_triplets}
        with atomic_write(Path(directory) / SETTINGS_NAME) as path:
            path.write_text(json.dumps(settings, indent=1), encoding="utf-8")

    @property
    def max_new_tokens(self) -> int:
        """Most tokens of an answer."""
        return TOKENS_PER_TRIPLET * self.max_triplets + EXTRA_TOKENS

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens of a prompt that leave room for an answer in the model's context.

        Raises:
            SceneGraphError: the context has no room for a prompt.
        """
        config = self.model.config.get_text_config()
        room = config.max_position_embeddings - self.max_new_tokens
        if room < 1:
            raise SceneGraphError(
                f"max_triplets={self.max_triplets} may need {self.max_new_tokens} tokens, the model's context has "
                f"{config.max_position_embeddings}."
            )
        return room

    def predict(
        self,
        samples: Sequence[Sample],
        examples: Sequence[Sequence[Example]] | None = None,
        batch_size: int = 8,
    ) -> list[Prediction]:
        """As [`SGGPredictor.predict`]; examples that don't fit into the context are dropped with a warning."""
        given = examples_of(samples, examples)
        # Prompts of like length together: padding is wasted work.
        order = sorted(range(len(samples)), key=lambda i: (len(given[i]), len(samples[i].views)))
        predictions: dict[int, Prediction] = {}
        for start in range(0, len(order), batch_size):
            part = order[start : start + batch_size]
            answers = self._generate([samples[index] for index in part], [given[index] for index in part])
            predictions.update(zip(part, answers, strict=True))
        return [predictions[index] for index in range(len(samples))]

    def _length(self, sample: Sample, chat: list[Message]) -> int:
        return encode_chats(self.processor, [chat], [sample.id], for_generation=True)["input_ids"].shape[1]

    @torch.no_grad()
    def _generate(self, samples: Sequence[Sample], examples: Sequence[Sequence[Example]]) -> list[Prediction]:
        from transformers import LogitsProcessorList

        ids, longest = [sample.id for sample in samples], self.max_prompt_tokens
        chats = [self.prompt.messages(sample, chosen) for sample, chosen in zip(samples, examples)]
        counts = [min(len(chosen), self.prompt.max_examples) for chosen in examples]
        inputs = encode_chats(self.processor, chats, ids, for_generation=True)
        too_long = torch.nonzero(inputs["attention_mask"].sum(dim=1) > longest)[:, 0].tolist()
        for row in too_long:
            length = functools.partial(self._length, samples[row])
            kept = examples[row][len(examples[row]) - counts[row] :]
            chats[row], counts[row] = self.prompt.messages_within(samples[row], kept, length, longest)
        if too_long:
            inputs = encode_chats(self.processor, chats, ids, for_generation=True)
        inputs = {name: value.to(self.model.device) for name, value in inputs.items()}
        tokenizer = self.processor.tokenizer
        recorder = _PredicateRecorder(predicate_first_tokens(tokenizer, self.vocabulary))
        output = self.model.generate(
            **inputs,
            max_new_tokens=self.max_new_tokens,
            do_sample=False,
            num_beams=1,
            # Models ship with a penalty, which would make the second drilling of a frame less likely than the first.
            repetition_penalty=1.0,
            temperature=None,
            top_p=None,
            top_k=None,
            pad_token_id=tokenizer.pad_token_id,
            logits_processor=LogitsProcessorList([recorder]),
        )
        written = output[:, inputs["input_ids"].shape[1] :].cpu()
        predicates = torch.stack(recorder.predicates, dim=1).numpy()  # (B, T, P)
        chosen = torch.stack(recorder.chosen, dim=1).numpy()  # (B, T)
        ends = self._stop_tokens()
        predictions = []
        for row, tokens in enumerate(written.tolist()):
            stops = [place for place, token in enumerate(tokens) if token in ends]
            tokens = tokens[: stops[0]] if stops else tokens
            text = _text(tokenizer, tokens).strip()
            parsed = parse_triplet_text(text, self.vocabulary)
            places = self._predicate_places(tokens)
            predictions.append(
                Prediction(
                    graph=parsed.graph,
                    text=text,
                    token_stats=TokenStats(self._distribution(predicates[row, places]), chosen[row, places]),
                    truncated=not stops,
                    num_examples=counts[row],
                    malformed=len(parsed.malformed) + sum(parsed.unknown.values()),
                )
            )
        return predictions

    def _stop_tokens(self) -> set[int]:
        stop = self.model.generation_config.eos_token_id
        stops = set(stop) if isinstance(stop, (list, tuple)) else {stop}
        return (stops | eos_ids(self.processor)) - {None}

    def _predicate_places(self, ids: Sequence[int]) -> list[int]:
        """Which tokens of an answer hold the first letter of a predicate."""
        text = _text(self.processor.tokenizer, ids)
        end = text.find("</SG>")
        body = text if end < 0 else text[:end]
        return [_token_at(self.processor.tokenizer, ids, match.end()) for match in _BEFORE_PREDICATE.finditer(body)]

    def _distribution(self, logprobs: np.ndarray) -> np.ndarray:
        """Log-probabilities of first tokens `(J, P)` to a distribution over predicates.

        Predicates that begin with the same token share its probability equally: at this place nothing tells them
        apart yet.
        """
        first = np.array(predicate_first_tokens(self.processor.tokenizer, self.vocabulary))
        shared = (first[:, None] == first).sum(axis=1)
        logprobs = logprobs.astype(np.float64) - np.log(shared)
        probs = np.exp(logprobs - logprobs.max(axis=1, keepdims=True)) if len(logprobs) else logprobs
        return (probs / probs.sum(axis=1, keepdims=True)).astype(np.float32)

    @torch.no_grad()
    def embed(self, samples: Sequence[Sample], batch_size: int = 8) -> np.ndarray:
        """As [`SGGPredictor.embed`]: the last hidden state of the prompt's last token, which begins the answer."""
        pooled = []
        for start in range(0, len(samples), batch_size):
            part = samples[start : start + batch_size]
            chats = [self.prompt.messages(sample) for sample in part]
            inputs = encode_chats(self.processor, chats, [sample.id for sample in part], for_generation=True)
            inputs = {name: value.to(self.model.device) for name, value in inputs.items()}
            output = self.model(**inputs, output_hidden_states=True, **keep_last_logits(self.model, 1))
            pooled.append(F.normalize(output.hidden_states[-1][:, -1].float(), dim=1).cpu().numpy())
        width = self.model.config.get_text_config().hidden_size
        return np.concatenate(pooled) if pooled else np.empty((0, width), np.float32)


def keep_last_logits(model: Any, count: int) -> dict[str, int]:
    """The argument that makes a model compute logits of its last tokens only, where it can."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return {"logits_to_keep": count} if "logits_to_keep" in inspect.signature(inner.forward).parameters else {}
