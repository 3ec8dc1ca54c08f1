"""One ordinary checkpoint file, exact continuation, and a module that outlives its pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
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


def train_and_resume(directory: Path, pipeline: Options) -> list[list[dict[str, Any]]]:
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


def save_after_fit(pipeline: Options | None, directory: Path) -> None:
    L.seed_everything(6, verbose=False)
    run = trainer(pipeline)
    run.fit(Classifier(), loader())
    run.save_checkpoint(directory / "final.ckpt")


def test_a_file_saved_after_fit(ranks: Ranks, tmp_path: Path) -> None:
    """The pipeline is gone by then, but each rank still has its part of the optimizer's state."""
    save_after_fit(None, tmp_path / "one")

    ranks.run(2, save_after_fit, {}, tmp_path / "many")

    one, many = (
        torch.load(tmp_path / n / "final.ckpt", weights_only=False) for n in ("one", "many")
    )
    for part in ("state_dict", "optimizer_states"):
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
