"""Every optimizer trains as on one device, and goes on from a checkpoint in another layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from .lit import CLASSES, FEATURES, WIDTH, Classifier, Options, loader, trainer
from .ranks import Ranks


class Optimized(Classifier):
    """Takes any optimizer."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.name](self)


class Matrices(Optimized):
    """Has parameters of two dimensions only, as Muon wants them."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        del self.log_temperature
        self.model = nn.Sequential(
            nn.Linear(FEATURES, WIDTH, bias=False),
            nn.Tanh(),
            nn.Linear(WIDTH, WIDTH, bias=False),
            nn.Tanh(),
            nn.Linear(WIDTH, WIDTH, bias=False),
            nn.Linear(WIDTH, CLASSES, bias=False),
        )
        self.register_buffer("log_temperature", torch.zeros(()))


class Gate(nn.Module):
    """A parameter that gets no gradient in the first epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("open", torch.zeros((), dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if self.open else x


class Lazy(Optimized):
    """Opens its gate in the second epoch: there is no state for its parameters before."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.model.insert(3, Gate())

    def on_train_epoch_start(self) -> None:
        gate: Any = self.model[3]
        gate.open.fill_(self.current_epoch >= 1)


def named_groups(module: L.LightningModule) -> torch.optim.Optimizer:
    decayed = [(n, p) for n, p in module.named_parameters() if p.ndim > 1]
    others = [(n, p) for n, p in module.named_parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 2e-2}]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0)


class Unusual(torch.optim.SGD):
    """Has states that are no tensors, and lists with both."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
                    state["last"] = [parameter.grad.clone(), "gradient"]
                    parameter -= 1e-3 * state["count"] * state["last"][0]
        return loss


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
    "adamw-amsgrad-tensor-lr": lambda m: torch.optim.AdamW(
        m.parameters(), lr=torch.tensor(1e-2), amsgrad=True
    ),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "sgd-momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1, initial_accumulator_value=0.1),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-2, momentum=0.5, centered=True),
    "named": lambda m: torch.optim.AdamW(list(m.named_parameters()), lr=1e-2),
    "named-groups": named_groups,
    "muon": lambda m: torch.optim.Muon(m.parameters(), lr=1e-2),
    "lazy": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
    "unusual": lambda m: Unusual(m.parameters(), lr=0.05, momentum=0.9),
}
CASES = {"muon": Matrices, "lazy": Lazy}


def fit(
    pipeline: Options | None, name: str, ckpt_path: Path | None = None, save: Path | None = None
) -> tuple[dict[str, Tensor], Any]:
    L.seed_everything(4, verbose=False)
    module = CASES.get(name, Optimized)(name).double()
    callbacks = []
    if save is not None:
        callbacks = [ModelCheckpoint(save, f"{name}-{{epoch}}", save_top_k=-1)]
    run = trainer(pipeline, max_epochs=3, callbacks=callbacks, enable_checkpointing=bool(callbacks))
    run.fit(module, loader(15, 8), ckpt_path=ckpt_path)
    return dict(module.state_dict()), run.optimizers[0].state_dict()


def fit_each(
    pipeline: Options | None, names: list[str], directory: Path, after: int | None = None
) -> dict[str, Any]:
    """Train with each optimizer, from the start (and save) or after an epoch."""
    if after is None:
        return {name: fit(pipeline, name, save=directory) for name in names}
    return {
        name: fit(pipeline, name, ckpt_path=directory / f"{name}-epoch={after}.ckpt")
        for name in names
    }


THREE = {"num_microbatches": 3, "partition": "uniform"}
TWO = {"schedule": "interleaved", "stages_per_rank": 2, "num_microbatches": 4}


@pytest.fixture(scope="module")
def one_device(
    ranks: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """The checkpoints of one device, and what it trains to."""
    directory = tmp_path_factory.mktemp("one")
    (outcomes,) = ranks.run(1, fit_each, None, list(OPTIMIZERS), directory, timeout=60)
    return directory, outcomes


def assert_equal(by_rank: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for name, outcome in by_rank[0].items():
        weights, optimizer = outcome
        states: dict[Any, Any] = {}
        for other in reversed(by_rank):
            states |= other[name][1]["state"]
        expected_weights, expected_optimizer = expected[name]
        assert_close(weights, expected_weights)
        assert_close({**optimizer, "state": states}, expected_optimizer)


def assert_close(actual: Any, expected: Any) -> None:
    """Equal, with tensors to 1e-10."""
    assert type(actual) is type(expected)
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key in expected:
            assert_close(actual[key], expected[key])
    elif isinstance(expected, list):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_close(one, other)
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
    else:
        assert actual == expected


@pytest.mark.parametrize(
    ("sharded", "names"),
    [(False, list(OPTIMIZERS)), (True, ["adagrad", "lazy", "muon", "named-groups", "unusual"])],
    ids=["file", "directory"],
)
def test_every_optimizer_goes_on_in_another_layout(
    ranks: Ranks,
    one_device: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    sharded: bool,
    names: list[str],
) -> None:
    """Trained on three ranks, and on two from the end of the first epoch."""
    three = {**THREE, "save_distributed_checkpoint": sharded}
    _, expected = one_device
    assert_equal(ranks.run(3, fit_each, three, names, tmp_path, timeout=90), expected)

    assert_equal(ranks.run(2, fit_each, TWO, names, tmp_path, 0, timeout=90), expected)


def test_a_pipeline_goes_on_from_one_device(
    ranks: Ranks, one_device: tuple[Path, dict[str, Any]]
) -> None:
    directory, expected = one_device

    resumed = ranks.run(2, fit_each, TWO, list(OPTIMIZERS), directory, 1, timeout=90)

    assert_equal(resumed, expected)
