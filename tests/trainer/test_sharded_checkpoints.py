"""Checkpoints as directories: each rank writes what it owns, and any layout reads them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader

from lightning_pipe.checkpoint import CheckpointError

from .lit import Classifier, Options, assert_equal_weights, loader, trainer, weights
from .ranks import Ranks


class Trained(Classifier):
    """Tests and predicts as well; its optimizer has two groups, one without weight decay."""

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim <= 1]
        groups: list[dict[str, Any]] = [
            {"params": matrices},
            {"params": others, "weight_decay": 0.0, "lr": 2e-2},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    validation_step = test_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(batch[0])


def zeroed() -> Trained:
    """What it needs is in the checkpoint."""
    module = Trained().double()
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    return module


def fit(pipeline: Options | None, directory: Path) -> None:
    """Train three epochs, and save in the middle of the second and after each."""
    L.seed_everything(6, verbose=False)
    within = ModelCheckpoint(directory, "{step}", every_n_train_steps=5, save_top_k=-1)
    at_ends = ModelCheckpoint(directory, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    run = trainer(pipeline, max_epochs=3, callbacks=[within, at_ends], enable_checkpointing=True)
    run.fit(Trained().double(), loader())


def go_on(pipeline: Options | None, path: Path, save: Path | None = None) -> dict[str, Any]:
    """Train from a checkpoint to the end; evaluate with it; give all that came out."""
    module = zeroed()
    run = trainer(pipeline, max_epochs=3)
    run.fit(module, loader(), ckpt_path=path)
    if save is not None:
        run.save_checkpoint(save)
    evaluated = trainer(pipeline)
    data = loader(9, seed=1)
    outcome = {
        "state": run.optimizers[0].state_dict(),
        "scheduler": run.lr_scheduler_configs[0].scheduler.state_dict(),
        "step": run.global_step,
        "loops": run.fit_loop.state_dict(),
        "tested": evaluated.test(zeroed(), data, ckpt_path=path, verbose=False),
        "validated": evaluated.validate(zeroed(), data, ckpt_path=path, verbose=False),
        "predicted": evaluated.predict(zeroed(), data, ckpt_path=path),
    }
    return {**outcome, "weights": weights(module)}


def consolidate(directory: Path) -> Path:
    """Make an ordinary file of a directory, by Lightning's own tool."""
    output = directory.with_suffix(".file")
    tool = "lightning.pytorch.utilities.consolidate_checkpoint"
    command = [sys.executable, "-m", tool, str(directory), "--output_file", str(output)]
    subprocess.run(command, check=True, timeout=60, capture_output=True)
    return output


FOUR = {"num_microbatches": 4, "partition": "uniform", "save_distributed_checkpoint": True}
TWO = {"schedule": "interleaved", "stages_per_rank": 2, "num_microbatches": 4}
THREE = {"schedule": "gpipe", "num_microbatches": 3, "save_distributed_checkpoint": True}


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories that four ranks have written."""
    directory = tmp_path_factory.mktemp("four")
    ranks.run(4, fit, FOUR, directory)
    return directory


@pytest.fixture(scope="module")
def expected(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What comes out on one device, from a file."""
    directory = tmp_path_factory.mktemp("one")
    ranks.run(1, fit, None, directory)
    outcome: dict[str, Any]
    (outcome,) = ranks.run(1, go_on, None, directory / "epoch=0.ckpt")
    return outcome


