"""Train in one layout and go on in another: every pair, from an epoch's end and from within one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F

from .lit import CLASSES, FEATURES, WIDTH, Options, loader, trainer
from .ranks import Ranks

# How many processes, and the arguments of PipelineStrategy; without them it is plain Lightning.
LAYOUTS: dict[str, tuple[int, Options | None]] = {
    "1f1b": (4, {"num_microbatches": 4, "partition": "uniform"}),
    "interleaved": (2, {"schedule": "interleaved", "stages_per_rank": 2, "num_microbatches": 2}),
    "zero_bubble": (2, {"schedule": "zero_bubble", "stages_per_rank": 2, "num_microbatches": 4}),
    "gpipe": (3, {"schedule": "gpipe", "num_microbatches": 3}),
    "pipedream": (2, {"schedule": "pipedream"}),
    "none": (1, None),
}
MIDDLE, END = "step=2.ckpt", "epoch=0.ckpt"  # of epochs of four batches
EPOCHS = 3


class Chain(L.LightningModule):
    """Seven layers that all have parameters, and logged values."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(5)]
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, WIDTH), *blocks, nn.Linear(WIDTH, CLASSES, bias=False)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.layers(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.layers(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Batches:
    """Goes on where a checkpoint left it; the last batch is short."""

    def __init__(self) -> None:
        self._all = list(loader(27, 8))
        self._given = self._start = 0

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Any]:
        self._given, self._start = self._start, 0
        for batch in self._all[self._given :]:
            self._given += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"given": self._given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._start = state["given"] % len(self._all)


class Seen(Callback):
    """Has a state of its own, and keeps what was loaded."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.loaded: dict[str, Any] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.loaded = trained(trainer, pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.losses.append(float(trainer.callback_metrics["val_loss"]))

    def state_dict(self) -> dict[str, Any]:
        return {"losses": torch.tensor(self.losses, dtype=torch.float64)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.losses = state_dict["losses"].tolist()


def trained(run: L.Trainer, module: L.LightningModule) -> dict[str, Any]:
    """Copies of this rank's weights and optimizer state, the latter by number of the parameter."""
    weights = {n: t.clone() for n, t in module.state_dict().items() if not t.is_meta}
    optimizer = run.optimizers[0].state_dict()
    state = {
        number: {name: value.clone() for name, value in values.items()}
        for number, values in optimizer["state"].items()
    }
    return {"weights": weights, "state": state, "groups": optimizer["param_groups"]}


def fit(
    pipeline: Options | None, directory: Path | None = None, ckpt_path: Path | None = None
) -> dict[str, Any]:
    """Train, from a checkpoint perhaps, and give all that came out on this rank."""
    L.seed_everything(1, verbose=False)
    module, seen = Chain().double(), Seen()
    stopping = EarlyStopping("val_loss", patience=EPOCHS)
    callbacks: list[Callback] = [seen]
    if directory is not None:
        within = ModelCheckpoint(directory, "{step}", every_n_train_steps=2, save_top_k=-1)
        at_ends = ModelCheckpoint(directory, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
        callbacks += [within, at_ends]
    if ckpt_path is not None:
        for parameter in module.parameters():
            nn.init.zeros_(parameter)  # what it needs is in the file
    run = trainer(
        pipeline,
        callbacks=[*callbacks, stopping],
        enable_checkpointing=directory is not None,
        max_epochs=EPOCHS,
    )
    run.fit(module, Batches(), loader(9, seed=1), ckpt_path=ckpt_path)
    return {
        **trained(run, module),
        "loaded": seen.loaded,
        "step": run.global_step,
        "epoch": run.current_epoch,
        "loops": run.fit_loop.state_dict(),
        "scheduler": run.lr_scheduler_configs[0].scheduler.state_dict(),
        "losses": seen.losses,
        "stopping": stopping.state_dict(),
    }


def resume(pipeline: Options | None, paths: list[Path]) -> list[dict[str, Any]]:
    return [fit(pipeline, ckpt_path=path) for path in paths]


def run_in(ranks: Ranks, layout: str, function: Any, *arguments: Any) -> list[Any]:
    """Run it in a layout; give what came out, by rank."""
    size, pipeline = LAYOUTS[layout]
    return ranks.run(size, function, pipeline, *arguments, timeout=60)


def put_together(by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """One outcome from those of all ranks, which agree in all but the parts that they own."""
    first = {**by_rank[0]}
    for part in ("weights", "state"):
        for other in by_rank[1:]:
            first[part] = {**other[part], **first[part]}
        first[part] = dict(sorted(first[part].items()))
    if "loaded" in first:
        first["loaded"] = put_together([outcome["loaded"] for outcome in by_rank])
    for other in by_rank[1:]:
        for part in first.keys() - {"weights", "state", "loaded"}:
            assert other[part] == first[part], part
    return first


@pytest.fixture(scope="module")
def uninterrupted(
    ranks: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, dict[str, Any]]]:
    """For each layout, the directory with its checkpoints, and what came out in the end."""
    outcomes = {}
    for layout in LAYOUTS:
        directory = tmp_path_factory.mktemp(layout)
        outcomes[layout] = directory, put_together(run_in(ranks, layout, fit, directory))
    return outcomes


def assert_equal(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    actual, expected = ({k: v for k, v in o.items() if k != "loaded"} for o in (actual, expected))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_go_on_from_every_layout(
    ranks: Ranks, uninterrupted: dict[str, tuple[Path, dict[str, Any]]], layout: str
) -> None:
    paths = [directory / name for directory, _ in uninterrupted.values() for name in (MIDDLE, END)]

    resumed = [*zip(*run_in(ranks, layout, resume, paths), strict=True)]

    _, expected = uninterrupted["none"]
    if layout != "pipedream":
        assert_equal(uninterrupted[layout][1], expected)
    for path, by_rank in zip(paths, resumed, strict=True):
        outcome, source = put_together([*by_rank]), path.parent.name
        saved = torch.load(path, weights_only=True)
        (optimizer,) = saved["optimizer_states"]
        torch.testing.assert_close(
            outcome["loaded"],
            {
                "weights": dict(sorted(saved["state_dict"].items())),
                "state": optimizer["state"],
                "groups": optimizer["param_groups"],
            },
            rtol=0,
            atol=0,
        )
        if "pipedream" not in (layout, source.rstrip("0")):
            assert_equal(outcome, expected)
        else:
            assert outcome["step"] == expected["step"]
            assert outcome["losses"][-1] < outcome["losses"][0]
