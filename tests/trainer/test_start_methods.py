"""Ranks that the calling process starts by fork or spawn, as in notebooks, and what comes back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities import imports
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.strategies.launchers.multiprocessing import _WorkerOutput
from lightning.pytorch.trainer.states import TrainerFn, TrainerState
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessContext, ProcessExitedException

from lightning_pipe import PipelineStrategy, process_launcher

from .lit import Classifier, assert_equal_weights, loader, numbers, trainer, weights
from .ranks import Ranks

StartMethod = Literal["fork", "spawn"]
NUM_RANKS = 2
GRACE_S = 1.0


class Evaluated(Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        output: Tensor = self.model(batch[0])
        return output


def calling_process(start_method: StartMethod | None, **options: Any) -> L.Trainer:
    """A Trainer of a process that nothing has started as a rank; of one device without method."""
    for name in ("LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        os.environ.pop(name, None)
    os.environ["NUM_RANKS"] = str(NUM_RANKS)
    return trainer({"start_method": start_method} if start_method else None, **options)


def fit(start_method: StartMethod | None, directory: Path) -> tuple[L.Trainer, dict[str, Any]]:
    """Train; return what the calling process has then."""
    L.seed_everything(3, verbose=False)
    module = Evaluated()
    best = ModelCheckpoint(directory, "{epoch}", monitor="val_loss")
    run = calling_process(start_method, callbacks=[best], enable_checkpointing=True)
    run.fit(module, loader(), loader(seed=1))
    came: dict[str, Any] = {"trained": weights(module), "fit": numbers(run.callback_metrics)}
    came["best"] = Path(best.best_model_path).name
    run.save_checkpoint(directory / "after.ckpt", weights_only=True)
    if start_method is not None:
        assert isinstance(run.strategy, PipelineStrategy)
        came["report"] = str(run.strategy.report)
        assert not dist.is_initialized()
    return run, came


def fit_only(start_method: StartMethod | None, directory: Path) -> dict[str, Any]:
    return fit(start_method, directory)[1]


def fit_and_evaluate(start_method: StartMethod | None, directory: Path) -> dict[str, Any]:
    """Use a Trainer for all that it can do."""
    run, came = fit(start_method, directory)
    module = run.lightning_module
    came["validated"] = run.validate(module, loader(seed=2), verbose=False)
    came["tested"] = run.test(module, loader(seed=1), verbose=False)
    # More than a pipe holds.
    came["predicted"] = run.predict(module, loader(3000, batch_size=1000))
    return came


@pytest.mark.parametrize(
    ("start_method", "function"), [("fork", fit_and_evaluate), ("spawn", fit_only)]
)
def test_weights_and_results_come_back(
    ranks: Ranks,
    start_method: StartMethod,
    function: Callable[..., dict[str, Any]],
    tmp_path: Path,
) -> None:
    expected = function(None, tmp_path / "one")

    (came,) = ranks.run(1, function, start_method, tmp_path / "many", timeout=60)

    assert_equal_weights(came.pop("trained"), expected.pop("trained"))
    report = came.pop("report")
    assert "Pipeline: 1f1b; stages: 2; micro-batches: 8; batches: 6" in report
    assert came.pop("best") == expected.pop("best") == "epoch=1.ckpt"
    torch.testing.assert_close(came, expected, rtol=0, atol=1e-10)
    saved = [
        torch.load(tmp_path / number / "after.ckpt", weights_only=True)["state_dict"]
        for number in ("many", "one")
    ]
    assert_equal_weights(*saved)


class UserError(Exception):
    """What user code raises here."""


class Failing(Classifier):
    """Fails on one rank in the second batch, in a hook; the other one may be asleep."""

    def __init__(self, rank: int, sleeps: float) -> None:
        super().__init__()
        self.rank, self.sleeps = rank, sleeps

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.trainer.global_rank == self.rank:
            raise UserError("the user's error")
        if batch_idx == 1:
            time.sleep(self.sleeps)


class Deadly:
    """Kills the process that writes it down."""

    def __reduce__(self) -> str:
        os.kill(os.getpid(), signal.SIGKILL)
        return "unreachable"


class ReturningDeadly(Classifier):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(batch[0]), Deadly() if self.trainer.is_global_zero else None


def kill_while_writing() -> str:
    run = calling_process("fork")
    process_launcher._GRACE_S = GRACE_S
    with pytest.raises(ProcessExitedException) as raised:
        run.predict(ReturningDeadly(), loader())
    return str(raised.value)


def test_a_rank_that_is_killed_while_it_writes_the_results(ranks: Ranks) -> None:
    (message,) = ranks.run(1, kill_while_writing)

    assert message == "process 0 terminated with signal SIGKILL"


def test_results_of_a_gpu_come_to_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The GPU is another one here, to which nothing can be restored."""

    def restore(storage: Any, location: str) -> None:
        assert location != "gpu:1"

    packages = [(0, lambda storage: "gpu:1", restore), *torch.serialization._package_registry]
    monkeypatch.setattr(torch.serialization, "_package_registry", packages)
    results = tmp_path / "results"
    torch.save(_WorkerOutput(None, None, TrainerState(), torch.ones(2), {}), results)
    with pytest.raises(AssertionError):
        torch.load(results, weights_only=False)

    output = process_launcher._wait_for(ProcessContext([], []), results)

    assert torch.equal(output.trainer_results, torch.ones(2))


