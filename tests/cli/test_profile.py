"""`lightning-pipe profile`: a table, a file, and what the planner reads of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_pipe.cli import main
from lightning_pipe.cli import profile as command
from lightning_pipe.partition import Profile

ROOT = Path(__file__).parents[2]
N, WIDTH = 4, 8
PROJECT = f"""
import time
import lightning as L
import torch
from torch import nn

class Slow(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def forward(self, x):
        time.sleep(self.seconds)
        return x * 2

class Model(L.LightningModule):
    def __init__(self, slow: float = 0.0, example: bool = True):
        super().__init__()
        self.slow = slow
        if example:
            self.example_input_array = torch.zeros({N}, {WIDTH})
        self.build()

    def build(self):
        layers = nn.Linear({WIDTH}, {WIDTH}), Slow(self.slow), nn.Linear({WIDTH}, 1)
        self.net = nn.Sequential(*layers)

    def training_step(self, batch, batch_idx):
        print("the user's own words")
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

class Late(Model):
    def build(self):
        pass

    def setup(self, stage):
        Model.build(self)

class Configured(Model):
    def build(self):
        self.net = None

    def configure_model(self):
        if self.net is None:
            Model.build(self)

class Making(Model):  # its own input, in the dtype that the Trainer lets be the default
    def training_step(self, batch, batch_idx):
        return self.net(torch.ones(len(batch), {WIDTH})).sum()

class Loading(Model):
    def train_dataloader(self):
        return batches()

class Two(Model):
    def build(self):
        Model.build(self)
        self.other = nn.Sequential(nn.Linear({WIDTH}, 1000))

class Hooked(Model):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[:, :{WIDTH}]

class Data(L.LightningDataModule):
    def train_dataloader(self):
        return wide()

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[:, :{WIDTH}]

class Outside(Configured):
    def configure_model(self):
        if self.net is None:
            self.before = nn.Linear({WIDTH}, {WIDTH})
            self.net = nn.Sequential(nn.Linear({WIDTH}, 200), Slow(0.0), nn.Linear(200, 1))

    def training_step(self, batch, batch_idx):
        return self.net(self.before(batch)).mean()

class Own(Model):
    def setup(self, stage):
        self.loader = batches()

    def train_dataloader(self):
        return self.loader

class Several(Model):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch["a"], batch_idx)

class Keyword(Model):
    def training_step(self, batch, batch_idx):
        return self.net(batch, scale=2.0).mean()

def wide():
    return [torch.ones(2 * {N}, {WIDTH} + 3)]

def several():
    load = torch.utils.data.DataLoader
    return {{"a": load(torch.ones(20, {WIDTH}), 2 * {N}), "b": load(torch.ones(9, {WIDTH}), 3)}}

def batches(size=2 * {N}):
    return [torch.ones(size, {WIDTH})] * 3
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file of a user's, which is a Python module of its own in each test."""
    file = tmp_path / f"{tmp_path.name}.py"
    file.write_text(PROJECT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    return file.name


def run(*args: str, device: str = "cpu") -> Profile:
    """Run the command with few repeats, and read its file."""
    assert main(["profile", *args, "--repeats", "1", "--device", device]) == 0
    return Profile.load("profile.json")


def test_table_and_file(project: str, capsys: pytest.CaptureFixture[str]) -> None:
    measured = run(f"{project}:Model", "model.slow=0.02")
    first, slow, last = measured.layers
    assert 0.02 <= slow.forward_seconds < 0.03
    assert max(first.forward_seconds, last.forward_seconds, slow.backward_seconds) < 0.01
    assert (measured.batch_size, measured.input_bytes) == (N, N * WIDTH * 4)
    assert first.parameter_bytes == (WIDTH * WIDTH + WIDTH) * 4
    assert first.optimizer_bytes == first.parameter_bytes
    output = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in output.splitlines() if line.strip()}
    assert rows["net.1"][1] == f"{1e3 * slow.forward_seconds:.3f}"
    total = sum(layer.forward_seconds for layer in measured.layers)
    assert rows["all"][1] == f"{1e3 * total:.3f}"
    assert rows["all"][3] == "100.0%"
    assert f"3 layers, {N} samples, on cpu" in output
    assert "written: profile.json" in output


