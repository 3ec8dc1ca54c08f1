"""`lightning-pipe check`: all that would be refused is listed, and gradients are compared."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.profilers import PyTorchProfiler
from torch import Tensor, nn
from torch.nn import functional as F
from trainer.lit import FEATURES, Classifier, loader

from lightning_pipe.checking.preflight import look
from lightning_pipe.checking.preflight_rows import Findings, Plans, Row
from lightning_pipe.cli import main

PROJECT = """
from torch import nn
from trainer.lit import Classifier, loader

class Failing(Classifier):
    def training_step(self, batch, batch_idx):
        if self.trainer.global_rank == 1:
            raise RuntimeError("the user's error")
        return super().training_step(batch, batch_idx)

def make(dropout=0.0, norm=False, fails=False):
    print("the user's own words")
    module = Failing() if fails else Classifier(dropout)
    if norm:
        module.model.append(nn.BatchNorm1d(3))
    return module, loader()
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file of a user's, which is a Python module of its own in each test."""
    file = tmp_path / f"project_{tmp_path.name}.py"
    file.write_text(PROJECT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return f"{file}:make"


def inspected(
    module: L.LightningModule | None = None,
    devices: int = 2,
    strategy: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    **options: Any,
) -> Findings:
    given = {"accelerator": "cpu", **(trainer or {})}
    plans = Plans(module or Classifier(), loader(), devices, strategy or {}, given, **options)
    return look(plans)


def rows(findings: Findings) -> dict[str, Row]:
    return {row.name: row for row in findings.rows}


def test_nothing_is_in_the_way() -> None:
    findings = inspected(strategy={"partition": [3, 5]}, memory=1e6)

    assert findings.is_possible
    assert {row.status for row in findings.rows} == {"ok"}
    assert [(s.stage, s.rank, s.first, s.last, s.num_layers) for s in findings.stages] == [
        (0, 0, "model.0", "model.2", 3),
        (1, 1, "model.3", "model.7", 5),
    ]
    assert [stage.parameters for stage in findings.stages] == [180, 263]
    assert rows(findings)["micro-batches"].text == "8 of 2 samples"
    weights = [4 * stage.parameters for stage in findings.stages]
    # With gradients and AdamW's two states they are four times the weights, without activations.
    assert all(4 * w < peak < 8 * w for w, peak in zip(weights, findings.peak_bytes, strict=True))


def test_all_that_is_wrong_is_listed() -> None:
    module = Classifier()
    module.automatic_optimization = False
    module.example_input_array = torch.zeros(1, FEATURES)
    findings = inspected(
        module,
        3,
        {"schedule": "pipedream", "num_microbatches": 17, "partition": [1, 2, 3]},
        {
            "accumulate_grad_batches": 2,
            "callbacks": [ModelPruning("l1_unstructured")],
            "profiler": PyTorchProfiler(),
        },
        memory=1e6,
    )

    assert not findings.is_possible
    refused = {name: row.text for name, row in rows(findings).items() if row.status == "no"}
    assert set(refused) == {"Trainer", "module", "stages", "parameters outside", "micro-batches"}
    for part in ("ModelPruning", "PyTorchProfiler", "accumulate_grad_batches=2"):
        assert part in refused["Trainer"]
    assert "manual optimization" in refused["module"]
    assert "example_input_array" in refused["module"]
    assert "[1, 2, 3]" in refused["stages"]
    assert "'log_temperature'" in refused["parameters outside"]
    assert "num_microbatches <= 16" in refused["micro-batches"]
    unknown = {
        name: row.text for name, row in rows(findings).items() if row.status == "not checked"
    }
    assert unknown == {
        "optimizer": "It depends on module.",
        "shared parameters": "It depends on stages.",
        "memory": "It depends on stages and micro-batches.",
    }


def test_replicas_and_what_they_divide() -> None:
    options: dict[str, Any] = {"partition": [3, 5], "data_parallel_size": 2}
    whole = inspected(devices=4, strategy=options, memory=1e6)
    divided = inspected(devices=4, strategy=options | {"zero_stage": 1}, memory=1e6)

    assert divided.is_possible
    assert divided.num_ranks == 4
    answers = rows(divided)
    assert answers["ranks"].text == "4 processes, 2 in a pipeline, 2 replicas"
    assert answers["ZeRO"].text == "1: 2 replicas divide the states of the optimizer"
    assert answers["batch"].text == "16 samples for each replica"
    assert rows(whole)["ZeRO"].text == "0: replicas divide nothing"
    # Of AdamW's two states each replica has one half: as much as the weights.
    for stage in divided.stages:
        spared = whole.peak_bytes[stage.rank] - divided.peak_bytes[stage.rank]
        outside = 4
        assert spared == pytest.approx(4 * stage.parameters, abs=outside + 16)


class Distributed(Classifier):
    """Distributes its layers, for which there must be a mesh."""

    def configure_model(self) -> None:
        assert self.device_mesh is not None


def test_layers_that_are_distributed_in_the_ranks_are_not_looked_at() -> None:
    findings = inspected(Distributed(), 4, {"tensor_parallel_size": 2})

    assert findings.is_possible
    answers = rows(findings)
    assert answers["ranks"].text == "4 processes, 2 in a pipeline, 2 share each layer"
    assert answers["layers"].status == "not checked"
    assert "there are none before a run" in answers["layers"].text


class Chain(nn.Module):
    """Does something between its layers."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) + 1
        return x


class Between(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.chain = Chain(self.model)
        del self.model

    def configure_pipeline(self) -> list[nn.Module]:
        return list(self.chain.layers)

    def loss(self, batch: Any) -> Tensor:
        self.log("before the call", 1.0)
        return F.cross_entropy(self.chain(batch[0]), batch[1])


class Elsewhere(Classifier):
    def training_step(self, batch: Any) -> Tensor:  # type: ignore[override]  # one argument
        return self.log_temperature * 2


class Tied(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.model[6].weight = self.model[4].weight


class Adversarial(Classifier):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), 0.1), torch.optim.SGD(self.parameters(), 0.1)]


@pytest.mark.parametrize(
    ("module", "options", "row", "text"),
    [
        (
            Between(),
            {},
            "code between layers",
            "Between layers 'chain.layers.0' and 'chain.layers.1'",
        ),
        (Elsewhere(), {}, "code between layers", "did not call its pipelined module 'model'"),
        (
            Tied(),
            {"strategy": {"partition": [5, 3], "schedule": "pipedream"}},
            "shared parameters",
            "'model.6.weight'",
        ),
        (Adversarial(), {}, "optimizer", "Put the parameters into groups of one optimizer"),
        (None, {"strategy": {"schedule": "nix"}}, "options", "There is no schedule 'nix'"),
        (None, {"strategy": {"pipeline_parallel_size": 3}}, "ranks", "Trainer(devices=3)"),
        (None, {"strategy": {"stages_per_rank": 2}}, "schedule", "one stage per rank"),
        (None, {"strategy": {"data_parallel_size": 4}}, "ranks", "with 2 processes"),
        (
            None,
            {
                "devices": 4,
                "strategy": {"data_parallel_size": 2, "zero_stage": 2}
                | {"schedule": "zero_bubble"},
            },
            "schedule",
            "Use zero_stage=1",
        ),
        (
            None,
            {"strategy": {"schedule": "pipedream", "zero_stage": 3}},
            "options",
            "old versions of the weights",
        ),
        (None, {"strategy": {"module": "modle"}}, "layers", "did you mean 'model'"),
        (
            None,
            {
                "strategy": {"schedule": "pipedream", "weight_stashing": False},
                "trainer": {"precision": "bf16-mixed"},
            },
            "precision",
            "autocast keeps copies",
        ),
        (None, {"batch_size": 17}, "batch", "expected a number from 1 to 16"),
        (None, {"memory": 3000.0}, "memory", "are missing"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else None,
)
def test_reason(
    module: L.LightningModule | None, options: dict[str, Any], row: str, text: str
) -> None:
    found = rows(inspected(module, **options))[row]

    assert found.status == "no"
    assert text in found.text


class Whole(Classifier):
    def split_batch(self, batch: Any, num_microbatches: int) -> list[Any]:
        return [batch]


class Normalised(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.model.append(nn.BatchNorm1d(3))


@pytest.mark.parametrize(
    ("module", "options", "row", "text"),
    [
        (Normalised(), {}, "BatchNorm", "normalise each micro-batch by itself"),
        (None, {"strategy": {"deferred_batchnorm": True}}, "BatchNorm", "it has no effect"),
        (None, {"strategy": {"zero_stage": 1}}, "ZeRO", "there is nothing to divide"),
        (
            Whole(),
            {"strategy": {"schedule": "interleaved", "stages_per_rank": 2}},
            "micro-batches",
            "in the order of 'gpipe'",
        ),
        (
            Normalised(),
            {"strategy": {"schedule": "pipedream"}, "trainer": {"gradient_clip_val": 1.0}},
            "Trainer",
            "clips by the norm of each stage",
        ),
    ],
)
def test_warning(
    module: L.LightningModule | None, options: dict[str, Any], row: str, text: str
) -> None:
    found = rows(inspected(module, **options))[row]

    assert found.status == "warning", found
    assert text in found.text


class Deferred(Classifier):
    def __init__(self) -> None:
        super().__init__()
        del self.model

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(4)))


def test_layers_that_are_built_in_the_ranks_take_no_memory_here() -> None:
    module = Deferred()
    findings = inspected(module)

    assert findings.is_possible
    assert [stage.num_layers for stage in findings.stages] == [2, 2]
    assert all(p.is_meta for p in module.model.parameters())


class Slow(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.01)
        return super().forward(x)


class Uneven(L.LightningModule):
    """One layer takes longer than all others, which have more parameters."""

    def __init__(self) -> None:
        super().__init__()
        linear = [nn.Linear(FEATURES, FEATURES) for _ in range(3)]
        self.model = nn.Sequential(*linear, Slow(FEATURES, 3))

    def training_step(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("has_example", [True, False])
def test_cut_by_time(has_example: bool) -> None:
    module = Uneven()
    module.example_input_array = torch.zeros(4, FEATURES) if has_example else None

    findings = inspected(module, strategy={"partition": "time"})

    assert findings.is_possible, findings.rows
    assert [stage.num_layers for stage in findings.stages] == [3, 1]


# ------------------------------------------------------------------------------------- the command


def test_gradients_are_compared(project: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["model.dropout=0.2", "--num-microbatches", "4", "--batch-size=8", "model.norm=true"]
    code = main(["check", project, *args, "--partition", "5,4", "--json"])

    captured = capsys.readouterr()
    assert code == 0, captured
    assert "the user's own words" in captured.err
    answer = json.loads(captured.out)
    assert answer["ok"]
    assert [stage["num_layers"] for stage in answer["stages"]] == [5, 4]
    assert answer["parity"]["is_equal"]
    assert answer["parity"]["reference"] == "micro-batches"
    assert answer["parity"]["num_microbatches"] == 4
    assert [row["status"] for row in answer["rows"][-2:]] == ["ok", "ok"]


def test_data_elsewhere(project: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = [project.replace(":make", ":Classifier"), "--data", "trainer.lit:Samples"]
    args += ["--partition", "uniform", "--schedule=gpipe", "--module", "model"]
    assert main(["check", *args]) == 0

    output = " ".join(capsys.readouterr().out.split())
    assert "schedule ok gpipe, 2 stages" in output
    assert "stages ok 4, 4 layers" in output
    assert "logged values ok" in output


def test_replicas_are_compared(project: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", project, "--data-parallel-size=2", "--zero-stage=2"]) == 0

    output = " ".join(capsys.readouterr().out.split())
    assert "4 processes, 2 in a pipeline, 2 replicas" in output
    assert "gradients ok The gradients of" in output
    assert "2 replicas had a share of the batch each" in output


def test_ranks_that_share_layers_are_not_compared(
    project: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", project, "--tensor-parallel-size=2"]) == 0

    output = " ".join(capsys.readouterr().out.split())
    assert "4 processes, 2 in a pipeline, 2 share each layer" in output
    assert "gradients not checked Gradients cannot be compared with tensor_parallel_size" in output


def test_no_run_where_something_is_in_the_way(
    project: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["check", project, "--num-microbatches", "17"])

    output = " ".join(capsys.readouterr().out.split())
    assert code == 1
    assert "micro-batches no PipelineStrategy(num_microbatches=17)" in output
    assert "gradients not checked The run would be refused." in output


def test_a_rank_that_fails(project: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["check", project, "model.fails=true"])

    captured = capsys.readouterr()
    assert code == 1
    *_, error, place = captured.err.rstrip().splitlines()
    assert error == "RuntimeError: the user's error"
    assert "rank 1, stage 1, micro-batch 0" in place
    assert "gradients no The runs came to no result" in " ".join(captured.out.split())


def test_no_parity(project: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", project, "--no-parity", "--devices", "4", "--memory", "1KiB"]) == 1

    output = capsys.readouterr().out
    assert "\ngradients " not in output
    assert "4 processes" in output
    assert "peak of the rank" in output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere.py:Model"], "There is no file"),
        (["PROJECT", "model.width=3"], "cannot be called with {'width': 3}"),
        (["PROJECT", "--memory", "much"], "--memory=much is not understood"),
    ],
)
def test_wrong_usage(
    args: list[str], message: str, project: str, capsys: pytest.CaptureFixture[str]
) -> None:
    args = [project if arg == "PROJECT" else arg for arg in args]
    assert main(["check", *args]) == 2

    captured = capsys.readouterr()
    assert message in captured.err.splitlines()[-1]
    assert not captured.out


def test_as_a_user_runs_it(project: str, tmp_path: Path) -> None:
    tests = Path(__file__).parents[1]
    command = [sys.executable, "-m", "lightning_pipe", "check", project]
    done = subprocess.run(
        [*command, "--schedule", "zero_bubble", "--stages-per-rank", "2"],
        capture_output=True,
        text=True,
        timeout=90,
        cwd=tmp_path,
        env={"PATH": "", "PYTHONPATH": str(tests), "LOCAL_RANK": "0", "WORLD_SIZE": "4"},
    )

    assert done.returncode == 0, done
    output = " ".join(done.stdout.split())
    assert "gradients ok The gradients of 12 parameters and the loss equal those of one" in output
    assert "logged values ok train_loss" in output
    assert "Traceback" not in done.stderr
