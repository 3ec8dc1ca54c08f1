"""One ordinary checkpoint file, exact continuation, and a module that outlives its pipeline."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn

from .lit import WIDTH, Classifier, Options, assert_equal_weights, loader, trainer, weights
from .ranks import Ranks


class Scheduled(Classifier):
    """Has all that training changes: parameters, optimizer, scheduler, buffers of both kinds."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.model.insert(3, Counted(WIDTH))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Counted(nn.BatchNorm1d):
    """Counts its calls in a buffer that no checkpoint has."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def train(pipeline: Options | None, directory: Path, options: Options) -> dict[str, Tensor]:
    L.seed_everything(6, verbose=False)
    module = Scheduled()
    run = trainer(pipeline, default_root_dir=directory, **options)
    run.fit(module, loader())
    return weights(module)


def test_the_file_is_an_ordinary_one(ranks: Ranks, tmp_path: Path) -> None:
    """Written by default, in one place, with what one device would write, and read by one."""
    by_default = {"logger": True, "enable_checkpointing": True}
    expected = train(None, tmp_path / "one", by_default)

    # Whole batches, since batch normalization would see the micro-batches.
    pipeline = {"num_microbatches": 1, "partition": "uniform"}
    trained = ranks.run(4, train, pipeline, tmp_path / "many", by_default)[0]

    (one,), (many,) = ([*(tmp_path / name).rglob("*.ckpt")] for name in ("one", "many"))
    assert many.relative_to(tmp_path / "many") == one.relative_to(tmp_path / "one")
    checkpoint, by_one = (torch.load(path, weights_only=False) for path in (many, one))
    assert checkpoint.keys() == by_one.keys()
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        torch.testing.assert_close(checkpoint[part], by_one[part], rtol=0, atol=1e-10)
    loaded = Scheduled.load_from_checkpoint(many).state_dict()
    assert_equal_weights(loaded, Scheduled.load_from_checkpoint(one).state_dict())
    # After fit, rank 0 has the layers of all ranks, with buffers that no file has.
    assert_equal_weights(trained, expected)


def train_and_resume(directory: Path, pipeline: Options) -> list[dict[str, dict[str, Any]]]:
    """Train four epochs, then the last two again from a file; return what came out of each."""
    outcomes = []
    for resumes in (False, True):
        L.seed_everything(6, verbose=False)
        # Lightning loads before it converts to the Trainer's precision, and would round to float32.
        module = Scheduled(dropout=0.5).double()
        save = [] if resumes else [ModelCheckpoint(directory, "{epoch}", save_top_k=-1)]
        run = trainer(pipeline, max_epochs=4, callbacks=save, enable_checkpointing=not resumes)
        if resumes:
            for parameter in module.parameters():
                nn.init.zeros_(parameter)  # what it needs is in the file
        run.fit(module, loader(40), ckpt_path=directory / "epoch=1.ckpt" if resumes else None)
        parts = {"weights": module.state_dict(), "optimizer": run.optimizers[0].state_dict()}
        parts["scheduler"] = run.lr_scheduler_configs[0].scheduler.state_dict()
        outcomes.append({name: dict(part) for name, part in parts.items()})
    return outcomes


@pytest.mark.parametrize(
    ("size", "pipeline"),
    [
        (2, {"num_microbatches": 4}),
        (2, {"schedule": "interleaved", "stages_per_rank": 2, "num_microbatches": 4}),
    ],
    ids=["1f1b", "interleaved"],
)
def test_a_resumed_run_ends_as_if_never_stopped(
    ranks: Ranks, tmp_path: Path, size: int, pipeline: Options
) -> None:
    """To the last bit, on every rank, with dropout: its streams are named by the batch's number."""
    results = ranks.run(size, train_and_resume, tmp_path, pipeline)

    for uninterrupted, resumed in results:
        for part, expected in uninterrupted.items():
            torch.testing.assert_close(resumed[part], expected, rtol=0, atol=0)


class Nesting(Classifier):
    """Adds weights of first and last layer to its checkpoints, in containers of its own."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        first, last = (self.get_parameter(f"model.{index}.weight") for index in (0, 7))
        checkpoint["ends"] = {"pair": (first.data, [last.data]), "count": 2}


def save_after_fit(pipeline: Options | None, directory: Path) -> None:
    L.seed_everything(6, verbose=False)
    run = trainer(pipeline)
    run.fit(Nesting(), loader())
    run.save_checkpoint(directory / "final.ckpt")


def test_a_file_saved_after_fit(ranks: Ranks, tmp_path: Path) -> None:
    """The pipeline is gone by then, but each rank still has its part of the optimizer's state."""
    save_after_fit(None, tmp_path / "one")

    ranks.run(2, save_after_fit, {}, tmp_path / "many")

    one, many = (
        torch.load(tmp_path / n / "final.ckpt", weights_only=False) for n in ("one", "many")
    )
    for part in ("state_dict", "optimizer_states", "ends"):
        torch.testing.assert_close(many[part], one[part], rtol=0, atol=1e-10)


def train_again_and_again(pipelines: list[Options | None]) -> tuple[dict[str, Tensor], Any]:
    """Train one module with one Trainer after the other, then test it; one epoch each."""
    L.seed_everything(8, verbose=False)
    module = Evaluated()
    for pipeline in pipelines:
        run = trainer(pipeline, max_epochs=1)
        run.fit(module, loader())
    run.fit_loop.max_epochs = 2
    run.fit(module, loader())  # the same Trainer goes on
    tested = run.test(module, loader(seed=1), verbose=False)
    return weights(module), tested


class Evaluated(Classifier):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))


