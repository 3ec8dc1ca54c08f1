"""Pretrained weights: a rank reads those of its own stages, and no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader
from trainer.lit import Options, assert_equal_weights, trainer, weights
from trainer.ranks import Ranks

from lightning_pipe import load_safetensors, pretrained

from .hugging_face import LitModel, make_batches, make_model

PIPELINE = {"schedule": "1f1b", "num_microbatches": 4}
LORA = {"r": 2, "target_modules": ["c_attn"], "init_lora_weights": False, "fan_in_fan_out": True}


def checkpoint(directory: Path) -> dict[str, Tensor]:
    """Write GPT-2's weights in float32 into two files with an index; what is in them."""
    torch.manual_seed(11)
    state = make_model("gpt2").float().state_dict()
    names = list(state)
    files = {f"model-0000{i}-of-00002.safetensors": names[i - 1 :: 2] for i in (1, 2)}
    weight_map = {}
    for file, inside in files.items():
        save_file({name: state[name].contiguous() for name in inside}, directory / file)
        weight_map |= dict.fromkeys(inside, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return state


class Pretrained(LitModel):
    def __init__(self, directory: Path, adapts: bool = False) -> None:
        super().__init__()
        self.directory, self.adapts = directory, adapts
        self.first: dict[str, Tensor] = {}

    def configure_model(self) -> None:
        if hasattr(self, "model"):
            return
        self.model = make_model("gpt2")
        load_safetensors(self.model, self.directory)
        if self.adapts:
            inject_adapter_in_model(LoraConfig(**LORA), self.model)

    def on_fit_start(self) -> None:
        self.first = weights(self.model)


def fit(pipeline: Options | None, directory: Path, adapts: bool) -> dict[str, Any]:
    read: dict[str, int] = {}
    read_tensor = pretrained.read_tensor

    def counted(file: str, name: str) -> Tensor:
        assert name not in read
        tensor = read_tensor(file, name)
        read[name] = tensor.nbytes
        return tensor

    L.seed_everything(3, verbose=False)
    module = Pretrained(directory, adapts)
    run = trainer(pipeline, max_epochs=1, gradient_clip_val=0.05)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrained, "read_tensor", counted)
        run.fit(module, DataLoader(make_batches("gpt2"), batch_size=None))
    return {"read": read, "first": module.first, "after": weights(module)}


@pytest.mark.parametrize("adapts", [False, True], ids=["all", "lora"])
def test_a_rank_reads_only_its_own_stage(ranks: Ranks, tmp_path: Path, adapts: bool) -> None:
    state = checkpoint(tmp_path)
    expected = fit(None, tmp_path, adapts)
    assert expected["read"] == {name: tensor.nbytes for name, tensor in state.items()}

    results = ranks.run(2, fit, PIPELINE, tmp_path, adapts)

    mine, others = (set(result["read"]) for result in results)
    assert mine.isdisjoint(others)
    assert mine | others == set(state)
    for result in results:
        owned = {n.replace(".base_layer", "") for n, t in result["first"].items() if not t.is_meta}
        assert set(result["read"]) == {name for name in owned if "lora_" not in name}
        assert sum(result["read"].values()) < 0.6 * sum(tensor.nbytes for tensor in state.values())
        for name, tensor in result["first"].items():
            loaded = state.get(name.replace(".base_layer", ""))
            if not tensor.is_meta and loaded is not None:
                torch.testing.assert_close(tensor, loaded.double(), rtol=0, atol=0)
    merged = {n: _there([r["after"][n] for r in results]) for n in expected["after"]}
    assert_equal_weights(merged, expected["after"])


def _there(tensors: list[Tensor]) -> Tensor:
    (there,) = [tensor for tensor in tensors if not tensor.is_meta]
    return there


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(small().state_dict(), tmp_path / "small.safetensors")
    return tmp_path / "small.safetensors"


def test_it_loads_at_once_without_a_pipeline(file: Path) -> None:
    module, other = small().to(torch.bfloat16), small()
    objects = list(module.parameters())
    assert load_safetensors(module, file) == ((), ())
    load_safetensors(other, [str(file)])
    assert all(a is b for a, b in zip(module.parameters(), objects, strict=True))
    for name, tensor in module.state_dict().items():
        expected = other.state_dict()[name]
        assert tensor.dtype == (torch.bfloat16 if expected.is_floating_point() else expected.dtype)
        torch.testing.assert_close(tensor, expected.to(tensor.dtype), rtol=0, atol=0)
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_one_name_of_tied_parameters_is_enough(tmp_path: Path) -> None:
    whole = make_model("gpt2", tied=True)
    state = {n: t for n, t in whole.state_dict().items() if n != "lm_head.weight"}
    save_file(state, tmp_path / "model.safetensors")
    module = make_model("gpt2", tied=True)
    assert load_safetensors(module, tmp_path) == ((), ())
    torch.testing.assert_close(module.state_dict(), whole.state_dict(), rtol=0, atol=0)
    assert module.lm_head.weight is module.transformer.wte.weight


def test_names_are_mapped_and_left_out(file: Path) -> None:
    module = nn.ModuleDict({"body": nn.Linear(2, 3)})

    def rename(name: str) -> str | None:
        return name.replace("0.", "body.") if name.startswith("0.") else None

    load_safetensors(module, file, rename)
    fresh = small()
    load_safetensors(fresh, file)
    torch.testing.assert_close(module["body"].weight, fresh[0].weight)


def test_what_does_not_fit_is_named(file: Path, tmp_path: Path) -> None:
    larger = nn.Sequential(*small(), nn.Linear(3, 1))
    with pytest.raises(MisconfigurationException, match=r"no tensor for '2.weight', '2.bias'"):
        load_safetensors(larger, file)
    assert load_safetensors(larger, file, strict=False).missing == ("2.weight", "2.bias")
    before = larger[2].weight.detach().clone()
    load_safetensors(larger, file, strict=False)
    assert torch.equal(larger[2].weight, before)

    with pytest.raises(MisconfigurationException, match=r"have '1.bias', .*which the module has"):
        load_safetensors(small()[:1], file)
    with pytest.raises(MisconfigurationException, match=r"'0.weight' is \[3, 2\] in the file"):
        load_safetensors(nn.Sequential(nn.Linear(5, 3)), file, strict=False)
    with pytest.raises(MisconfigurationException, match=r"loaded as 'one': '0.weight' of .* and "):
        load_safetensors(small(), file, lambda name: "one" if name.endswith("weight") else name)


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "text.safetensors").write_text("no tensors")
    (tmp_path / "index.json").write_text("{}")
    for path, says in (
        (tmp_path, "has neither model.safetensors.index.json nor"),
        (tmp_path / "none.safetensors", "There is no file"),
        (tmp_path / "text.safetensors", "cannot be read as a safetensors file"),
        (tmp_path / "index.json", "no 'weight_map'"),
    ):
        with pytest.raises(MisconfigurationException, match=says):
            load_safetensors(small(), path)
