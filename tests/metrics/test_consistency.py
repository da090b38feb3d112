"""What would be wrong: a curve off by frames, features of the wrong picture, or random weights without a word."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from vidgen.metrics import CLIPFeatures, DINOv2Features, consistency_curve, text_alignment_curve
from vidgen.runtime.checkpoint import save_safetensors
from vidgen.runtime.errors import VidgenError


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.sqrt(a @ a) / np.sqrt(b @ b))


def clip(num_frames: int = 7, height: int = 40, width: int = 64) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (num_frames, height, width, 3), dtype=np.uint8)


class Slices:
    """Frames that can only be read by slices, as from a file."""

    def __init__(self, frames: np.ndarray) -> None:
        self.frames, self.longest = frames, 0

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, index: slice) -> np.ndarray:
        self.longest = max(self.longest, len(self.frames[index]))
        return self.frames[index]


def test_curve_is_the_mean_over_half_a_second_on_either_side():
    features = np.random.default_rng(0).normal(size=(21 * 8, 5)) + 1
    curve = consistency_curve(features, 8)
    assert list(curve) == [10.0, 20.0]
    for second in (10, 20):
        expected = [cosine(features[0], features[i]) for i in range(8 * second - 4, 8 * second + 5)]
        assert curve[second] == pytest.approx(np.mean(expected))
    assert consistency_curve(features, 8, [3.0], window=0.5)[3.0] == pytest.approx(
        np.mean([cosine(features[0], features[i]) for i in range(22, 27)])
    )


def test_window_at_the_end_holds_what_is_left_and_fps_need_not_be_whole():
    features = np.random.default_rng(1).normal(size=(300, 3))
    end = consistency_curve(features, 29.97, [10.0])[10.0]
    frames = [i for i in range(300) if abs(i / 29.97 - 10) <= 0.5]
    assert frames[-1] == 299
    assert end == pytest.approx(np.mean([cosine(features[0], features[i]) for i in frames]))


def test_text_takes_the_place_of_the_first_frame():
    rng = np.random.default_rng(2)
    features, text = rng.normal(size=(40, 6)), 3 * rng.normal(size=6)
    expected = np.mean([cosine(text, features[i]) for i in range(12, 21)])
    assert text_alignment_curve(features, text, 8, [2.0])[2.0] == pytest.approx(expected)
    with pytest.raises(VidgenError, match="dim 6, the text of dim 5"):
        text_alignment_curve(features, text[:5], 8, [2.0])


def test_timestamps_that_have_no_window_are_refused():
    features = np.ones((80, 2))
    with pytest.raises(VidgenError, match="at most 10 s"):
        consistency_curve(features, 8, [10.5])
    with pytest.raises(VidgenError, match="more than 0.5 s"):
        consistency_curve(features, 8, [0.5])
    with pytest.raises(VidgenError, match="pass seconds"):
        consistency_curve(features[:79], 8)
    with pytest.raises(VidgenError, match="fps=0"):
        consistency_curve(features, 0)
    with pytest.raises(VidgenError, match="feature of frame 2"):
        consistency_curve(np.where(np.arange(80)[:, None] == 2, 0, features), 8)
    with pytest.raises(VidgenError, match="expected \\(frames, dim\\)"):
        consistency_curve(features[None], 8)


@pytest.fixture(scope="module")
def dinov2_folder(tmp_path_factory):
    from transformers import BitImageProcessor, Dinov2Config, Dinov2Model

    folder = tmp_path_factory.mktemp("dinov2-tiny")
    torch.manual_seed(0)
    config = Dinov2Config(hidden_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14)
    Dinov2Model(config).save_pretrained(folder)
    # Frames of the tests are 40 x 64: the shorter side is kept, the central 28 x 28 cropped.
    BitImageProcessor(
        size={"shortest_edge": 40},
        crop_size={"height": 28, "width": 28},
        image_mean=[0.4, 0.5, 0.6],
        image_std=[0.2] * 3,
    ).save_pretrained(folder)
    return folder


def test_dinov2_gives_the_class_token_of_each_frame(dinov2_folder):
    from transformers import Dinov2Model

    frames = Slices(clip())
    extractor = DINOv2Features(dinov2_folder, device="cpu", batch_size=3, local_files_only=True)
    features = extractor(frames)
    assert frames.longest == 3 and extractor.name == f"dinov2[{dinov2_folder.name}]"
    # By hand: crop, normalize, class token, unit length.
    pixels = torch.from_numpy(frames.frames[:, 6:34, 18:46]).permute(0, 3, 1, 2) / 255
    pixels = (pixels - torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1)) / 0.2
    with torch.no_grad():
        expected = Dinov2Model.from_pretrained(dinov2_folder).eval()(pixels).pooler_output
    torch.testing.assert_close(torch.from_numpy(features), F.normalize(expected, dim=-1), atol=1e-5, rtol=1e-4)


def test_a_loaded_dinov2_model_equals_its_folder(dinov2_folder):
    from transformers import AutoImageProcessor, AutoModel

    model, processor = AutoModel.from_pretrained(dinov2_folder), AutoImageProcessor.from_pretrained(dinov2_folder)
    loaded = DINOv2Features(model, processor, device="cpu")(clip())
    assert np.array_equal(loaded, DINOv2Features(dinov2_folder, device="cpu")(clip()))
    with pytest.raises(VidgenError, match="needs its image_processor"):
        DINOv2Features(model)


def test_dinov2_without_whole_weights_is_refused(dinov2_folder, tmp_path):
    with pytest.raises(VidgenError, match="hf download facebook/dinov2-base"):
        DINOv2Features(tmp_path / "nowhere", local_files_only=True)
    with pytest.raises(VidgenError, match="hf download facebook/dinov2-base"):
        DINOv2Features("vidgen-tests/no-such-dinov2", local_files_only=True)
    from safetensors.torch import load_file

    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / name).write_text((dinov2_folder / name).read_text())
    with pytest.raises(VidgenError, match="hf download"):
        DINOv2Features(tmp_path)
    tensors = load_file(dinov2_folder / "model.safetensors")
    del tensors["encoder.layer.1.norm1.weight"]
    save_safetensors(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(VidgenError, match="lack 1 tensors of the model, such as encoder.layer.1.norm1.weight"):
        DINOv2Features(tmp_path)


def test_another_architecture_is_not_called_dinov2(tmp_path):
    from transformers import BitImageProcessor, ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=24, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=28, patch_size=14
    )
    ViTModel(config).save_pretrained(tmp_path)
    BitImageProcessor().save_pretrained(tmp_path)
    with pytest.raises(VidgenError, match="'vit' model; allowed: dinov2"):
        DINOv2Features(tmp_path)


def test_frames_of_another_type_are_refused(dinov2_folder):
    extractor = DINOv2Features(dinov2_folder, device="cpu")
    for wrong in (clip().astype(np.float32), clip()[0], clip()[..., :1], clip()[:0]):
        with pytest.raises(VidgenError, match="expected uint8"):
            extractor(wrong)


CLIP_CONFIG = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 16},
    "text_cfg": {"context_length": 12, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory):
    open_clip = pytest.importorskip("open_clip", reason="needs pip install 'vidgen[eval]'")
    folder = tmp_path_factory.mktemp("clip-tiny")
    torch.manual_seed(0)
    model = open_clip.CLIP(**CLIP_CONFIG)
    with torch.no_grad():
        model.text_projection.normal_()
    save_safetensors(model.state_dict(), folder / "open_clip_model.safetensors")
    preprocess = {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.2, 0.2]}
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": CLIP_CONFIG, "preprocess_cfg": preprocess}))
    return folder


def test_clip_gives_pictures_and_text_of_its_weights(clip_folder):
    import open_clip

    frames = Slices(clip(5, 32, 48))
    extractor = CLIPFeatures(clip_folder, device="cpu", batch_size=2)
    prompts = ["a snowy forest at dusk", "a harbor", "rain over the sea"]
    features, texts = extractor(frames), extractor.embed_text(prompts)
    assert frames.longest == 2 and extractor.name == f"clip[{clip_folder.name}]"
    model = open_clip.CLIP(**CLIP_CONFIG).eval()
    open_clip.load_checkpoint(model, str(clip_folder / "open_clip_model.safetensors"))
    pixels = torch.from_numpy(frames.frames[:, :, 8:40]).permute(0, 3, 1, 2) / 255
    pixels = (pixels - torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1)) / 0.2
    with torch.no_grad():
        expected = F.normalize(model.encode_image(pixels), dim=-1)
        tokens = open_clip.SimpleTokenizer()(prompts, context_length=12)
        expected_texts = F.normalize(model.encode_text(tokens), dim=-1)
    torch.testing.assert_close(torch.from_numpy(features), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(torch.from_numpy(texts), expected_texts, atol=1e-5, rtol=1e-4)
    curve = text_alignment_curve(features, texts[1], 2.0, [1.5])
    assert curve[1.5] == pytest.approx(float((expected[2:5] @ expected_texts[1]).mean()), abs=1e-5)


def test_clip_takes_a_file_of_a_named_architecture(clip_folder, tmp_path):
    import open_clip

    (tmp_path / "vidgen-test-tiny.json").write_text(json.dumps(CLIP_CONFIG))
    deeper = {**CLIP_CONFIG, "text_cfg": {**CLIP_CONFIG["text_cfg"], "layers": 2}}
    (tmp_path / "vidgen-test-deeper.json").write_text(json.dumps(deeper))
    wider = {**CLIP_CONFIG, "text_cfg": {**CLIP_CONFIG["text_cfg"], "width": 32}}
    (tmp_path / "vidgen-test-wider.json").write_text(json.dumps(wider))
    open_clip.add_model_config(tmp_path)
    weights = clip_folder / "open_clip_model.safetensors"
    extractor = CLIPFeatures(weights, "vidgen-test-tiny", device="cpu")
    assert extractor.name == "clip[vidgen-test-tiny]"
    assert np.array_equal(extractor.embed_text(["a"]), CLIPFeatures(clip_folder, device="cpu").embed_text(["a"]))
    with pytest.raises(VidgenError, match="Unknown architecture 'vidgen-test-tny': did you mean 'vidgen-test-tiny'"):
        CLIPFeatures(weights, "vidgen-test-tny")
    for wrong in ("vidgen-test-deeper", "vidgen-test-wider"):
        with pytest.raises(VidgenError, match="doesn't load"):
            CLIPFeatures(weights, wrong)


def test_clip_without_weights_is_refused(tmp_path):
    with pytest.raises(VidgenError, match="hf download"):
        CLIPFeatures(tmp_path / "nowhere")
    with pytest.raises(VidgenError, match="hf download"):
        CLIPFeatures(tmp_path)
    (tmp_path / "weights.bin").write_bytes(b"pickle")
    with pytest.raises(VidgenError, match="hf download"):
        CLIPFeatures(tmp_path / "weights.bin", "ViT-B-32")
    (tmp_path / "weights.safetensors").write_bytes(b"")
    with pytest.raises(VidgenError, match="pass the architecture"):
        CLIPFeatures(tmp_path / "weights.safetensors")
    with pytest.raises(VidgenError, match="already says which"):
        CLIPFeatures(tmp_path, "ViT-B-32")


def test_missing_open_clip_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "open_clip", None)
    (tmp_path / "weights.safetensors").write_bytes(b"")
    with pytest.raises(VidgenError, match="vidgen\\[eval\\]"):
        CLIPFeatures(tmp_path / "weights.safetensors", "ViT-B-32")
