"""16-bit floats with a loss scale that all stages share.

Lightning takes ``precision="16-mixed"`` for bfloat16 on a CPU, so the plugin is given. A
kernel's sum in 16 bits depends on where its memory lies, so weights agree to `ROUNDING`; an update
that is made or left out changes them by the learning rate, twenty times as much.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from .lit import WIDTH, Classifier, Options, loader, trainer, weights
from .ranks import Ranks

OVERFLOWS = 1, 2, 4  # batches
SCALE = 2.0**10
ROUNDING = 5e-4


class Overflow(nn.Module):
    """Passes its input on; the gradient of some batches overflows here, and nowhere before."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.overflows = False

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias.clone()
        if bias.requires_grad and self.overflows:
            bias.register_hook(lambda gradient: gradient * float("inf"))
        return x + bias


class Overflowing(Classifier):
    """One of its layers overflows, early or late. It notes the scale, and dtypes."""

    def __init__(self, last: bool = False) -> None:
        super().__init__()
        self.model.insert(6 if last else 1, Overflow())
        self.scales: list[float] = []
        self.dtypes: set[torch.dtype] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for layer in self.model:
            if isinstance(layer, Overflow):
                layer.overflows = self.global_step in OVERFLOWS
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.dtypes |= {p.grad.dtype for p in self.parameters() if p.grad is not None}


def plugin(**options: Any) -> MixedPrecision:
    scaler = torch.amp.GradScaler("cpu", SCALE, growth_interval=3, **options)
    return MixedPrecision("16-mixed", "cpu", scaler=scaler)


def fit(pipeline: Options | None, last: bool, options: Options) -> Any:
    L.seed_everything(2, verbose=False)
    module, precision = Overflowing(last), plugin()
    own = precision.scaler
    run = trainer(pipeline, precision=None, plugins=[precision], max_epochs=4, **options)
    run.fit(module, loader())
    assert run.precision_plugin.scaler is own  # the user's is back
    assert own.get_scale() == module.scales[-1]
    return weights(module), module.scales, module.dtypes, run.optimizers[0].state_dict()["state"]


@pytest.mark.parametrize(
    ("size", "pipeline", "last", "options"),
    [
        (2, {"num_microbatches": 1}, False, {"gradient_clip_val": 0.05}),
        (2, {"num_microbatches": 1}, True, {"accumulate_grad_batches": 2}),
        (4, {"num_microbatches": 1, "partition": [1, 1, 1, 6]}, True, {}),  # the second has none
    ],
    ids=["first stage", "last stage", "stage without parameters"],
)
def test_all_stages_skip_the_same_updates(
    ranks: Ranks, size: int, pipeline: Options, last: bool, options: Options
) -> None:
    expected, scales, dtypes, state = fit(None, last, options)
    assert min(scales) < SCALE, "nothing overflowed"
    assert any(after > before for before, after in zip(scales, scales[1:], strict=False))

    results = ranks.run(size, fit, pipeline, last, options)

    torch.testing.assert_close(results[0][0], expected, rtol=0, atol=ROUNDING)
    steps = {float(values["step"]) for values in state.values()}
    for _, own_scales, own_dtypes, own_state in results:
        assert own_scales == scales
        assert own_dtypes <= dtypes == {torch.float32}
        assert {float(values["step"]) for values in own_state.values()} <= steps


class Descending(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)  # Adam would hide a wrong scale


def fit_plainly(pipeline: Options | None) -> dict[str, Tensor]:
    L.seed_everything(2, verbose=False)
    module = Descending()
    run = trainer(pipeline, precision=None, plugins=[plugin()], max_epochs=4)
    run.fit(module, loader())
    return weights(module)


@pytest.mark.parametrize(
    "pipeline",
    [
        {"num_microbatches": 4, "activation_checkpointing": "stage"},
        {"schedule": "interleaved", "stages_per_rank": 2, "num_microbatches": 4},
    ],
    ids=["1f1b", "interleaved"],
)
def test_micro_batches_are_scaled_once(ranks: Ranks, pipeline: Options) -> None:
    expected = fit_plainly(None)

    results = ranks.run(2, fit_plainly, pipeline)

    torch.testing.assert_close(results[0], expected, rtol=0, atol=5e-3)


def resume(pipeline: Options | None, directory: Path) -> tuple[dict[str, Tensor], list[float]]:
    L.seed_everything(2, verbose=False)
    module = Overflowing()
    save = ModelCheckpoint(directory, "{epoch}", save_top_k=-1)
    options: Options = {"callbacks": [save], "enable_checkpointing": True, "max_epochs": 2}
    trainer(pipeline, precision=None, plugins=[plugin()], **options).fit(module, loader())
    module = Overflowing()
    fresh = trainer(pipeline, precision=None, plugins=[plugin()], max_epochs=4)
    fresh.fit(module, loader(), ckpt_path=directory / "epoch=1.ckpt")
    return weights(module), module.scales


def test_the_scale_is_resumed(ranks: Ranks, tmp_path: Path) -> None:
    expected, scales = resume(None, tmp_path / "one")

    results = ranks.run(2, resume, {"num_microbatches": 1}, tmp_path / "many")

    torch.testing.assert_close(results[0][0], expected, rtol=0, atol=ROUNDING)
    assert [own for _, own in results] == [scales, scales]


class Fused(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


def refused(pipeline: Options, fused: bool) -> str:
    run = trainer(pipeline, precision=None, plugins=[plugin()])
    with pytest.raises(Exception) as caught:  # noqa: PT011
        run.fit(Fused() if fused else Classifier(), loader())
    return f"{caught.type.__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("pipeline", "fused", "says"),
    [
        ({"schedule": "pipedream"}, False, "16-mixed.*different times.*bf16-mixed.*1f1b"),
        ({}, True, "fused=True.*overflow.*fused=False"),
    ],
    ids=["asynchronous", "fused optimizer"],
)
def test_refusals(ranks: Ranks, pipeline: Options, fused: bool, says: str) -> None:
    for message in ranks.run(2, refused, pipeline, fused):
        assert message.startswith("MisconfigurationException")
        assert re.search(says, message), message
