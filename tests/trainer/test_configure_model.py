"""Layers that are built in `configure_model` exist on the rank that owns them, and nowhere else."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .lit import (
    CLASSES,
    FEATURES,
    WIDTH,
    Classifier,
    Options,
    assert_equal_weights,
    loader,
    numbers,
    trainer,
    weights,
)
from .ranks import Ranks
from .test_memory import Large, resident_mb

NUM_RANKS, NUM_LAYERS, LARGE_WIDTH = 4, 8, 1448
LAYER_MB = LARGE_WIDTH * LARGE_WIDTH * 4 / 2**20  # 8 MB in float32, 64 MB together


class Scaled(nn.Module):
    """Has a buffer that no checkpoint has, and a tensor that is neither buffer nor parameter."""

    factor: Tensor

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.register_buffer("factor", torch.full((WIDTH,), factor), persistent=False)
        self.shift = torch.linspace(-factor, factor, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor + self.shift


class Built(Classifier):
    """Builds all that it has in the hook, and starts it by a rule of its own."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        self.first: dict[str, Tensor] = {}

    def configure_model(self) -> None:
        if hasattr(self, "model"):  # in a second run
            return
        with torch.device("meta"):
            first = nn.Linear(FEATURES, WIDTH)
        first.to_empty(device="cpu").reset_parameters()
        rates = [rate.item() for rate in torch.linspace(0.5, 1.5, 3)]
        self.model = nn.Sequential(
            first,
            Scaled(rates[0]),
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
            Scaled(rates[2]),
            nn.BatchNorm1d(WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, CLASSES),
        )
        self.temperature = nn.Parameter(torch.rand(()))
        self.before = nn.Linear(FEATURES, FEATURES)
        self.model.apply(self._start)
        layer: Any = self.model[5]
        with torch.no_grad():
            layer.weight.mul_(rates[1] + torch.rand(()).item())
        self.shuffles = torch.randint(2, (3,)).tolist()

    def _start(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight)
            nn.init.trunc_normal_(module.bias, std=0.1)

    def on_fit_start(self) -> None:
        self.first = weights(self)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.model(self.before(x)) * self.temperature, y)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))