def test_one_module_in_several_pipelines(ranks: Ranks) -> None:
    """Each starts from what the last one left, wherever the layers were."""
    several = [
        {"partition": [3, 5]},
        {"partition": [5, 3]},
        {"schedule": "interleaved", "stages_per_rank": 2},
        {"schedule": "gpipe", "num_microbatches": 3},
    ]
    expected_weights, expected_test = train_again_and_again([None] * len(several))

    results = ranks.run(2, train_again_and_again, several)

    assert_equal_weights(results[0][0], expected_weights)
    for _, tested in results:
        torch.testing.assert_close(tested, expected_test, rtol=0, atol=1e-10)


class Logged(Scheduled):
    """Batch normalization sees whole batches; logs what checkpoints are chosen by."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))


def choose_checkpoints(pipeline: Options | None, directory: Path) -> dict[str, Any]:
    """Train, test the best, go on from the last; give what was kept and what came out."""
    L.seed_everything(2, verbose=False)
    module = Logged().double()
    best = ModelCheckpoint(
        directory,
        "{step}-{val_loss:.3f}",
        monitor="val_loss",
        every_n_train_steps=2,
        save_top_k=2,
        save_last=True,
    )
    weights_only = ModelCheckpoint(directory, "weights-{epoch}", save_weights_only=True)
    options: Options = {"enable_checkpointing": True, "val_check_interval": 2, "max_epochs": 3}
    run = trainer(pipeline, callbacks=[best, weights_only], **options)
    run.fit(module, loader(), loader(9, seed=1))
    kept = {Path(path).name: float(score) for path, score in best.best_k_models.items()}
    name = Path(best.best_model_path).name
    tested = run.test(module, loader(20, seed=2), ckpt_path="best", verbose=False)
    run.fit_loop.max_epochs = 4
    run.fit(module, loader(), loader(9, seed=1), ckpt_path="last")
    with pytest.raises(KeyError, match="contains only the model"):
        trainer(pipeline).fit(Logged(), loader(), ckpt_path=directory / "weights-epoch=2.ckpt")
    outcome = {"kept": kept, "best": name, "tested": tested, "step": run.global_step}
    return {**outcome, "weights": weights(module)}


@pytest.mark.parametrize("sharded", [False, True], ids=["file", "directory"])
def test_checkpoints_that_callbacks_choose(ranks: Ranks, tmp_path: Path, sharded: bool) -> None:
    """The same are written, kept and removed as on one device, and found again by name."""
    (expected,) = ranks.run(1, choose_checkpoints, None, tmp_path / "one")

    pipeline = {"num_microbatches": 1, "save_distributed_checkpoint": sharded}
    results = ranks.run(2, choose_checkpoints, pipeline, tmp_path / "many")

    one, many = (sorted(p.name for p in (tmp_path / n).iterdir()) for n in ("one", "many"))
    assert many == one
    assert len(expected["kept"]) == 2
    assert all((tmp_path / "many" / name).is_dir() == sharded for name in many)
    assert_equal_weights(results[0]["weights"], expected["weights"])
    for result in results:
        assert result["step"] == expected["step"] == 12
        assert result["best"] == expected["best"]
        assert result["kept"] == pytest.approx(expected["kept"], rel=0, abs=1e-10)
        torch.testing.assert_close(result["tested"], expected["tested"], rtol=0, atol=1e-10)
    if not sharded:
        path = tmp_path / "many" / "weights-epoch=2.ckpt"
        checkpoint = torch.load(path, weights_only=True)
        by_one = torch.load(tmp_path / "one" / path.name, weights_only=True)
        assert checkpoint.keys() == by_one.keys()  # no optimizer, no callbacks
        assert_equal_weights(checkpoint["state_dict"], by_one["state_dict"])


class Large(Classifier):
    """Four layers of 2 MB, and as much again twice for AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(6, 512), *(nn.Linear(512, 512) for _ in range(4)), nn.Linear(512, 3)
        )


class Looks(Callback):
    """How much of the file is in memory when all is loaded; then the file is lost."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.mapped = 0

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self.mapped = resident(self._path)  # the weights have been copied

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            os.truncate(self._path, 0)
        trainer.strategy.barrier()


def resident(path: Path) -> int:
    """Bytes of a mapped file that this process has looked at."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    found = 0
    for index, line in enumerate(lines):
        if line.endswith(str(path)):
            size = next(text for text in lines[index:] if text.startswith("Rss:"))
            found += 1024 * int(size.split()[1])
    return found


def resume_from_a_file_that_is_lost(path: Path) -> tuple[int, int]:
    run = trainer({"partition": [1, 1, 1, 3]}, max_epochs=1)
    run.fit(Large().double(), loader())
    run.save_checkpoint(path)
    looks = Looks(path)
    again = trainer({"partition": [3, 1, 1, 1]}, max_epochs=2, callbacks=[looks])
    again.fit(Large().double(), loader(), ckpt_path=path)
    return looks.mapped, again.global_step


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="it tells what is mapped")
def test_a_rank_reads_its_part_of_a_file_and_keeps_none_of_it(ranks: Ranks, tmp_path: Path) -> None:
    """What the rank does not own is never read, and a view of the file would kill it here."""
    results = ranks.run(4, resume_from_a_file_that_is_lost, tmp_path / "large.ckpt")

    layer = 512 * 512 * 8
    for rank, (mapped, step) in enumerate(results):
        assert step == 6
        assert mapped < (2.5 if rank == 0 else 1.5) * layer  # of 12 in the file
    assert results[0][0] > 1.9 * layer  # else it is not looked at rightly
