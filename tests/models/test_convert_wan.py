"""What would be wrong: a weight under another name, a file that runs code, or a folder that is half written."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file

from vidgen.models import convert_wan
from vidgen.models.causal_wan import CausalWanTransformer3DModel
from vidgen.models.convert_wan import (
    LORA_FILE,
    WAN_CONFIGS,
    convert_wan_causal,
    diffusers_to_original,
    from_original_checkpoint,
    original_to_diffusers,
)
from vidgen.runtime.checkpoint import CheckpointError

CONFIG = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 8,
    "freq_dim": 16,
    "ffn_dim": 48,
    "num_layers": 2,
}


@pytest.fixture(scope="module")
def model() -> CausalWanTransformer3DModel:
    torch.manual_seed(0)
    return CausalWanTransformer3DModel(**CONFIG).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def original(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in diffusers_to_original(model.state_dict()).items()}


def output(model) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    latents, text = torch.randn(2, 4, 6, 4, 6, generator=generator), torch.randn(2, 5, 8, generator=generator)
    with torch.no_grad():
        return model(latents, torch.tensor([250.0, 750.0]), text).sample


def lora_factors(rank: int = 2, seed: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    factors = {}
    for block in range(2):
        for module, (rows, columns) in {"self_attn.q": (32, 32), "cross_attn.o": (32, 32), "ffn.0": (48, 32)}.items():
            name = f"blocks.{block}.{module}"
            factors[f"{name}.lora_A.weight"] = torch.randn(rank, columns, generator=generator)
            factors[f"{name}.lora_B.weight"] = torch.randn(rows, rank, generator=generator)
    return factors


# --- names -----------------------------------------------------------------------------------------------------


def test_the_name_maps_invert_each_other(model, original):
    assert diffusers_to_original(original_to_diffusers(original)).keys() == original.keys()
    again = original_to_diffusers(original)
    assert again.keys() == model.state_dict().keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())


def test_original_names_are_those_of_the_wan_repository(original):
    outside = {
        *(f"{module}.{kind}" for module in ("patch_embedding", "head.head") for kind in ("weight", "bias")),
        *(f"text_embedding.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")),
        *(f"time_embedding.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")),
        *(f"time_projection.1.{kind}" for kind in ("weight", "bias")),
        "head.modulation",
    }
    inside = {
        *(f"{a}_attn.{m}.{kind}" for a in ("self", "cross") for m in "qkvo" for kind in ("weight", "bias")),
        *(f"{a}_attn.norm_{m}.weight" for a in ("self", "cross") for m in "qk"),
        *(f"{m}.{kind}" for m in ("norm3", "ffn.0", "ffn.2") for kind in ("weight", "bias")),
        "modulation",
    }
    assert set(original) == outside | {f"blocks.{block}.{name}" for block in range(2) for name in inside}


def test_names_agree_with_the_stock_single_file_loader(model, original):
    single_file_utils = pytest.importorskip("diffusers.loaders.single_file_utils")
    stock = single_file_utils.convert_wan_transformer_to_diffusers(dict(original))
    assert stock.keys() == model.state_dict().keys()
    assert all(torch.equal(stock[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", ["blocks.0.self_attn.z.weight", "blocks.0.cross_attn.k_img.weight", "freqs"])
def test_unknown_names_are_refused_in_both_directions(name):
    for convert in (original_to_diffusers, diffusers_to_original):
        with pytest.raises(CheckpointError, match=f"1 names are not of a text-to-video Wan: {name}"):
            convert({name: torch.zeros(1)})


# --- files of the projects -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nest", "prefix"),
    [
        ("generator_ema", "model."),
        ("generator", "model."),
        ("generator_ema", "model._fsdp_wrapped_module."),
        ("generator", "module.model._orig_mod."),
        ("model", ""),
        (None, ""),
        (None, "model.diffusion_model."),
    ],
)
def test_every_known_nesting_and_prefix_loads_the_same_model(model, original, tmp_path, nest, prefix):
    state = {
        prefix + name.replace("blocks.1.", "blocks.1._checkpoint_wrapped_module."): tensor
        for name, tensor in original.items()
    }
    torch.save({nest: state, "step": 3} if nest else state, tmp_path / "model.pt")
    loaded = CausalWanTransformer3DModel.from_original_checkpoint(tmp_path / "model.pt", base_config=CONFIG)
    assert not loaded.training
    assert torch.equal(output(loaded), output(model))


def test_the_moving_average_is_preferred_and_can_be_passed_over(original, tmp_path):
    other = {f"model.{name}": tensor + 1 for name, tensor in original.items()}
    average = {f"model.{name}": tensor for name, tensor in original.items()}
    torch.save({"generator": other, "generator_ema": average, "critic": {}}, tmp_path / "model.pt")
    name = "patch_embedding.bias"
    for weights, expected in ((None, average), ("generator_ema", average), ("generator", other)):
        loaded = from_original_checkpoint(tmp_path / "model.pt", CONFIG, weights=weights)
        assert torch.equal(loaded.state_dict()[name], expected[f"model.{name}"])
    torch.save({"generator": other}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="no weights 'generator_ema'; it holds 'generator'"):
        from_original_checkpoint(tmp_path / "model.pt", CONFIG, weights="generator_ema")
    with pytest.raises(CheckpointError, match=r"weights='ema'; .*allowed: generator, generator_ema, model"):
        from_original_checkpoint(tmp_path / "model.pt", CONFIG, weights="ema")


def test_safetensors_and_old_torch_files_load(model, original, tmp_path):
    save_file(original, tmp_path / "model.safetensors")
    torch.save({"generator": original}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for file in ("model.safetensors", "old.pt"):
        assert torch.equal(output(from_original_checkpoint(tmp_path / file, CONFIG)), output(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_dtype_of_the_file_is_kept(original, tmp_path, dtype):
    torch.save({name: tensor.to(dtype) for name, tensor in original.items()}, tmp_path / "model.pt")
    loaded = from_original_checkpoint(tmp_path / "model.pt", CONFIG)
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    convert_wan_causal(tmp_path / "model.pt", tmp_path / "out", CONFIG)
    assert {t.dtype for t in load_file(tmp_path / "out" / "diffusion_pytorch_model.safetensors").values()} == {dtype}


def test_a_requested_dtype_spares_what_the_model_keeps_in_float32(original, tmp_path):
    torch.save(original, tmp_path / "model.pt")
    state = from_original_checkpoint(tmp_path / "model.pt", CONFIG, dtype=torch.bfloat16).state_dict()
    assert state["blocks.0.attn1.to_q.weight"].dtype == torch.bfloat16
    assert state["blocks.0.attn1.norm_q.weight"].dtype == torch.bfloat16
    for name in ("blocks.0.scale_shift_table", "blocks.0.norm2.weight", "scale_shift_table"):
        assert state[name].dtype == torch.float32


# --- folders ---------------------------------------------------------------------------------------------------


def test_the_folder_loads_and_the_report_describes_it(model, original, tmp_path):
    torch.save({"generator_ema": {f"model.{k}": v for k, v in original.items()}}, tmp_path / "model.pt")
    report = convert_wan_causal(tmp_path / "model.pt", tmp_path / "out", CONFIG)
    loaded = CausalWanTransformer3DModel.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(output(loaded), output(model))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["_class_name"] == "CausalWanTransformer3DModel"
    assert set(report.files) == {path.name for path in (tmp_path / "out").iterdir()}
    for name, file in report.files.items():
        content = (tmp_path / "out" / name).read_bytes()
        assert file == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert report.weights == "generator_ema" and report.lora is None
    assert report.num_tensors == len(original)
    assert report.num_parameters == sum(tensor.numel() for tensor in original.values())
    assert report.dtypes == ("float32",)
    assert all(name in str(report) and file["sha256"] in str(report) for name, file in report.files.items())


def test_the_folder_can_also_be_read_by_stock_diffusers(model, original, tmp_path):
    torch.save(original, tmp_path / "model.pt")
    convert_wan_causal(tmp_path / "model.pt", tmp_path / "out", CONFIG)
    stock = WanTransformer3DModel.from_pretrained(tmp_path / "out")
    assert stock.state_dict().keys() == model.state_dict().keys()


def test_a_base_config_may_be_a_folder_of_stock_diffusers(model, original, tmp_path):
    WanTransformer3DModel(**CONFIG).save_pretrained(tmp_path / "base" / "transformer")
    torch.save(original, tmp_path / "model.pt")
    for folder in (tmp_path / "base", str(tmp_path / "base" / "transformer")):
        assert torch.equal(output(from_original_checkpoint(tmp_path / "model.pt", folder)), output(model))


def test_fields_no_tensor_shows_come_from_the_base_config(original, tmp_path):
    torch.save(original, tmp_path / "model.pt")
    config = {**CONFIG, "num_frames_per_block": 1, "num_attention_heads": 4, "attention_head_dim": 8}
    loaded = from_original_checkpoint(tmp_path / "model.pt", config)
    assert loaded.config.num_frames_per_block == 1 and loaded.config.num_attention_heads == 4


def test_the_named_configuration_is_the_published_one():
    config = WAN_CONFIGS["wan-1.3b"]
    with torch.device("meta"):
        model = CausalWanTransformer3DModel(**config)
        stock = WanTransformer3DModel(**config)
    assert {k: v.shape for k, v in model.state_dict().items()} == {k: v.shape for k, v in stock.state_dict().items()}
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_418_996_800


@pytest.mark.parametrize("failure", ["save_pretrained", "interrupt"])
def test_a_failed_conversion_leaves_nothing(original, tmp_path, monkeypatch, failure):
    torch.save(original, tmp_path / "model.pt")
    error = OSError("disk full") if failure == "save_pretrained" else KeyboardInterrupt()

    def fail(self, folder):
        (folder / "part.safetensors").write_bytes(b"part")
        raise error

    monkeypatch.setattr(CausalWanTransformer3DModel, "save_pretrained", fail)
    with pytest.raises(type(error)):
        convert_wan_causal(tmp_path / "model.pt", tmp_path / "out", CONFIG)
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


def test_an_existing_output_is_left_alone(original, tmp_path):
    torch.save(original, tmp_path / "model.pt")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="out exists; choose another folder"):
        convert_wan_causal(tmp_path / "model.pt", tmp_path / "out", CONFIG)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["precious.txt"]
    (tmp_path / "empty").mkdir()
    assert convert_wan_causal(tmp_path / "model.pt", tmp_path / "empty", CONFIG).num_tensors == len(original)


# --- LoRA ------------------------------------------------------------------------------------------------------


def as_peft(factors: dict[str, torch.Tensor], adapter: str = "") -> dict[str, torch.Tensor]:
    return {f"base_model.model.{name.replace('.weight', f'{adapter}.weight')}": t for name, t in factors.items()}


@pytest.mark.parametrize("layout", ["longlive", "peft", "plain", "alpha"])
def test_lora_layouts_merge_into_the_same_weights(original, tmp_path, layout):
    factors = lora_factors()
    expected = dict(original)
    for name in factors:
        if name.endswith("lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            update = factors[f"{module}.lora_B.weight"] @ factors[name]
            expected[f"{module}.weight"] = original[f"{module}.weight"] + 0.5 * update
    scale = 0.5
    if layout == "longlive":
        content = {"generator_lora": as_peft(factors), "critic_lora": as_peft(lora_factors(seed=9)), "step": 1}
    elif layout == "peft":
        content = as_peft(factors, ".default")
    elif layout == "plain":
        content = factors
    else:
        renamed = {k.replace("lora_A", "lora_down").replace("lora_B", "lora_up"): v for k, v in factors.items()}
        modules = {name.rsplit(".", 2)[0] for name in factors}
        content = renamed | {f"{module}.alpha": torch.tensor(1.0) for module in modules}
        scale = 1.0
    torch.save(original, tmp_path / "model.pt")
    torch.save(content, tmp_path / "lora.pt")
    merged = from_original_checkpoint(tmp_path / "model.pt", CONFIG, lora=tmp_path / "lora.pt", lora_scale=scale)
    state = diffusers_to_original(merged.state_dict())
    assert any(not torch.equal(state[name], original[name]) for name in original)
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor, atol=1e-6, rtol=1e-6, msg=name)


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_kept_lora_gives_what_a_merged_one_gives(model, original, tmp_path, scale):
    pytest.importorskip("peft")
    torch.save(original, tmp_path / "model.pt")
    torch.save({"generator_lora": as_peft(lora_factors())}, tmp_path / "lora.pt")
    arguments = {"base_config": CONFIG, "lora": tmp_path / "lora.pt", "lora_scale": scale}
    kept = convert_wan_causal(tmp_path / "model.pt", tmp_path / "kept", merge_lora=False, **arguments)
    merged = convert_wan_causal(tmp_path / "model.pt", tmp_path / "merged", **arguments)
    assert (kept.lora, merged.lora) == ("kept", "merged")
    assert LORA_FILE in kept.files and LORA_FILE not in merged.files
    assert "transformer.blocks.0.attn1.to_q.lora_A.weight" in load_file(tmp_path / "kept" / LORA_FILE)

    adapted = CausalWanTransformer3DModel.from_pretrained(tmp_path / "kept").eval()
    assert torch.equal(output(adapted), output(model))
    adapted.load_lora_adapter(tmp_path / "kept", weight_name=LORA_FILE)
    whole = CausalWanTransformer3DModel.from_pretrained(tmp_path / "merged").eval()
    assert (output(whole) - output(model)).abs().max() > 1e-3
    torch.testing.assert_close(output(adapted), output(whole), atol=1e-4, rtol=1e-4)


def test_merging_rounds_once(original, tmp_path):
    torch.save({name: tensor.bfloat16() for name, tensor in original.items()}, tmp_path / "model.pt")
    torch.save(lora_factors(), tmp_path / "lora.pt")
    merged = from_original_checkpoint(tmp_path / "model.pt", CONFIG, lora=tmp_path / "lora.pt").state_dict()
    factors = lora_factors()
    weight = original["blocks.0.self_attn.q.weight"].bfloat16().float()
    update = factors["blocks.0.self_attn.q.lora_B.weight"] @ factors["blocks.0.self_attn.q.lora_A.weight"]
    assert torch.equal(merged["blocks.0.attn1.to_q.weight"], (weight + update).bfloat16())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.pop("blocks.0.ffn.0.lora_B.weight"), "blocks.0.ffn.0 has only one of its two factors"),
        (lambda f: f.update({"blocks.0.self_attn.q.magnitude": torch.ones(32)}), "q.magnitude can not be used"),
        (
            lambda f: f.update({f"blocks.7.self_attn.q.lora_{x}.weight": torch.ones(2, 2) for x in "AB"}),
            "blocks.7.attn1.to_q has lora_A of shape .* doesn't fit any linear layer",
        ),
        (
            lambda f: f.update({"blocks.0.ffn.0.lora_B.weight": torch.ones(32, 2)}),
            r"doesn't fit a weight of \(48, 32\)",
        ),
        (
            lambda f: f.update({f"blocks.0.self_attn.x.lora_{x}.weight": torch.ones(2, 2) for x in "AB"}),
            "not of a text-to-video Wan: blocks.0.self_attn.x.lora_A.weight",
        ),
    ],
)
def test_a_lora_that_does_not_fit_is_refused(original, tmp_path, change, message):
    factors = lora_factors()
    change(factors)
    torch.save(original, tmp_path / "model.pt")
    torch.save(factors, tmp_path / "lora.pt")
    with pytest.raises(CheckpointError, match=message):
        convert_wan_causal(tmp_path / "model.pt", tmp_path / "out", CONFIG, lora=tmp_path / "lora.pt")
    assert not (tmp_path / "out").exists()


# --- files that don't fit --------------------------------------------------------------------------------------


class Innocent:
    """An object that a pickle would rebuild by calling code."""


def test_a_file_with_objects_is_never_unpickled(tmp_path):
    torch.save({"generator": {"weight": torch.zeros(1)}, "config": Innocent()}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="holds other objects, which could run code"):
        from_original_checkpoint(tmp_path / "model.pt", CONFIG)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.zeros(1)], "holds a list; a dictionary of tensors is needed"),
        ({}, "it has nothing"),
        ({"generator": {}}, "it has nothing"),
        ({"epoch": 3, "state": {"weight": torch.zeros(1)}}, "no state dict itself: it has epoch, state"),
        ({"weight": torch.zeros(1)}, r"\d+ missing: .*; 1 unexpected: weight"),
    ],
)
def test_a_file_of_something_else_says_what_it_holds(tmp_path, content, message):
    torch.save(content, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=message):
        from_original_checkpoint(tmp_path / "model.pt", CONFIG)


def test_missing_and_damaged_files_are_named(original, tmp_path):
    with pytest.raises(CheckpointError, match=r"nothing\.pt does not exist"):
        from_original_checkpoint(tmp_path / "nothing.pt", CONFIG)
    torch.save(original, tmp_path / "model.pt")
    content = (tmp_path / "model.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(content[: len(content) // 2])
    (tmp_path / "empty.pt").write_bytes(b"")
    for name in ("cut.pt", "empty.pt"):
        with pytest.raises(CheckpointError, match=f"{name} can't be read as tensors only"):
            from_original_checkpoint(tmp_path / name, CONFIG)


def test_missing_and_unexpected_tensors_are_listed_under_the_names_of_the_file(original, tmp_path):
    state = dict(original)
    del state["blocks.1.norm3.bias"]
    state["blocks.1.self_attn.z.weight"] = torch.zeros(1)
    torch.save(state, tmp_path / "model.pt")
    expected = "1 missing: blocks.1.norm3.bias; 1 unexpected: blocks.1.self_attn.z.weight"
    with pytest.raises(CheckpointError, match=expected):
        from_original_checkpoint(tmp_path / "model.pt", CONFIG)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_layers", 3, "num_layers is 2 in the file and 3 in base_config"),
        ("ffn_dim", 64, "ffn_dim is 48 in the file and 64"),
        ("text_dim", 16, "text_dim is 8 in the file and 16"),
        ("freq_dim", 32, "freq_dim is 16 in the file and 32"),
        ("in_channels", 16, "in_channels is 4 in the file and 16"),
        ("out_channels", 8, r"out_channels \* patch is 16 in the file and 32"),
        ("attention_head_dim", 12, r"num_attention_heads \* attention_head_dim is 32 in the file and 24"),
        ("cross_attn_norm", False, "cross_attn_norm is True in the file and False"),
        ("patch_size", (1, 1, 4), r"patch_embedding.weight has shape \(32, 4, 1, 2, 2\).* needs \(32, 4, 1, 1, 4\)"),
    ],
)
def test_a_wrong_size_names_the_field(original, tmp_path, field, value, message):
    torch.save(original, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=message):
        from_original_checkpoint(tmp_path / "model.pt", {**CONFIG, field: value})


def test_base_configs_that_do_not_exist_are_refused(original, tmp_path):
    torch.save(original, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"'wan-1.3' is no folder with a config.json.*did you mean 'wan-1.3b'"):
        from_original_checkpoint(tmp_path / "model.pt", "wan-1.3")
    with pytest.raises(CheckpointError, match="Unknown field 'num_layer' of base_config: did you mean 'num_layers'"):
        from_original_checkpoint(tmp_path / "model.pt", {"num_layer": 2})


def test_two_tensors_of_one_name_are_refused(original, tmp_path):
    state = dict(original) | {"_orig_mod.patch_embedding.bias": original["patch_embedding.bias"]}
    torch.save(state, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"Two tensors of the file are called 'patch_embedding.bias'"):
        from_original_checkpoint(tmp_path / "model.pt", CONFIG)


def test_torch_load_is_only_ever_called_in_its_safe_form(original, tmp_path, monkeypatch):
    torch.save(original, tmp_path / "model.pt")
    calls = []
    load = torch.load

    def spy(*args, **kwargs):
        calls.append(kwargs)
        return load(*args, **kwargs)

    monkeypatch.setattr(convert_wan.torch, "load", spy)
    from_original_checkpoint(tmp_path / "model.pt", CONFIG)
    assert [(call["weights_only"], call["mmap"]) for call in calls] == [(True, True)]
