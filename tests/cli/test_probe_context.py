"""What would be wrong: a model probed as another kind, figures that are lost, a traceback for a bad argument."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from vidgen.language.dllm.modeling import MaskedDiffusionConfig, MaskedDiffusionLM
from vidgen.language.dllm.topics import TopicData
from vidgen.train.lora import LoraConfig, add_lora

SHAPE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL = ["--task", "topics", "--count", "4", "--places", "2", "--n-words", "6"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of a masked diffusion model, adapters for it, and a causal model, untrained."""
    folder, data = tmp_path_factory.mktemp("models"), TopicData()
    torch.manual_seed(0)
    kinds = {
        "masked": MaskedDiffusionLM(
            MaskedDiffusionConfig(vocab_size=data.vocab_size, mask_token_id=data.mask_token_id, **SHAPE)
        ),
        "causal": LlamaForCausalLM(LlamaConfig(vocab_size=data.vocab_size, **SHAPE)),
    }
    for name, model in kinds.items():
        model.save_pretrained(folder / name)
        data.tokenizer().save_pretrained(folder / name)
    return folder


def test_a_masked_model_gets_all_probes_with_how_it_decoded(run, models):
    pytest.importorskip("matplotlib")
    code, out, _ = run(
        "lm", "probe-context", "--model", models / "masked", *SMALL, "--extra-masks", "0,3", "--out", "report.json",
        "--plot", "curves.png",
    )  # fmt: skip
    assert code == 0 and "gen_length" in out and "steps" in out
    with open("report.json", encoding="utf-8") as file:
        report = json.load(file)
    assert [row["gen_length"] for row in report["masks"]["rows"]] == [1, 4] and report["position"]
    with open("curves.png", "rb") as file:
        assert file.read(8) == b"\x89PNG\r\n\x1a\n"


def test_a_causal_model_gets_the_position_probe_alone(run, models):
    code, _, _ = run("lm", "probe-context", "--model", models / "causal", *SMALL, "--out", "report.json")
    assert code == 0
    with open("report.json", encoding="utf-8") as file:
        report = json.load(file)
    assert report["model"] == "LlamaForCausalLM" and "masks" not in report and len(report["position"]) == 2


def test_adapters_change_what_is_measured(run, models):
    pytest.importorskip("peft")
    from vidgen.language.dllm.layouts import load_dllm

    adapted = add_lora(load_dllm(models / "masked", "cpu"), r".*q_proj", LoraConfig(rank=2, alpha=4))
    for name, parameter in adapted.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(parameter)
    adapted.save_pretrained(models / "adapter")
    found = []
    for options in ([], ["--adapter", models / "adapter"]):
        code, _, _ = run("lm", "probe-context", "--model", models / "masked", *SMALL, *options, "--out", "report.json")
        assert code == 0
        with open("report.json", encoding="utf-8") as file:
            found.append(json.load(file)["masks"]["rows"][0]["entropy"])
    assert found[0] != found[1]


@pytest.mark.parametrize(
    "options, message",
    [
        (["--extra-masks", "1,x"], "--extra-masks 1,x: give whole numbers"),
        (["--task", "topic"], "--task topic; allowed: rules, topics"),
        (["--out", "nowhere/report.json"], "the folder of nowhere/report.json doesn't exist"),
        (["--extra-masks", "0,5000"], "allowed are up to 4088 extra masks"),
        (["--task", "rules"], "too few words of the kind"),
        (["--adapter", "nowhere"], "no adapter_config.json"),
        (["--model", "./nowhere"], "there is no folder ./nowhere"),
    ],
)
def test_bad_arguments_are_one_line(run, models, options, message):
    code, out, err = run("lm", "probe-context", "--model", models / "masked", *SMALL, "--out", "report.json", *options)
    assert (code, out) == (2, "") and message in " ".join(err.split()) and "Traceback" not in err