def together(by_rank: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The weights of all ranks: each is on one of them, or on all and equal."""
    whole = {}
    for name in by_rank[0]:
        there = [weights[name] for weights in by_rank if not weights[name].is_meta]
        assert len(there) in (1, len(by_rank)), name
        for other in there[1:]:
            torch.testing.assert_close(other, there[0], rtol=0, atol=0)
        whole[name] = there[0]
    return whole


def run_after_run(pipelines: list[Options | None]) -> dict[str, Any]:
    L.seed_everything(7, verbose=False)
    module = Built()
    after = []
    for pipeline in pipelines:
        run = trainer(pipeline, max_epochs=1)
        run.fit(module, loader())
        after.append(weights(module))
    (tested,) = run.test(module, loader(seed=1), verbose=False)
    drawn = torch.rand(3)
    outcome = {"first": module.first if len(after) == 1 else None, "after": after}
    return {**outcome, "tested": numbers(tested), "drawn": drawn, "shuffles": module.shuffles}


@pytest.mark.parametrize("size", [1, 3])
def test_training_equals_one_device(ranks: Ranks, size: int) -> None:
    """Bit for bit at the start; the generator is then where it would be on one device."""
    expected = run_after_run([None])

    results = ranks.run(size, run_after_run, [{"num_microbatches": 1, "module": "model"}])

    first = together([result["first"] for result in results])
    assert list(first) == list(expected["first"])
    for name, tensor in expected["first"].items():
        torch.testing.assert_close(first[name], tensor, rtol=0, atol=0)
    for result in results:
        assert result["shuffles"] == expected["shuffles"]
        assert result["tested"] == pytest.approx(expected["tested"], abs=1e-10)
        torch.testing.assert_close(result["drawn"], expected["drawn"], rtol=0, atol=0)
    assert_equal_weights(together([result["after"][0] for result in results]), expected["after"][0])


def test_later_runs_find_the_layers_where_they_are(ranks: Ranks) -> None:
    """No rank ever gets the whole model, rank 0 neither."""
    several: list[Options | None] = [
        {"num_microbatches": 1, "module": "model", **options}
        for options in ({"partition": [2, 5]}, {"partition": [5, 2]}, {"schedule": "gpipe"})
    ]
    expected = run_after_run([None] * len(several))

    results = ranks.run(2, run_after_run, several)

    for index, whole in enumerate(expected["after"]):
        by_rank = [result["after"][index] for result in results]
        assert all(any(tensor.is_meta for tensor in mine.values()) for mine in by_rank)
        assert_equal_weights(together(by_rank), whole)
    for result in results:
        assert result["tested"] == pytest.approx(expected["tested"], abs=1e-10)


def train_and_resume(pipeline: Options | None, directory: Path, resumes: bool) -> Any:
    L.seed_everything(8 if resumes else 7, verbose=False)
    run = trainer(pipeline, max_epochs=4 if resumes else 2)
    module = Built()
    run.fit(module, loader(), ckpt_path=directory / "saved.ckpt" if resumes else None)
    if not resumes:
        run.save_checkpoint(directory / "saved.ckpt")
    return weights(module)


def test_a_checkpoint_is_loaded_into_layers_that_exist(ranks: Ranks, tmp_path: Path) -> None:
    train_and_resume(None, tmp_path, resumes=False)
    expected = train_and_resume(None, tmp_path, resumes=True)

    pipeline = {"num_microbatches": 1, "module": "model"}
    resumed = together(ranks.run(3, train_and_resume, pipeline, tmp_path, True))
    assert_equal_weights(resumed, expected)

    ranks.run(2, train_and_resume, pipeline, tmp_path, False)  # a pipeline's own file
    assert_equal_weights(train_and_resume(None, tmp_path, resumes=True), expected)


class LargeBuilt(Large):
    def __init__(self) -> None:
        L.LightningModule.__init__(self)

    def configure_model(self) -> None:
        layers = [nn.Linear(LARGE_WIDTH, LARGE_WIDTH) for _ in range(NUM_LAYERS // 2)]
        with torch.device("meta"):
            others = [nn.Linear(LARGE_WIDTH, LARGE_WIDTH) for _ in range(NUM_LAYERS // 2)]
        for layer in others:
            layer.to_empty(device="cpu").reset_parameters()
        self.model = nn.Sequential(*layers, *others)


def peaks_mb(file: Path) -> tuple[float, float]:
    """How much memory a rank takes at most, when it builds its layers, and when it loads them."""
    peaks = []
    run_after_run([{"num_microbatches": 1, "module": "model"}])  # what a first run imports
    for ckpt_path in (None, file):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what earlier tests have left
        before = resident_mb()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        module = LargeBuilt()
        trainer({}, precision="32-true").predict(module, loader(), ckpt_path=ckpt_path)
        peaks.append(peak_mb() - before)
    return peaks[0], peaks[1]


def peak_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**10


def save(file: Path) -> None:
    module = LargeBuilt()
    module.configure_model()
    run = trainer(None, precision="32-true")
    run.strategy.connect(module)
    run.save_checkpoint(file, weights_only=True)


def test_no_rank_ever_holds_more_than_its_share(ranks: Ranks, tmp_path: Path) -> None:
    save(tmp_path / "large.ckpt")
    share_mb = NUM_LAYERS / NUM_RANKS * LAYER_MB

    for built_mb, loaded_mb in ranks.run(NUM_RANKS, peaks_mb, tmp_path / "large.ckpt"):
        # One tensor is drawn at a time.
        assert share_mb < built_mb < share_mb + LAYER_MB + 10
        # What a rank reads of the file is mapped, and counts as long as nobody needs the memory.
        assert share_mb < loaded_mb < 2 * share_mb + 10


def init_ordinarily() -> tuple[bool, Any]:
    run = trainer({})
    with run.init_module():
        layer = nn.Linear(2, 2)
    return layer.weight.is_meta, layer.weight.dtype


def test_init_module_is_as_with_any_strategy(ranks: Ranks) -> None:
    assert ranks.run(1, init_ordinarily) == [(False, torch.float64)]