def fail(start_method: StartMethod, rank: int, sleeps: float, directory: Path) -> tuple[str, float]:
    """What the calling process raises, and after how many seconds."""
    saving = OnExceptionCheckpoint(directory)
    run = calling_process(start_method, callbacks=[saving], enable_checkpointing=True)
    process_launcher._GRACE_S = GRACE_S
    start = time.monotonic()
    with pytest.raises(Exception, match="terminated") as raised:
        run.fit(Failing(rank, sleeps), loader())
    with pytest.raises(MisconfigurationException, match="the last fit has failed"):
        run.save_checkpoint(directory / "after.ckpt")
    return str(raised.value), time.monotonic() - start


@pytest.mark.parametrize(("rank", "sleeps"), [(0, 0.0), (1, 0.0), (1, 100.0)])
def test_a_rank_that_fails_ends_all(ranks: Ranks, rank: int, sleeps: float, tmp_path: Path) -> None:
    ranks.run(1, time.time)

    ((message, took),) = ranks.run(1, fail, "fork", rank, sleeps, tmp_path)

    assert took < 2 * GRACE_S + 2.0
    assert message.rstrip().endswith("UserError: the user's error"), message
    assert not list(tmp_path.iterdir()), "a checkpoint of what was never trained"


class Built(Classifier):
    """Builds its layers in the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.model = None

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(1)
            self.model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)), nn.Linear(6, 3))


def fit_built(directory: Path) -> tuple[list[str], Tensor, list[str]]:
    saving = ModelCheckpoint(directory, "last")
    run = calling_process("fork", callbacks=[saving], enable_checkpointing=True)
    module = Built()
    with pytest.warns(UserWarning, match="not all brought back") as warned:
        run.fit(module, loader())
    with pytest.raises(MisconfigurationException, match="built in `configure_model`"):
        run.save_checkpoint(directory / "after.ckpt")
    assert not (directory / "after.ckpt").exists()
    said = [str(w.message) for w in warned if "not all brought back" in str(w.message)]
    return said, module.log_temperature.detach(), list(module.state_dict())


def test_layers_that_are_built_in_the_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """They are not in the calling process, which says where to find them."""
    ((said, _, names),) = ranks.run(1, fit_built, tmp_path)

    assert names == ["log_temperature"]
    (warning,) = said
    assert "Built" in warning
    assert "load_from_checkpoint" in warning
    module = Built.load_from_checkpoint(tmp_path / "last.ckpt")
    assert len(weights(module)) == 11


@pytest.mark.parametrize("node", [0, 1])
def test_only_the_first_node_misses_layers(
    node: int, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, tmp_path: Path
) -> None:
    """The others get no weights, whatever the model is."""
    monkeypatch.setenv("NODE_RANK", str(node))
    run = L.Trainer(
        accelerator="cpu",
        devices=2,
        num_nodes=2,
        logger=False,
        strategy=PipelineStrategy(start_method="fork"),
    )
    run.strategy.connect(Classifier())
    run.state.fn = TrainerFn.FITTING
    launcher = run.strategy.launcher
    assert isinstance(launcher, process_launcher.ProcessLauncher)
    gave = launcher.get_extra_results(run)

    launcher.update_main_process_results(run, {**gave, "whole": False})

    said = [w for w in recwarn if "not all brought back" in str(w.message)]
    assert len(said) == (1 if node == 0 else 0)
    if node == 1:
        run.save_checkpoint(tmp_path / "after.ckpt")
        assert not (tmp_path / "after.ckpt").exists(), "weights that were never trained"


def start_from(what: str) -> str:
    run = calling_process("fork")
    if what == "second fit":
        run.fit(Classifier(), loader())
    elif what == "process group":
        os.environ |= {"MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
        dist.init_process_group("gloo")
    else:
        os.environ["LOCAL_RANK"] = "0"
    with pytest.raises(MisconfigurationException) as refused:
        run.fit(Classifier(), loader())
    return str(refused.value)


@pytest.mark.parametrize(
    ("what", "remedy"),
    [
        ("second fit", "Make a new Trainer"),
        ("process group", "destroy_process_group()"),
        ("rank", "start_method='popen'"),
    ],
)
def test_no_processes_are_started(ranks: Ranks, what: str, remedy: str) -> None:
    (message,) = ranks.run(1, start_from, what)

    assert "start_method='fork'" in message
    assert remedy in message


@pytest.mark.parametrize("start_method", ["popen", "spawn"])
def test_only_fork_in_a_notebook(
    monkeypatch: pytest.MonkeyPatch, start_method: Literal["popen", "spawn"]
) -> None:
    monkeypatch.setattr(imports, "_IS_INTERACTIVE", True)
    strategy = PipelineStrategy(start_method=start_method)
    with pytest.raises(MisconfigurationException, match="Use start_method='fork'"):
        L.Trainer(accelerator="cpu", devices=2, strategy=strategy)