def test_json_is_the_file(project: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What the user's step prints does not get between."""
    measured = run(f"{project}:Model", "--data", f"{project}:batches", "--json")
    written = capsys.readouterr()
    printed = json.loads(written.out)
    assert "the user's own words" in written.err
    assert printed.pop("output") == "profile.json"
    saved = json.loads(Path("profile.json").read_text())
    assert printed == {name: value for name, value in saved.items() if name != "version"}
    assert measured.batch_size == 2 * N
    assert measured.loss_activation_bytes == 0  # of the square's input, the last layer's output


@pytest.mark.parametrize(
    ("args", "samples"),
    [
        (["Model"], N),
        (["Model", "--batch-size", "3"], 3),
        (["Model", "--data", "batches"], 2 * N),
        (["Model", "--data", "batches", "data.size=5"], 5),
        (["Model", "--data", "batches", "--batch-size", "2"], 2),
        (["Loading"], 2 * N),
    ],
)
def test_where_the_input_comes_from(project: str, args: list[str], samples: int) -> None:
    named = [f"{project}:{arg}" if arg[0].isalpha() and "=" not in arg else arg for arg in args]
    measured = run(*named)
    assert measured.batch_size == samples
    assert measured.input_bytes == samples * WIDTH * 4


@pytest.mark.parametrize("name", ["Late", "Configured"])
def test_layers_that_hooks_build(project: str, name: str) -> None:
    assert len(run(f"{project}:{name}").layers) == 3


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("Hooked", "wide"),
        ("Model", "Data"),
        ("Outside", "batches"),
        ("Own", None),
        ("Several", "several"),
    ],
)
def test_the_step_gets_what_it_gets_in_a_run(project: str, name: str, data: str | None) -> None:
    """Hooks of module and data, a part that the step needs before the layers, several loaders."""
    named = [] if data is None else ["--data", f"{project}:{data}"]
    assert run(f"{project}:{name}", *named).input_bytes == 2 * N * WIDTH * 4


def test_what_the_layers_would_not_see(project: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", f"{project}:Keyword", "--data", f"{project}:batches"]) == 2
    assert "keyword arguments ['scale']" in capsys.readouterr().err


def test_precision(project: str) -> None:
    double = run(f"{project}:Model", "--precision", "64-true")
    assert double.layers[0].parameter_bytes == (WIDTH * WIDTH + WIDTH) * 8
    assert double.input_bytes == N * WIDTH * 8
    data = f"{project}:batches"
    made = run(f"{project}:Making", "--data", data, "--precision", "64-true")
    assert made.input_bytes == 2 * N * WIDTH * 8
    mixed = run(f"{project}:Model", "trainer.precision=bf16-mixed")
    assert mixed.layers[0].parameter_bytes == (WIDTH * WIDTH + WIDTH) * 4
    assert mixed.layers[0].output_bytes == N * WIDTH * 2


def test_the_sequential_that_is_meant(project: str) -> None:
    assert len(run(f"{project}:Two").layers) == 1  # that with most of the parameters
    assert len(run(f"{project}:Two", "--module", "net").layers) == 3
    assert len(run(f"{project}:Two", "strategy.module=net").layers) == 3


def test_the_planner_reads_it(project: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(f"{project}:Model", "model.slow=0.02", "--output", "profile.json")
    capsys.readouterr()
    assert main(["plan", "profile.json", "2", "--batch-size", "16", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["candidates"][0]
    assert sum(best["partition"]) == 3


def test_the_examples(project: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model.width=16", "model.heads=2", "model.context=8", "data.batch_size=2"]
    measured = run(str(ROOT / "conf" / "train.yaml"), *words)
    assert [layer.name for layer in measured.layers] == [f"model.{i}" for i in range(6)]
    assert measured.input_bytes == 2 * 8 * 8
    assert measured.layers[1].output_bytes == 2 * 8 * 16 * 4


def test_a_bar_for_what_takes_long(
    project: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    run(f"{project}:Model")
    assert "Layers" not in capsys.readouterr().err
    monkeypatch.setattr(sys.modules["lightning_pipe.cli.profile"], "_PATIENCE_S", 0.0)
    run(f"{project}:Model")
    assert "Layers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["Model", "--output", "profile.yaml"], "--output=profile.yaml must end in .json"),
        (["Model", "--repeats", "0"], "--repeats=0 must be at least 1"),
        (["Model", "--device", "tpu7"], "--device=tpu7"),
        (["Model", "--device", "meta"], "--device=meta: expected cpu, cuda, cuda:1 or auto"),
        (["Model", "model.example=false"], "no data is named: give --data"),
        (["Model", "--batch-size", "9"], "batch_size=9 with a first batch of 4 samples"),
        (["Modle"], "Did you mean 'Model'?"),
    ],
)
def test_errors(
    project: str, args: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", f"{project}:{args[0]}", *args[1:]]) == 2
    written = capsys.readouterr()
    assert says in written.err
    assert written.out == ""
    assert not Path("profile.json").exists()


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"--device=cuda:99, but torch sees \d+ CUDA devices"):
        command.profile("any:Thing", device="cuda:99")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(project: str) -> None:
    measured: Any = run(f"{project}:Model", device="auto")
    assert measured.device.startswith("cuda")
    assert all(layer.forward_seconds > 0 for layer in measured.layers)
