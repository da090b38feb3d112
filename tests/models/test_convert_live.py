"""What would be wrong: a weight under another name, another network than the released one, a file that runs code."""

from __future__ import annotations

import collections
import hashlib
import json
import typing

import pytest
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from omegaconf import OmegaConf
from typer.testing import CliRunner

from vidgen.models import convert_live as module
from vidgen.models.convert_live import convert_kl16, convert_live, load_lightning_checkpoint, released_to_world_dit
from vidgen.models.world_dit import WorldDiT
from vidgen.runtime.checkpoint import CheckpointError

DIM, LAYERS, HEADS, FFN, CHANNELS, FREQ = 32, 2, 2, 48, 4, 16
CONFIG = {
    "num_attention_heads": HEADS,
    "attention_head_dim": DIM // HEADS,
    "in_channels": CHANNELS,
    "ffn_dim": FFN,
    "num_layers": LAYERS,
    "rope_dims": (4, 6, 6),
    "freq_dim": FREQ,
    "window": 4,
}


def released_shapes(dim=DIM, layers=LAYERS, ffn=FFN, channels=CHANNELS, freq=FREQ) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the transformer in the release, `tvideo/mc/modules/df/transformer_cache.py`."""
    shapes = {
        "x_embedder.proj.weight": (dim, channels, 1, 2, 2),
        "x_embedder.proj.bias": (dim,),
        "t_embedder.mlp.0.weight": (dim, freq),
        "t_embedder.mlp.0.bias": (dim,),
        "t_embedder.mlp.2.weight": (dim, dim),
        "t_embedder.mlp.2.bias": (dim,),
        "c_embedder.proj.weight": (dim, 6, 1, 2, 2),
        "c_embedder.proj.bias": (dim,),
        "final_layer.linear.weight": (4 * channels, dim),
        "final_layer.linear.bias": (4 * channels,),
        "final_layer.adaLN_modulation.1.weight": (2 * dim, dim),
        "final_layer.adaLN_modulation.1.bias": (2 * dim,),
    }
    for block in range(layers):
        inside = {
            "attention.wqkv.weight": (3 * dim, dim),
            "attention.wo.weight": (dim, dim),
            "feed_forward.w1.weight": (ffn, dim),
            "feed_forward.w3.weight": (ffn, dim),
            "feed_forward.w2.weight": (dim, ffn),
            "attention_norm.weight": (dim,),
            "ffn_norm.weight": (dim,),
            "adaLN_modulation.1.weight": (6 * dim, dim),
            "adaLN_modulation.1.bias": (6 * dim,),
        }
        shapes |= {f"blocks.{block}.{name}": shape for name, shape in inside.items()}
    return shapes


@pytest.fixture(scope="module")
def released() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in released_shapes().items()}


class Foreign:
    """A class of the training code that isn't installed where the file is converted."""

    def __init__(self) -> None:
        self.values = [1, 2]


class Attack:
    def __reduce__(self):
        return (open, ("attacked", "w"))


