"""A scene-graph model that trains on a CPU in minutes and reads labeled examples like a large one.

A sequence is `[views] <sg> subject object predicate … </sg>`, once for each example and once for the query, through
one causal transformer: what a multimodal language model does, with a convolutional stem for the images and a list of
some 30 words. Large models bring the ability to copy from their context along; a tiny one has to be given it
([`CopyAttention`]), or it learns the task long before it learns to read examples.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from diffusers.utils import BaseOutput
from PIL import Image
from torch import nn

from scene_graph.formats import format_triplet_text
from scene_graph.predictors.base import (
    SETTINGS_NAME,
    Example,
    Prediction,
    SGGPredictor,
    TokenStats,
    examples_of,
)
from scene_graph.schema import Sample, SceneGraph, SceneGraphError, Triplet, Vocabulary
from vidgen.runtime.checkpoint import atomic_write
from vidgen.runtime.device import select_device

PAD, START, END = 0, 1, 2
NUM_SPECIAL = 3
STEM_STRIDE = 16
# Above the score of equal states of width 96, so that copying has to earn its share.
SENTINEL_BIAS = 12.0

# A layer's keys and values, each (batch, heads, tokens, head_dim).
KeyValue = tuple[torch.Tensor, torch.Tensor]


@dataclass
class TinySGGOutput(BaseOutput):
    """Output of [`TinySGGModel`].

    Args:
        logits: `(batch, scenes, words, vocabulary)`: what follows each word; normalized.
        hidden_states: `(batch, scenes, tokens, hidden_size)` after the last norm; views first, then words.
        key_values: keys and values of every layer.
        key_mask: `(batch, scenes * tokens)`: which of them may be attended to.
        pictures: `(batch, scenes, hidden_size)`: what each scene's words know of its views from the start.
        shown: what the last scene may copy.
    """

    logits: torch.Tensor
    hidden_states: torch.Tensor
    key_values: list[KeyValue]
    key_mask: torch.Tensor
    pictures: torch.Tensor
    shown: ShownWords


@dataclass
class ShownWords:
    """Words of earlier scenes, each with the state that it was to be predicted from.

    Args:
        states: `(batch, shown, hidden_size)`.
        words: `(batch, shown)`: the word after each state.
        mask: bool `(batch, queries, shown)`: which of them each query may copy.
    """

    states: torch.Tensor
    words: torch.Tensor
    mask: torch.Tensor


class CopyAttention(nn.Module):
    """Answers with the model's own words or with those of the examples, whichever fits better.

    A state is compared with the states before every word of the examples, which stand for "after these words, in front
    of such a picture"; the words that followed there share the probability that the sentinel leaves them ("Pointer
    Sentinel Mixture Models", arXiv 1609.07843). Without examples it is the softmax of the logits.

    Args:
        hidden_size: width of the states.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.to_query = nn.Linear(hidden_size, hidden_size, bias=False)
        self.to_key = nn.Linear(hidden_size, hidden_size, bias=False)
        self.sentinel = nn.Linear(hidden_size, 1)
        # Like states attract each other from the first step on, while most of the probability stays with the model.
        nn.init.eye_(self.to_query.weight)
        nn.init.eye_(self.to_key.weight)
        nn.init.zeros_(self.sentinel.weight)
        nn.init.constant_(self.sentinel.bias, SENTINEL_BIAS)

    def forward(self, logits: torch.Tensor, states: torch.Tensor, shown: ShownWords) -> torch.Tensor:
        """Log-probabilities `(batch, queries, vocabulary)` of `logits` of that shape and `states` `(batch, queries,
        hidden_size)`."""
        scores = self.to_query(states) @ self.to_key(shown.states).transpose(1, 2) * states.shape[-1] ** -0.5
        scores = torch.cat([self.sentinel(states), scores.masked_fill(~shown.mask, -torch.inf)], dim=2)
        weights = scores.float().softmax(dim=2)  # (B, Q, 1 + shown)
        probabilities = logits.float().softmax(dim=2) * weights[..., :1]
        words = shown.words[:, None].expand(-1, states.shape[1], -1)
        probabilities = probabilities.scatter_add(2, words, weights[..., 1:])
        return probabilities.clamp(min=torch.finfo(torch.float32).tiny).log()