def assert_equal(by_rank: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    assert_equal_weights(by_rank[0]["weights"], expected["weights"])
    states: dict[Any, Any] = {}
    for outcome in by_rank:
        states |= outcome["state"]["state"]
        for part in expected.keys() - {"weights", "state"}:
            torch.testing.assert_close(outcome[part], expected[part], rtol=0, atol=1e-10)
    state = {**by_rank[0]["state"], "state": states}
    torch.testing.assert_close(state, expected["state"], rtol=0, atol=1e-10)


def test_other_layouts_go_on_from_a_directory(
    ranks: Ranks, saved: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    """Two ranks, which write files, and three, which write directories and read a file as well."""
    file, directory = tmp_path / "file.ckpt", tmp_path / "directory.ckpt"

    two = ranks.run(2, go_on, TWO, saved / "epoch=0.ckpt", file)
    three = ranks.run(3, go_on, THREE, saved / "epoch=0.ckpt", directory)

    for outcomes in (two, three):
        assert_equal(outcomes, expected)
    for rank in ranks.run(3, steps_of, THREE, [file, directory, saved / "step=5.ckpt"]):
        assert rank == [9, 9, 9]


def steps_of(pipeline: Options, paths: list[Path]) -> list[int]:
    return [go_on(pipeline, path)["step"] for path in paths]


def test_an_ordinary_file_of_a_directory(
    ranks: Ranks, saved: Path, expected: dict[str, Any]
) -> None:
    file = consolidate(saved / "epoch=0.ckpt")

    loaded = Trained.load_from_checkpoint(file)  # which reads it as float32
    assert loaded.hparams["dropout"] == 0.0
    in_file = torch.load(file, weights_only=True)["state_dict"]
    assert {n: t.float() for n, t in in_file.items()}.keys() == loaded.state_dict().keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, in_file[name].float())
    assert_equal(ranks.run(1, go_on, None, file), expected)
    assert_equal(ranks.run(2, go_on, TWO, file), expected)


def test_each_rank_writes_its_own_part_once(saved: Path) -> None:
    """So no tensor travels, and what is outside of the layers is written by one rank."""
    metadata = FileSystemReader(saved / "epoch=0.ckpt").read_metadata()
    writers = {index.fqn: stored.relative_path for index, stored in metadata.storage_data.items()}
    assert len(writers) == len(metadata.storage_data)
    layers = [0, 0, 1, 1, 2, 2, 3, 3]  # of four ranks, by the partition
    for name in Trained().state_dict():
        rank = layers[int(name.split(".")[1])] if name.startswith("model.") else 0
        for entry in (f"model.{name}", f"optimizer_0.state.{name}.exp_avg"):
            assert writers[entry] == f"__{rank}_0.distcp", entry


class Leaky(Trained):
    """Puts weights where a directory cannot hold them."""

    def __init__(self, entry: str) -> None:
        super().__init__()
        self.entry = entry

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        held = tuple(self.model.parameters())
        entries = {"numbers": dict(enumerate(held)), "tuple": held, "model": 1}
        checkpoint["model" if self.entry == "model" else "mine"] = entries[self.entry]


def refused(directory: Path) -> list[str]:
    errors = []
    plugins: list[CheckpointIO] = [TorchCheckpointIO(), AsyncCheckpointIO()]
    for plugin in plugins:
        run = trainer({"save_distributed_checkpoint": True}, plugins=[plugin])
        with pytest.raises(MisconfigurationException, match=f"with {type(plugin).__name__}: a "):
            run.fit(Trained(), loader())
    for entry in ("numbers", "tuple", "model"):
        run = trainer({"save_distributed_checkpoint": True}, max_epochs=1)
        run.fit(Leaky(entry), loader())
        with pytest.raises(CheckpointError) as caught:
            run.save_checkpoint(directory / "x.ckpt")
        errors.append(str(caught.value))
    for path, options in ((directory / "x.ckpt", "some"), ("memory://x.ckpt", None)):
        with pytest.raises(MisconfigurationException, match="directories are written to disks"):
            run.save_checkpoint(path, storage_options=options)
    (directory / "empty").mkdir(exist_ok=True)
    with pytest.raises(FileNotFoundError, match="is a directory without a checkpoint in it"):
        run.fit(Trained(), loader(), ckpt_path=directory / "empty")
    return errors


def test_what_a_directory_cannot_hold(ranks: Ranks, tmp_path: Path) -> None:
    for numbers, in_a_tuple, name in ranks.run(2, refused, tmp_path):
        assert "the key 0 of mine is no string" in numbers
        assert "mine is a tuple with weights of several ranks" in in_a_tuple
        assert "'model' is a name of the directory itself" in name
    assert [*tmp_path.iterdir()] == [tmp_path / "empty"]


class Keeping(torch.optim.AdamW):
    """Keeps what is no state of a parameter under keys of its own, from the beginning."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        own: dict[Any, Any] = self.state
        own |= {"text": "some", "nothing": None}
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {}  # as Adagrad


class Kept(Classifier):
    def configure_optimizers(self) -> Any:
        return Keeping(self.parameters(), lr=1e-2)


def save_what_is_kept(pipeline: Options | None, path: Path) -> dict[str, Any]:
    """Save after an epoch, go on from there, and give the optimizer's state."""
    L.seed_everything(6, verbose=False)
    run = trainer(pipeline, max_epochs=1)
    run.fit(Kept().double(), loader())
    run.save_checkpoint(path)
    again = trainer(pipeline, max_epochs=2)
    again.fit(Kept().double(), loader(), ckpt_path=path)
    state: dict[str, Any] = again.optimizers[0].state_dict()
    return state


@pytest.mark.parametrize("sharded", [False, True], ids=["file", "directory"])
def test_an_optimizer_that_keeps_more_than_states_of_parameters(
    ranks: Ranks, tmp_path: Path, sharded: bool
) -> None:
    (expected,) = ranks.run(1, save_what_is_kept, None, tmp_path / "one.ckpt")

    pipeline = {"save_distributed_checkpoint": sharded}
    by_rank = ranks.run(2, save_what_is_kept, pipeline, tmp_path / "many.ckpt")

    for state in by_rank:
        assert state["state"].pop("text") == "some"
        assert state["state"].pop("nothing") is None
    states = {**by_rank[0]["state"], **by_rank[1]["state"]}
    expected["state"] = {k: v for k, v in expected["state"].items() if isinstance(k, int)}
    torch.testing.assert_close(states, expected["state"], rtol=0, atol=1e-10)
    assert len(by_rank[0]["state"]) < len(states)  # no states of absent parameters


def replace_one_by_the_other(path: Path) -> list[bool]:
    """A file takes the place of a directory, and the other way round."""
    kinds = []
    for sharded in (True, False, True, True):
        run = trainer({"save_distributed_checkpoint": sharded}, max_epochs=1)
        run.fit(Trained(), loader())
        run.save_checkpoint(path)
        kinds.append(path.is_dir())
        assert trainer({}).test(Trained(), loader(), ckpt_path=path, verbose=False)
    return kinds


def test_files_and_directories_take_each_others_place(ranks: Ranks, tmp_path: Path) -> None:
    for kinds in ranks.run(2, replace_one_by_the_other, tmp_path / "x.ckpt"):
        assert kinds == [True, False, True, True]
    assert [*tmp_path.iterdir()] == [tmp_path / "x.ckpt"]