def lightning(released: dict[str, torch.Tensor], **extra) -> dict:
    """A checkpoint as Lightning writes it for a compiled model with a frozen VAE and metrics."""
    state = {f"model._orig_mod.{name}": tensor for name, tensor in released.items()}
    state |= {
        "model._orig_mod.attn_mask_sdpa": torch.ones(4, 4, dtype=torch.bool),
        "model._orig_mod.attn_mask_cycle_forcing_sdpa_p2": torch.ones(8, 8, dtype=torch.bool),
        "tokenizer._orig_mod.encoder.conv_in.weight": torch.zeros(1),
        "train_metrics.metrics.lpips.net.weight": torch.zeros(1),
        "val_metrics.fid_v_dpm.inception.weight": torch.zeros(1),
    }
    counts = collections.defaultdict(dict)
    counts["epoch"]["done"] = 3
    return {
        "epoch": 3,
        "global_step": 20500,
        "state_dict": state,
        "optimizer_states": [{"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 4e-5}]}],
        "hyper_parameters": OmegaConf.create({"network": {"dim": DIM, "rope_dim": [4, 6, 6]}, "ema": None}),
        "callbacks": {"ModelCheckpoint{'monitor': 'step'}": {"best": counts, "annotation": typing.Any}},
        "loops": Foreign(),
        **extra,
    }


def reference(state: dict[str, torch.Tensor], latents, timestep, rays) -> torch.Tensor:
    """The released network written down from its weights by their released names; `(B, T, C, H, W)` as there."""
    batch, frames, channels, height, width = latents.shape
    rows, columns = height // 2, width // 2
    head = DIM // HEADS

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

    def patchify(video: torch.Tensor, name: str) -> torch.Tensor:
        flat = F.conv2d(video.flatten(0, 1), state[f"{name}.weight"][:, :, 0], state[f"{name}.bias"], stride=2)
        return flat.unflatten(0, (batch, frames)).flatten(3).transpose(2, 3).flatten(1, 2)

    def rms(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * state[f"{name}.weight"]

    grid = torch.cartesian_prod(torch.arange(frames), torch.arange(rows), torch.arange(columns)).float()
    turns = [grid[:, i, None] * 256.0 ** -(torch.arange(0, d, 2) / d) for i, d in enumerate((4, 6, 6))]
    phase = torch.polar(torch.ones(()), torch.cat(turns, 1))[:, None]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * phase).flatten(-2)

    x = patchify(latents, "x_embedder.proj")
    waves = timestep.long().float()[..., None] * torch.exp(
        -torch.arange(FREQ // 2) * torch.tensor(1e4).log() / (FREQ // 2)
    )
    c = linear(F.silu(linear(torch.cat([waves.cos(), waves.sin()], -1), "t_embedder.mlp.0")), "t_embedder.mlp.2")
    c = F.silu(c.repeat_interleave(rows * columns, 1) + patchify(rays, "c_embedder.proj"))
    causal = grid[:, None, 0] >= grid[None, :, 0]
    for i in range(LAYERS):
        block = f"blocks.{i}"
        shift, scale, gate, shift2, scale2, gate2 = linear(c, f"{block}.adaLN_modulation.1").chunk(6, -1)
        h = rms(x, f"{block}.attention_norm") * (1 + scale) + shift
        q, k, v = (part.unflatten(-1, (HEADS, head)) for part in linear(h, f"{block}.attention.wqkv").chunk(3, -1))
        q, k, v = (part.transpose(1, 2) for part in (rotate(q), rotate(k), v))
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=causal).transpose(1, 2).flatten(2)
        x = x + gate * linear(h, f"{block}.attention.wo")
        h = rms(x, f"{block}.ffn_norm") * (1 + scale2) + shift2
        h = F.silu(linear(h, f"{block}.feed_forward.w1")) * linear(h, f"{block}.feed_forward.w3")
        x = x + gate2 * linear(h, f"{block}.feed_forward.w2")
    shift, scale = linear(c, "final_layer.adaLN_modulation.1").chunk(2, -1)
    x = linear(F.layer_norm(x, (DIM,), eps=1e-6) * (1 + scale) + shift, "final_layer.linear")
    x = x.view(batch, frames, rows, columns, channels, 2, 2).permute(0, 1, 4, 2, 5, 3, 6)
    return x.reshape(batch, frames, channels, height, width)


# --- the transformer -------------------------------------------------------------------------------------------


def test_a_released_checkpoint_becomes_the_same_network(released, tmp_path):
    torch.save(lightning(released), tmp_path / "live.ckpt")
    report = convert_live(tmp_path / "live.ckpt", tmp_path / "out", CONFIG, forcing="live")
    model = WorldDiT.from_pretrained(tmp_path / "out").eval()
    assert model.config.forcing == "live" and model.config.control_frame == "window"

    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(2, 4, CHANNELS, 4, 6, generator=generator)
    rays = torch.randn(2, 4, 6, 4, 6, generator=generator)
    timestep = 1000 * torch.rand(2, 4, generator=generator)
    expected = reference(released, latents, timestep, rays)
    with torch.no_grad():
        output = model(latents.transpose(1, 2), timestep, rays.transpose(1, 2)).sample.transpose(1, 2)
    torch.testing.assert_close(output, expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-4)

    assert report.num_parameters == sum(tensor.numel() for tensor in released.values())
    weights = (tmp_path / "out" / "diffusion_pytorch_model.safetensors").read_bytes()
    assert report.files["diffusion_pytorch_model.safetensors"]["sha256"] == hashlib.sha256(weights).hexdigest()
    assert not list(tmp_path.glob(".*"))


def test_the_published_layout_has_exactly_the_tensors_of_the_published_model():
    shapes = released_shapes(dim=1536, layers=18, ffn=4096, channels=16, freq=256)
    with torch.device("meta"):
        state = released_to_world_dit({name: torch.empty(shape) for name, shape in shapes.items()})
        model = WorldDiT(**module.LIVE_CONFIGS["live-re10k"])
    assert {name: x.shape for name, x in state.items()} == {name: x.shape for name, x in model.state_dict().items()}


@pytest.mark.parametrize("prefix", ["model.", "model._orig_mod."])
def test_compiled_or_not_the_weights_are_the_same(released, tmp_path, prefix):
    torch.save({"state_dict": {prefix + name: x for name, x in released.items()}}, tmp_path / "a.ckpt")
    report = convert_live(tmp_path / "a.ckpt", tmp_path / "out", CONFIG, "diffusion_forcing", torch.bfloat16)
    assert report.dtypes == ("bfloat16",)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["forcing"] == "diffusion_forcing"


def test_objects_beside_the_weights_do_not_run(released, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(lightning(released, attack=Attack()), "live.ckpt")
    weights = load_lightning_checkpoint("live.ckpt")
    assert torch.equal(
        weights["model._orig_mod.blocks.0.attention.wo.weight"], released["blocks.0.attention.wo.weight"]
    )
    assert not (tmp_path / "attacked").exists()


def test_a_blocked_module_is_refused(released, tmp_path, monkeypatch):
    class Shell:
        def __reduce__(self):
            import os

            return (os.system, ("touch attacked",))

    monkeypatch.chdir(tmp_path)
    torch.save(lightning(released, attack=Shell()), "live.ckpt")
    with pytest.raises(CheckpointError, match="system"):
        load_lightning_checkpoint("live.ckpt")
    assert not (tmp_path / "attacked").exists()


def test_released_files_are_known_by_their_hash(released, tmp_path, monkeypatch):
    torch.save(lightning(released), tmp_path / "live.ckpt")
    with pytest.raises(CheckpointError, match="none of the released files; say what it was trained with"):
        convert_live(tmp_path / "live.ckpt", tmp_path / "out", CONFIG)
    digest = hashlib.sha256((tmp_path / "live.ckpt").read_bytes()).hexdigest()
    monkeypatch.setitem(module.PUBLISHED, (digest[:8], digest[-4:]), "teacher_forcing")
    convert_live(tmp_path / "live.ckpt", tmp_path / "out", CONFIG)
    assert WorldDiT.from_pretrained(tmp_path / "out").config.forcing == "teacher_forcing"


def without(state: dict, name: str) -> dict:
    return {key: value for key, value in state.items() if key != name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: without(s, "blocks.1.attention.wo.weight"), r"1 missing: blocks\.1\.attn\.to_out\.weight"),
        (lambda s: without(s, "blocks.1.feed_forward.w1.weight"), r"feed_forward\.w3"),
        (lambda s: s | {"blocks.0.attention.q_norm.weight": torch.ones(DIM)}, r"1 names are not .*q_norm"),
        (lambda s: s | {"pos_embed": torch.ones(DIM)}, "pos_embed"),
        (lambda s: s | {"blocks.0.attention.wo.weight": torch.ones(DIM, DIM - 1)}, r"shape \(32, 31\).* \(32, 32\)"),
        (lambda s: s | {"blocks.2.ffn_norm.weight": torch.ones(DIM)}, r"1 unexpected: blocks\.2\.norm2"),
    ],
)
def test_a_file_that_does_not_fit_exactly_is_refused(released, tmp_path, change, message):
    torch.save({"state_dict": {f"model.{name}": x for name, x in change(released).items()}}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=message):
        convert_live(tmp_path / "a.ckpt", tmp_path / "out", CONFIG, forcing="live")
    assert not (tmp_path / "out").exists()


def test_other_files_are_named(released, tmp_path):
    def refused(message: str, source="a.ckpt", **options) -> None:
        with pytest.raises(CheckpointError, match=message):
            convert_live(tmp_path / source, tmp_path / "out", **{"base_config": CONFIG, "forcing": "live", **options})

    refused("does not exist")
    (tmp_path / "a.ckpt").write_bytes(b"no checkpoint")
    refused("damaged or no checkpoint")
    torch.save({"epoch": 3}, tmp_path / "a.ckpt")
    refused("holds no dictionary of tensors")
    torch.save({"state_dict": {"encoder.weight": torch.ones(1)}}, tmp_path / "a.ckpt")
    refused("no checkpoint of LIVE: encoder.weight is unknown")
    refused("live-re10k", base_config="live-re10")
    refused("forcing='df'", forcing="df")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    refused("exists; choose another folder")


# --- the VAE ---------------------------------------------------------------------------------------------------


def released_vae(widths=(32, 64), latents=3) -> dict[str, torch.Tensor]:
    """A random autoencoder in the layout of the release, `tvae/models/mar_vae.py`; attention in the last level."""
    generator = torch.Generator().manual_seed(0)
    state: dict[str, torch.Tensor] = {}

    def conv(name: str, out: int, into: int, size: int) -> None:
        scale = (into * size**2) ** -0.5
        state[f"{name}.weight"] = scale * torch.randn(out, into, size, size, generator=generator)
        state[f"{name}.bias"] = 0.1 * torch.randn(out, generator=generator)

    def norm(name: str, width: int) -> None:
        state[f"{name}.weight"] = 1 + 0.1 * torch.randn(width, generator=generator)
        state[f"{name}.bias"] = 0.1 * torch.randn(width, generator=generator)

    def resnet(name: str, out: int, into: int) -> None:
        norm(f"{name}.norm1", into)
        conv(f"{name}.conv1", out, into, 3)
        norm(f"{name}.norm2", out)
        conv(f"{name}.conv2", out, out, 3)
        if out != into:
            conv(f"{name}.nin_shortcut", out, into, 1)

    def attention(name: str, width: int) -> None:
        norm(f"{name}.norm", width)
        for part in ("q", "k", "v", "proj_out"):
            conv(f"{name}.{part}", width, width, 1)

    def middle(side: str, width: int) -> None:
        resnet(f"{side}.mid.block_1", width, width)
        attention(f"{side}.mid.attn_1", width)
        resnet(f"{side}.mid.block_2", width, width)

    last = len(widths) - 1
    conv("encoder.conv_in", widths[0], 3, 3)
    for level, width in enumerate(widths):
        for block in range(2):
            resnet(f"encoder.down.{level}.block.{block}", width, widths[max(level - 1, 0)] if block == 0 else width)
            if level == last:
                attention(f"encoder.down.{level}.attn.{block}", width)
        if level != last:
            conv(f"encoder.down.{level}.downsample.conv", width, width, 3)
    middle("encoder", widths[-1])
    norm("encoder.norm_out", widths[-1])
    conv("encoder.conv_out", 2 * latents, widths[-1], 3)
    conv("quant_conv", 2 * latents, 2 * latents, 1)
    conv("post_quant_conv", latents, latents, 1)
    conv("decoder.conv_in", widths[-1], latents, 3)
    middle("decoder", widths[-1])
    for level in reversed(range(len(widths))):
        for block in range(3):
            into = widths[min(level + 1, last)] if block == 0 else widths[level]
            resnet(f"decoder.up.{level}.block.{block}", widths[level], into)
        if level:
            conv(f"decoder.up.{level}.upsample.conv", widths[level], widths[level], 3)
    norm("decoder.norm_out", widths[0])
    conv("decoder.conv_out", 3, widths[0], 3)
    return state


class VaeReference:
    """The autoencoder of latent diffusion, written down from its weights by their original names."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        self.state = state
        self.levels = 1 + max(int(name.split(".")[2]) for name in state if name.startswith("encoder.down"))

    def conv(self, x: torch.Tensor, name: str, **options) -> torch.Tensor:
        weight = self.state[f"{name}.weight"]
        return F.conv2d(x, weight, self.state[f"{name}.bias"], **{"padding": weight.shape[-1] // 2, **options})

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.group_norm(x, 32, self.state[f"{name}.weight"], self.state[f"{name}.bias"], eps=1e-6)

    def resnet(self, x: torch.Tensor, name: str) -> torch.Tensor:
        h = self.conv(F.silu(self.norm(x, f"{name}.norm1")), f"{name}.conv1")
        h = self.conv(F.silu(self.norm(h, f"{name}.norm2")), f"{name}.conv2")
        return h + (self.conv(x, f"{name}.nin_shortcut") if f"{name}.nin_shortcut.weight" in self.state else x)

    def attention(self, x: torch.Tensor, name: str) -> torch.Tensor:
        h = self.norm(x, f"{name}.norm")
        q, k, v = (self.conv(h, f"{name}.{part}").flatten(2) for part in "qkv")
        weights = torch.einsum("bci,bcj->bij", q, k).div(x.shape[1] ** 0.5).softmax(-1)
        return x + self.conv(torch.einsum("bij,bcj->bci", weights, v).view_as(x), f"{name}.proj_out")

    def middle(self, x: torch.Tensor, side: str) -> torch.Tensor:
        x = self.attention(self.resnet(x, f"{side}.mid.block_1"), f"{side}.mid.attn_1")
        return self.resnet(x, f"{side}.mid.block_2")

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x, "encoder.conv_in")
        for level in range(self.levels):
            for block in range(2):
                x = self.resnet(x, f"encoder.down.{level}.block.{block}")
                if f"encoder.down.{level}.attn.{block}.q.weight" in self.state:
                    x = self.attention(x, f"encoder.down.{level}.attn.{block}")
            if level != self.levels - 1:
                x = self.conv(F.pad(x, (0, 1, 0, 1)), f"encoder.down.{level}.downsample.conv", stride=2, padding=0)
        x = F.silu(self.norm(self.middle(x, "encoder"), "encoder.norm_out"))
        return self.conv(self.conv(x, "encoder.conv_out"), "quant_conv")

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        x = self.middle(self.conv(self.conv(z, "post_quant_conv"), "decoder.conv_in"), "decoder")
        for level in reversed(range(self.levels)):
            for block in range(3):
                x = self.resnet(x, f"decoder.up.{level}.block.{block}")
            if level:
                x = self.conv(x.repeat_interleave(2, 2).repeat_interleave(2, 3), f"decoder.up.{level}.upsample.conv")
        return self.conv(F.silu(self.norm(x, "decoder.norm_out")), "decoder.conv_out")


@pytest.mark.parametrize("nest", ["model", "state_dict", None])
def test_the_autoencoder_becomes_the_same_network(tmp_path, nest):
    state = released_vae()
    extra = {"loss.discriminator.weight": torch.ones(1), "metrics_fid.mean": torch.ones(1)}
    torch.save({nest: state | extra} if nest else state | extra, tmp_path / "vae.ckpt")
    convert_kl16(tmp_path / "vae.ckpt", tmp_path / "out")
    vae, original = AutoencoderKL.from_pretrained(tmp_path / "out").eval(), VaeReference(state)
    generator = torch.Generator().manual_seed(1)
    image, latent = torch.randn(2, 3, 16, 24, generator=generator), torch.randn(2, 3, 8, 12, generator=generator)
    with torch.no_grad():
        moments = vae.encode(image).latent_dist.parameters
        torch.testing.assert_close(moments, original.encode(image), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(vae.decode(latent).sample, original.decode(latent), atol=1e-4, rtol=1e-4)
    assert vae.config.scaling_factor == 0.2325


def test_the_published_autoencoder_is_kl16():
    with torch.device("meta"):
        state = {name: x.to("meta") for name, x in released_vae((128, 128, 256, 256, 512), 16).items()}
        config = module._vae_config(state)
        model = AutoencoderKL(**config)
    names = {module._vae_name(name, 5) for name in state}
    assert names == set(model.state_dict())
    assert config["block_out_channels"] == (128, 128, 256, 256, 512) and config["layers_per_block"] == 2
    assert config["down_block_types"] == ("DownEncoderBlock2D",) * 4 + ("AttnDownEncoderBlock2D",)
    assert config["up_block_types"] == ("UpDecoderBlock2D",) * 5 and config["latent_channels"] == 16


def test_no_autoencoder_and_unknown_names_are_refused(tmp_path):
    torch.save({"weight": torch.ones(1)}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match="no autoencoder of latent diffusion: it holds weight"):
        convert_kl16(tmp_path / "a.ckpt", tmp_path / "out")
    torch.save(released_vae() | {"encoder.mid.attn_2.q.weight": torch.ones(1)}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match="1 names are not of an autoencoder: encoder.mid.attn_2"):
        convert_kl16(tmp_path / "a.ckpt", tmp_path / "out")


# --- the command -----------------------------------------------------------------------------------------------


def test_the_command_converts_and_prints_sizes_and_hashes(released, tmp_path, monkeypatch):
    from vidgen.cli.convert import app

    monkeypatch.setitem(module.LIVE_CONFIGS, "live-re10k", CONFIG)
    torch.save(lightning(released), tmp_path / "live.ckpt")
    torch.save(released_vae(), tmp_path / "vae.ckpt")
    run = CliRunner().invoke
    result = run(app, ["live", str(tmp_path / "live.ckpt"), str(tmp_path / "live"), "--forcing", "live"])
    assert result.exit_code == 0 and "sha256" in result.stdout and "parameters" in result.stdout
    assert run(app, ["live-vae", str(tmp_path / "vae.ckpt"), str(tmp_path / "vae")]).exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"live.ckpt", "vae.ckpt", "live", "vae"}
    for command in ("live", "live-vae"):
        assert run(app, [command, str(tmp_path / "none.ckpt"), str(tmp_path / "x")]).exit_code == 2
        assert run(app, [command, str(tmp_path / "live.ckpt"), str(tmp_path / "live")]).exit_code == 2