class TinySGGBlock(nn.Module):
    """Attention and MLP, each behind a LayerNorm."""

    def __init__(self, hidden_size: int, num_heads: int, mlp_ratio: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(hidden_size)
        self.to_qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.to_out = nn.Linear(hidden_size, hidden_size)
        self.norm2 = nn.LayerNorm(hidden_size)
        self.mlp = nn.Sequential(
            nn.Linear(hidden_size, mlp_ratio * hidden_size),
            nn.GELU(approximate="tanh"),
            nn.Linear(mlp_ratio * hidden_size, hidden_size),
        )

    def forward(
        self, hidden_states: torch.Tensor, mask: torch.Tensor, past: KeyValue | None = None
    ) -> tuple[torch.Tensor, KeyValue]:
        """`mask` is bool `(batch, 1, queries, past + queries)`; the keys and values that come back have the past's."""
        qkv = self.to_qkv(self.norm1(hidden_states)).unflatten(2, (3, self.num_heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        if past is not None:
            key, value = torch.cat([past[0], key], dim=2), torch.cat([past[1], value], dim=2)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        hidden_states = hidden_states + self.to_out(attended.transpose(1, 2).flatten(2))
        return hidden_states + self.mlp(self.norm2(hidden_states)), (key, value)


class TinySGGModel(ModelMixin, ConfigMixin):
    """A causal transformer over the views and the words of one or several scenes.

    Scene i of a sequence sees the scenes before it, so it is an answer with i examples, and one sequence trains every
    number of examples at once. A scene is marked by its place in the sequence, counted from the start: what is a first
    scene in training looks like a query without examples in use. Views of a scene see each other; words see the views
    and the words before them.

    Args:
        entities: names, in the order of the vocabulary.
        predicates: names, in the order of the vocabulary.
        image_size: side of a view in pixels, a multiple of 16.
        num_views: most views of a scene.
        max_examples: most examples before the query.
        max_triplets: most triplets of a graph.
        hidden_size: width.
        num_layers: transformer blocks.
        num_heads: attention heads.
        mlp_ratio: width of the MLP over `hidden_size`.

    Raises:
        SceneGraphError: a size that isn't possible.
    """

    _no_split_modules = ["TinySGGBlock"]
    _repeated_blocks = ["TinySGGBlock"]

    @register_to_config
    def __init__(
        self,
        entities: Sequence[str],
        predicates: Sequence[str],
        image_size: int = 64,
        num_views: int = 2,
        max_examples: int = 2,
        max_triplets: int = 24,
        hidden_size: int = 96,
        num_layers: int = 3,
        num_heads: int = 4,
        mlp_ratio: int = 4,
    ) -> None:
        super().__init__()
        if image_size < STEM_STRIDE or image_size % STEM_STRIDE or hidden_size % num_heads or hidden_size % 8:
            raise SceneGraphError(
                f"image_size={image_size}, hidden_size={hidden_size}, num_heads={num_heads}; allowed: an image_size "
                f"that is a multiple of {STEM_STRIDE}, a hidden_size that is a multiple of num_heads and of 8."
            )
        self.num_words = NUM_SPECIAL + len(entities) + len(predicates)
        self.first_predicate = NUM_SPECIAL + len(entities)
        self.view_tokens = (image_size // STEM_STRIDE) ** 2

        self.stem = nn.Sequential(
            nn.Conv2d(3, hidden_size // 2, 4, stride=4),
            nn.GroupNorm(4, hidden_size // 2),
            nn.GELU(approximate="tanh"),
            nn.Conv2d(hidden_size // 2, hidden_size, 3, stride=2, padding=1),
            nn.GroupNorm(8, hidden_size),
            nn.GELU(approximate="tanh"),
            nn.Conv2d(hidden_size, hidden_size, 3, stride=2, padding=1),
        )
        self.picture = nn.Linear(2 * hidden_size, hidden_size)
        self.token_embedding = nn.Embedding(self.num_words, hidden_size)
        self.position_embedding = nn.Embedding(3 * max_triplets + 2, hidden_size)  # START, words, END
        self.patch_embedding = nn.Embedding(self.view_tokens, hidden_size)
        self.view_embedding = nn.Embedding(num_views, hidden_size)
        self.scene_embedding = nn.Embedding(max_examples + 1, hidden_size)
        self.blocks = nn.ModuleList([TinySGGBlock(hidden_size, num_heads, mlp_ratio) for _ in range(num_layers)])
        self.norm_out = nn.LayerNorm(hidden_size)
        # The output layer is the word embedding; with rows of norm 10 the first logits would be far too large.
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.05)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        self.copy_attention = CopyAttention(hidden_size)

    def forward(
        self,
        images: torch.Tensor,
        view_mask: torch.Tensor,
        words: torch.Tensor,
        isolated: torch.Tensor | None = None,
    ) -> TinySGGOutput:
        """Runs whole sequences.

        Args:
            images: uint8 `(batch, scenes, views, height, width, 3)`.
            view_mask: bool `(batch, scenes, views)`; views that don't exist are false, one of each scene is true.
            words: `(batch, scenes, words)`; `START` first, `PAD` after the last.
            isolated: bool `(batch,)`: rows whose scenes don't see each other, each being a first scene.
        """
        batch, scenes = view_mask.shape[:2]
        num_words = words.shape[2]
        if isolated is None:
            isolated = torch.zeros(batch, dtype=torch.bool, device=words.device)

        views = self.encode_views(images, view_mask)  # (B, S, V * patches, D)
        is_patch = view_mask.repeat_interleave(self.view_tokens, dim=2)  # (B, S, V * patches)
        pictures = self.summarize(views, is_patch)  # (B, S, D)
        positions = torch.arange(num_words, device=words.device)
        text = self.token_embedding(words) + self.position_embedding(positions) + pictures[:, :, None]  # (B, S, T, D)
        scene = torch.arange(scenes, device=words.device)
        place = torch.where(isolated[:, None], 0, scene)  # (B, S)
        hidden_states = torch.cat([views, text], dim=2) + self.scene_embedding(place)[:, :, None]
        tokens = hidden_states.shape[2]

        # Who sees whom: a token's own scene up to itself and all of its views, and whole scenes before it.
        is_real = torch.cat([is_patch, words != PAD], dim=2).flatten(1)
        order = torch.cat([torch.zeros(tokens - num_words, device=words.device), positions + 1]).repeat(scenes)
        scene_of = scene.repeat_interleave(tokens)
        own = (scene_of[:, None] == scene_of) & (order <= order[:, None])
        before = (scene_of < scene_of[:, None]) & ~isolated[:, None, None]
        mask = ((own | before) & is_real[:, None])[:, None]  # (B, 1, L, L)

        hidden_states = hidden_states.flatten(1, 2)
        key_values = []
        for block in self.blocks:
            hidden_states, key_value = block(hidden_states, mask)
            key_values.append(key_value)
        hidden_states = self.norm_out(hidden_states).unflatten(1, (scenes, tokens))
        states = hidden_states[:, :, tokens - num_words :].flatten(1, 2)  # (B, S * T, D)

        # A word may be copied from a state before it in its scene; what follows the last one is no word.
        following = F.pad(words[:, :, 1:], (0, 1), value=PAD).flatten(1)  # (B, S * T)
        scene_of = scene.repeat_interleave(num_words)
        earlier = (scene_of < scene_of[:, None]) & ~isolated[:, None, None]
        shown = ShownWords(states, following, earlier & (following != PAD)[:, None])
        logits = self.copy_attention(states @ self.token_embedding.weight.T, states, shown)
        return TinySGGOutput(
            logits=logits.unflatten(1, (scenes, num_words)),
            hidden_states=hidden_states,
            key_values=key_values,
            key_mask=is_real,
            pictures=pictures,
            shown=ShownWords(states, following, shown.mask[:, -1:]),
        )

    def encode_views(self, images: torch.Tensor, view_mask: torch.Tensor) -> torch.Tensor:
        """Tokens of all views, `(batch, scenes, views * patches, hidden_size)`."""
        pixels = images.flatten(0, 2).permute(0, 3, 1, 2).to(self.stem[0].weight.dtype) / 127.5 - 1
        patches = self.stem(pixels).flatten(2).transpose(1, 2) + self.patch_embedding.weight
        patches = patches.unflatten(0, view_mask.shape) + self.view_embedding.weight[: view_mask.shape[2], None]
        return patches.flatten(2, 3)

    def summarize(self, views: torch.Tensor, is_patch: torch.Tensor) -> torch.Tensor:
        """Mean and maximum over the patches of each scene, projected: `(batch, scenes, hidden_size)`."""
        mean = (views * is_patch[..., None]).sum(dim=2) / is_patch.sum(dim=2, keepdim=True)
        maximum = views.masked_fill(~is_patch[..., None], -torch.inf).amax(dim=2)
        return self.picture(torch.cat([mean, maximum], dim=-1))

    def continue_with(
        self,
        words: torch.Tensor,
        pictures: torch.Tensor,
        position: int,
        scene: int,
        key_values: list[KeyValue],
        key_mask: torch.Tensor,
        shown: ShownWords,
    ) -> tuple[torch.Tensor, list[KeyValue], torch.Tensor]:
        """Adds one word to the last scene of sequences that went through `forward`.

        Args:
            words: `(batch,)`.
            pictures: `(batch, hidden_size)` of the last scene.
            position: place of the word in its scene; `START` has 0.
            scene: place of the scene in its sequence.
            key_values: of everything before.
            key_mask: of everything before.
            shown: what the last scene may copy.

        Returns:
            Logits `(batch, vocabulary)` of the word after it, and the keys, values and mask with this word's.
        """
        hidden_states = self.token_embedding(words) + self.position_embedding.weight[position] + pictures
        hidden_states = (hidden_states + self.scene_embedding.weight[scene])[:, None]
        key_mask = torch.cat([key_mask, key_mask.new_ones(len(words), 1)], dim=1)
        extended = []
        for block, past in zip(self.blocks, key_values, strict=True):
            hidden_states, key_value = block(hidden_states, key_mask[:, None, None], past)
            extended.append(key_value)
        states = self.norm_out(hidden_states)
        logits = self.copy_attention(states @ self.token_embedding.weight.T, states, shown)
        return logits[:, 0], extended, key_mask

    # --- words --------------------------------------------------------------------------------------------------

    def triplet_words(self, triplets: Sequence[Triplet]) -> list[int]:
        """Tokens of triplets, `subject object predicate` each, without `START` and `END`.

        Raises:
            SceneGraphError: a name the model doesn't know, or more triplets than it can write.
        """
        if len(triplets) > self.config.max_triplets:
            raise SceneGraphError(
                f"a graph has {len(triplets)} triplets; this model was made for at most {self.config.max_triplets} "
                "(max_triplets)."
            )
        entities, predicates = list(self.config.entities), list(self.config.predicates)
        words = []
        for triplet in triplets:
            subject, object, predicate = triplet.sop()
            if subject not in entities or object not in entities or predicate not in predicates:
                raise SceneGraphError(
                    f"{triplet} has a name that the model wasn't made for; normalize the graph with its vocabulary."
                )
            words += [
                NUM_SPECIAL + entities.index(subject),
                NUM_SPECIAL + entities.index(object),
                self.first_predicate + predicates.index(predicate),
            ]
        return words

    def sorted_triplets(self, graph: SceneGraph) -> list[Triplet]:
        """A graph in the order in which the model writes it: by subject, object, predicate."""
        return sorted(graph.triplets, key=Triplet.sop)

    def read_words(self, words: Sequence[int]) -> tuple[list[Triplet], list[int], int]:
        """The inverse of `triplet_words`, for anything that a model writes.

        Args:
            words: tokens after `START`, up to and without `END`.

        Returns:
            The triplets, the place of each one's predicate in `words`, and how many stretches were no triplet.
        """
        triplets, places, malformed = [], [], 0
        entities: list[str] = []
        for place, word in enumerate(words):
            if NUM_SPECIAL <= word < self.first_predicate:
                entities.append(self.config.entities[word - NUM_SPECIAL])
                continue
            # A predicate, or a mark that has no place inside a graph, ends a stretch.
            if word >= self.first_predicate and len(entities) == 2:
                predicate = self.config.predicates[word - self.first_predicate]
                triplets.append(Triplet.from_sop((*entities, predicate)))
                places.append(place)
            else:
                malformed += 1
            entities = []
        return triplets, places, malformed + bool(entities)


def load_views(sample: Sample, image_size: int, num_views: int) -> tuple[np.ndarray, np.ndarray]:
    """The views of a sample as the tiny models see them: squares, the primary view first, then the others in order.

    Args:
        sample: with any number of views; those after the first `num_views` are left out.
        image_size: side in pixels; pictures of another shape are squeezed.
        num_views: places for views.

    Returns:
        uint8 `(num_views, image_size, image_size, 3)`, black where there is no view, and bool `(num_views,)`.
    """
    others = [view for view in range(len(sample.views)) if view != sample.primary]
    images = np.zeros((num_views, image_size, image_size, 3), np.uint8)
    chosen = [sample.primary, *others][:num_views]
    for place, view in enumerate(chosen):
        pixels = sample.image(view)
        if pixels.shape[:2] != (image_size, image_size):
            resized = Image.fromarray(pixels).resize((image_size, image_size), Image.Resampling.BILINEAR)
            pixels = np.asarray(resized)
        images[place] = pixels
    return images, np.arange(num_views) < len(chosen)


class TinyPredictor(SGGPredictor):
    """Greedy decoding of a [`TinySGGModel`].

    Args:
        model: moved to evaluation mode.
        vocabulary: must have the model's names; it may know other spellings of them.
        constrained: only words that can follow are chosen, so that everything written is a triplet.

    Raises:
        SceneGraphError: the vocabulary isn't the model's.
    """

    def __init__(self, model: TinySGGModel, vocabulary: Vocabulary, constrained: bool = True) -> None:
        for name in ("entities", "predicates"):
            if tuple(getattr(vocabulary, name)) != tuple(model.config[name]):
                raise SceneGraphError(
                    f"the vocabulary's {name} are {getattr(vocabulary, name)}, the model's "
                    f"{tuple(model.config[name])}; they must be the same, in the same order."
                )
        self.model, self.vocabulary, self.constrained = model.eval(), vocabulary, constrained

    @classmethod
    def from_pretrained(cls, directory: str | os.PathLike, device: str | None = None) -> TinyPredictor:
        """Load what `save_pretrained` wrote; of a bare model folder too, which knows no synonyms."""
        model = TinySGGModel.from_pretrained(directory, low_cpu_mem_usage=False).to(select_device(device))
        path = Path(directory) / SETTINGS_NAME
        if path.is_file():
            vocabulary = Vocabulary.from_dict(json.loads(path.read_text(encoding="utf-8"))["vocabulary"])
        else:
            vocabulary = Vocabulary(tuple(model.config.entities), tuple(model.config.predicates))
        return cls(model, vocabulary)

    def save_pretrained(self, directory: str | os.PathLike) -> None:
        self.model.save_pretrained(directory)
        with atomic_write(Path(directory) / SETTINGS_NAME) as path:
            path.write_text(json.dumps({"vocabulary": self.vocabulary.to_dict()}, indent=1), encoding="utf-8")

    def predict(
        self,
        samples: Sequence[Sample],
        examples: Sequence[Sequence[Example]] | None = None,
        batch_size: int = 32,
    ) -> list[Prediction]:
        """As [`SGGPredictor.predict`]; the least similar examples beyond the model's `max_examples` are dropped with a
        warning."""
        given = examples_of(samples, examples)
        most = self.model.config.max_examples
        longest = max((len(chosen) for chosen in given), default=0)
        if longest > most:
            warnings.warn(
                f"{longest} examples were given, and this model reads at most {most}; the least similar are dropped.",
                stacklevel=2,
            )
            given = [chosen[-most:] if most else () for chosen in given]
        predictions: dict[int, Prediction] = {}
        # Sequences of one batch have the same number of scenes, so only batches with the same number are made.
        for count in sorted({len(chosen) for chosen in given}):
            indices = [index for index, chosen in enumerate(given) if len(chosen) == count]
            for start in range(0, len(indices), batch_size):
                part = indices[start : start + batch_size]
                answers = self._decode([samples[index] for index in part], [given[index] for index in part])
                predictions.update(zip(part, answers, strict=True))
        return [predictions[index] for index in range(len(samples))]

    def _inputs(
        self, samples: Sequence[Sample], examples: Sequence[Sequence[Example]]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Images, view mask and words of sequences that end with the query's `START`."""
        config = self.model.config
        rows = [[*(example.sample for example in chosen), sample] for chosen, sample in zip(examples, samples)]
        loaded = [[load_views(scene, config.image_size, config.num_views) for scene in row] for row in rows]
        texts = []
        for sample, chosen in zip(samples, examples):
            try:
                graphs = [
                    self.model.triplet_words(
                        self.model.sorted_triplets(self.vocabulary.normalize(example.graph, strict=True)[0])
                    )
                    for example in chosen
                ]
            except SceneGraphError as error:
                raise SceneGraphError(f"sample {sample.id}: an example can't be used: {error}") from error
            texts.append([[START, *words, END] for words in graphs] + [[START]])
        length = max(len(words) for row in texts for words in row)
        words = torch.tensor([[[*words, *[PAD] * (length - len(words))] for words in row] for row in texts])
        images = torch.from_numpy(np.array([[views for views, _ in row] for row in loaded]))
        view_mask = torch.from_numpy(np.array([[mask for _, mask in row] for row in loaded]))
        device = self.model.device
        return images.to(device), view_mask.to(device), words.to(device)

    @torch.no_grad()
    def _decode(self, samples: Sequence[Sample], examples: Sequence[Sequence[Example]]) -> list[Prediction]:
        model = self.model
        images, view_mask, words = self._inputs(samples, examples)
        output = model(images, view_mask, words)
        scene = words.shape[1] - 1
        logits, key_values, key_mask = output.logits[:, scene, 0], output.key_values, output.key_mask
        pictures = output.pictures[:, scene]
        allowed = self._allowed_words(logits.device)

        written, logprobs, probs = [], [], []
        is_done = torch.zeros(len(samples), dtype=torch.bool, device=logits.device)
        for position in range(3 * model.config.max_triplets + 1):
            logits = logits.float()
            options = logits.masked_fill(~allowed[position % 3], -torch.inf) if self.constrained else logits
            # After the last possible triplet only the end remains to be said; a model that doesn't is cut off.
            chosen = torch.where(is_done, PAD, options.argmax(dim=1))
            written.append(chosen)
            logprobs.append(logits.log_softmax(dim=1).gather(1, chosen[:, None])[:, 0])
            probs.append(logits[:, model.first_predicate :].softmax(dim=1))
            is_done = is_done | (chosen == END)
            if bool(is_done.all()) or position == 3 * model.config.max_triplets:
                break
            logits, key_values, key_mask = model.continue_with(
                chosen, pictures, position + 1, scene, key_values, key_mask, output.shown
            )

        table = torch.stack(written, dim=1).cpu().numpy()  # (B, T)
        logprob_table = torch.stack(logprobs, dim=1).cpu().numpy()
        prob_table = torch.stack(probs, dim=1).cpu().numpy()
        predictions = []
        for row, chosen in enumerate(table):
            ends = np.flatnonzero(chosen == END)
            length = int(ends[0]) if len(ends) else 3 * model.config.max_triplets
            triplets, places, malformed = model.read_words(chosen[:length].tolist())
            predictions.append(
                Prediction(
                    graph=SceneGraph(triplets),
                    text=format_triplet_text(triplets),
                    token_stats=TokenStats(prob_table[row, places], logprob_table[row, places]),
                    truncated=not len(ends),
                    num_examples=len(examples[row]),
                    malformed=malformed,
                )
            )
        return predictions

    def _allowed_words(self, device: torch.device) -> torch.Tensor:
        """Words that may stand at each place of a triplet, bool `(3, vocabulary)`: a graph ends before a subject."""
        allowed = torch.zeros(3, self.model.num_words, dtype=torch.bool, device=device)
        allowed[:2, NUM_SPECIAL : self.model.first_predicate] = True
        allowed[0, END] = True
        allowed[2, self.model.first_predicate :] = True
        return allowed

    @torch.no_grad()
    def embed(self, samples: Sequence[Sample], batch_size: int = 32) -> np.ndarray:
        """As [`SGGPredictor.embed`]: the mean state of all view tokens."""
        pooled = []
        for start in range(0, len(samples), batch_size):
            part = samples[start : start + batch_size]
            images, view_mask, words = self._inputs(part, [()] * len(part))
            states = self.model(images, view_mask, words).hidden_states[:, 0, :-1].float()
            weight = view_mask[:, 0].repeat_interleave(self.model.view_tokens, dim=1)[..., None].float()
            pooled.append(F.normalize((states * weight).sum(dim=1) / weight.sum(dim=1), dim=1).cpu().numpy())
        return np.concatenate(pooled) if pooled else np.empty((0, self.model.config.hidden_size), np.float32)
