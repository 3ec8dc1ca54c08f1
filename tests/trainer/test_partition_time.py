"""``partition="time"`` and saved profiles: the same training as with the cut that they find."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_pipe.partition import LayerProfile, Profile, find_layers

from .lit import FEATURES, Classifier, Options, assert_equal_weights, loader, trainer, weights
from .ranks import Ranks


class Slow(nn.Module):
    """Has no parameters, and takes as long as all else."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02)
        return x


class Uneven(Classifier):
    """Its second half has all the parameters, its first half takes all the time."""

    def __init__(self, example: bool = False) -> None:
        super().__init__()
        self.model = nn.Sequential(*(Slow() for _ in range(4)), *self.model)
        if example:
            self.example_input_array = torch.zeros(3, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.model(x)
        return y

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])


class Meta(Uneven):
    """Builds its layers in `configure_model`."""

    def __init__(self) -> None:
        super().__init__()
        del self.model
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(4)
            self.model = nn.Sequential(*(Slow() for _ in range(4)), *Classifier().model)


def fit(
    make: Any, pipeline: Options | None, precision: Any = "64-true", **fit: Any
) -> tuple[dict[str, Tensor], list[int], Any]:
    """Weights, layers of each stage, and the example that the module has afterwards."""
    L.seed_everything(3, verbose=False)
    module = make()
    run = trainer(pipeline, precision=precision, max_epochs=1)
    data = loader(shuffle=True, generator=torch.Generator().manual_seed(5))
    run.fit(module, data, **fit)
    report = getattr(run.strategy, "report", None)
    counts = [stage.layers[2] for stage in report.stages] if report else []
    return weights(module), counts, getattr(module, "example_input_array", None)


def with_example() -> Uneven:
    return Uneven(example=True)


@pytest.mark.parametrize("make", [Uneven, with_example], ids=["first batch", "example"])
def test_layers_are_cut_by_time(ranks: Ranks, make: Any) -> None:
    """Two of the four slow layers for each stage; neither loader nor random numbers notice."""
    pipeline = {"num_microbatches": 2}
    expected, _, _ = fit(Uneven, None)

    results = ranks.run(2, fit, make, {**pipeline, "partition": "time"})

    assert [counts for _, counts, _ in results] == [[2, 10]] * 2
    assert_equal_weights(results[0][0], expected)
    for _, _, example in results:
        assert (example is None) == (make is Uneven)


@pytest.mark.parametrize(
    ("make", "precision"), [(Uneven, "bf16-mixed"), (Meta, "64-true"), (Meta, "bf16-true")]
)
def test_in_other_precisions_and_without_memory(ranks: Ranks, make: Any, precision: str) -> None:
    (_, counts, _), _ = ranks.run(2, fit, make, {"partition": "time"}, precision)
    assert counts == [2, 10]


def evaluate(pipeline: Options) -> list[Any]:
    module = Uneven()
    run = trainer(pipeline)
    return run.predict(module, loader(4)) or []


def test_in_evaluation_without_an_example_it_is_by_parameters(ranks: Ranks) -> None:
    results = ranks.run(2, evaluate, {"partition": "time"})
    assert [len(result) for result in results] == [1, 1]


def read_once(pipeline: Options) -> str:
    run = trainer(pipeline)
    with pytest.raises(MisconfigurationException) as caught:
        run.fit(Uneven(), iter([next(iter(loader()))]))
    return str(caught.value)


def test_data_that_can_be_read_once_are_refused(ranks: Ranks) -> None:
    (message,) = ranks.run(1, read_once, {"partition": "time"})
    assert "can be read only once" in message
    assert "example_input_array" in message


def save_profile(path: Path, seconds: list[float], prefix: str = "") -> str:
    names = [prefix + name for name in find_layers(Uneven()).names]
    named = zip(names, seconds, strict=False)
    layers = [LayerProfile(name, s, 2 * s, 0, 0, 0, 0, 0) for name, s in named]
    Profile(tuple(layers), 1, 0).save(path)
    return str(path)


def test_a_saved_profile(ranks: Ranks, tmp_path: Path) -> None:
    path = save_profile(tmp_path / "profile.json", [1.0] * 11 + [20.0])
    (_, counts, _), _ = ranks.run(2, fit, Uneven, {"partition": path})
    assert counts == [11, 1]


class WithSetup(Uneven):
    """Could build its layers in `setup`, so that what fails before is tried once more."""

    def setup(self, stage: str) -> None:
        pass


def fit_with(path: str, make: Any) -> str:
    with pytest.raises(MisconfigurationException) as caught:
        fit(make, {"partition": path})
    return str(caught.value)


@pytest.mark.parametrize(
    ("layers", "prefix", "says"),
    [
        (5, "", "the profile has 5 layers, the model 12"),
        (12, "other.", "it has a layer 'other.model.0' where this one has 'model.0'"),
    ],
)
@pytest.mark.parametrize("make", [Uneven, WithSetup])
def test_a_profile_of_another_model_is_refused(
    ranks: Ranks, tmp_path: Path, layers: int, prefix: str, says: str, make: Any
) -> None:
    path = save_profile(tmp_path / "profile.json", [1.0] * layers, prefix)
    for message in ranks.run(2, fit_with, path, make):
        assert says in message


def test_estimated_costs(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    Profile.estimated([20.0] + [1.0] * 11).save(path)
    (_, counts, _), _ = ranks.run(2, fit, Uneven, {"partition": str(path)})
    assert counts == [1, 11]
