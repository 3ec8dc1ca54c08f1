"""Replicas that divide states, gradients or parameters train to the weights of one device."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from trainer.lit import Options, assert_equal_weights, loader, trainer, weights
from trainer.ranks import Ranks
from trainer.test_loss_scaling import ROUNDING, Overflowing, plugin

from lightning_pipe.runtime.reduction import local_part

from .models import Dealt, Inside, Tied, fit

CLIPPED = {"gradient_clip_val": 0.05}
ACCUMULATED = {"accumulate_grad_batches": 2}


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("kind", "size", "pipeline", "options", "shares"),
    [
        (Dealt, 2, {"schedule": "1f1b"}, CLIPPED, (3, 1)),
        (Dealt, 4, {"schedule": "gpipe"}, ACCUMULATED, None),
        (Tied, 4, {"schedule": "interleaved", "stages_per_rank": 2}, CLIPPED, None),
    ],
)
def test_weights_equal_one_device(
    ranks: Ranks,
    kind: Any,
    size: int,
    pipeline: Options,
    options: Options,
    shares: Any,
    zero_stage: int,
) -> None:
    (expected,) = ranks.run(1, fit, kind, None, options)
    divided = {"data_parallel_size": 2, "zero_stage": zero_stage}
    whole, *_ = ranks.run(size, fit, kind, pipeline | divided, options, shares)
    assert_equal_weights(whole, expected)


@pytest.mark.parametrize(
    ("pipeline", "options"),
    [
        ({"schedule": "pipedream"}, CLIPPED),
        ({"schedule": "pipedream_2bw"}, {}),
        ({"schedule": "zero_bubble"}, CLIPPED),
    ],
)
def test_states_are_divided_under_schedules_that_keep_whole_weights(
    ranks: Ranks, pipeline: Options, options: Options
) -> None:
    expected, *_ = ranks.run(2, fit, Inside, pipeline, options)
    divided = pipeline | {"data_parallel_size": 2, "zero_stage": 1}
    whole, *_ = ranks.run(4, fit, Inside, divided, options)
    assert_equal_weights(whole, expected)


@pytest.mark.parametrize(
    ("checkpointing", "reshards"), [("none", True), ("stage", True), ("layer", False)]
)
def test_parameters_gathered_for_each_micro_batch(
    ranks: Ranks, checkpointing: str, reshards: bool
) -> None:
    (expected,) = ranks.run(1, fit, Dealt, None, CLIPPED)
    pipeline = {
        "data_parallel_size": 2,
        "zero_stage": 3,
        "reshard_after_forward": reshards,
        "activation_checkpointing": checkpointing,
    }
    whole, *_ = ranks.run(4, fit, Dealt, pipeline, CLIPPED)
    assert_equal_weights(whole, expected)


LEARNING_RATE = 1e-5  # too small for bfloat16, which rounds each update away


class Slow(Dealt):
    """Its updates are far below what a weight in 16 bits can hold."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE, weight_decay=0.0)


def fit_in_half_precision(pipeline: Options, path: str, load: bool) -> Any:
    """Train an epoch of two, or go on; by name the weights, and the optimizer's states."""
    L.seed_everything(3, verbose=False)
    module, found = Slow(), {}

    class Look(L.Callback):
        def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            state = trainer.optimizers[0].state
            for name, parameter in pl_module.named_parameters():
                if parameter in state:
                    values = {k: v.dtype for k, v in state[parameter].items()}
                    own = local_part(state[parameter]["master_weight"]).clone()
                    found[name] = local_part(parameter).detach().clone(), own, values

    saving = ModelCheckpoint(Path(path).parent, "half", save_on_train_epoch_end=True)
    options = {"enable_checkpointing": True, "callbacks": [Look(), saving]}
    run = trainer(
        pipeline,
        precision="bf16-true",
        max_epochs=2 if load else 1,
        use_distributed_sampler=False,
        **options,
    )
    run.fit(module, ckpt_path=path if load else None)
    return found


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_half_precision_is_updated_in_full_precision(
    ranks: Ranks, tmp_path: Path, zero_stage: int
) -> None:
    path = str(tmp_path / "half.ckpt")
    pipeline = {"data_parallel_size": 2, "zero_stage": zero_stage}
    first = ranks.run(4, fit_in_half_precision, pipeline, path, False)
    second = ranks.run(4, fit_in_half_precision, pipeline, path, True)
    for before, after in zip(first, second, strict=True):
        assert after
        for name, (weight, master, dtypes) in after.items():
            assert weight.dtype is torch.bfloat16
            assert torch.equal(weight, master.bfloat16()), name  # what the layers compute with
            assert {d for k, d in dtypes.items()} == {torch.float32}
            moved = (master - before[name][1]).abs().max() if master.numel() else torch.ones(())
            # 5 updates of Adam move a weight by at most their learning rates, and about that.
            assert 0 < moved <= 5.01 * LEARNING_RATE or zero_stage == 3, name
    owned = [set(found) for found in second]
    if zero_stage < 3:  # each state is on one replica
        assert not owned[0] & owned[1]
        assert not owned[2] & owned[3]


def fit_scaled(pipeline: Options | None, options: Options) -> Any:
    L.seed_everything(2, verbose=False)
    module = Overflowing(last=False)
    run = trainer(pipeline, precision=None, plugins=[plugin()], max_epochs=4, **options)
    run.fit(module, loader(32))
    return weights(module), module.scales


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_all_replicas_skip_the_same_updates(ranks: Ranks, zero_stage: int) -> None:
    """Each replica has all data: its gradients are those of one device."""
    options = {"gradient_clip_val": 0.05, "use_distributed_sampler": False}
    ((expected, scales),) = ranks.run(1, fit_scaled, None, options)
    pipeline = {"num_microbatches": 1, "data_parallel_size": 2, "zero_stage": zero_stage}
    results = ranks.run(4, fit_scaled, pipeline, options)
    torch.testing.assert_close(results[0][0], expected, rtol=0, atol=ROUNDING)
    assert all(own == scales for _, own in results)


class Thawing(Dealt):
    """Freezes a layer in its first epoch, and another one from the second on."""

    def on_train_epoch_start(self) -> None:
        first = self.current_epoch == 0
        self.model[4].requires_grad_(not first)
        self.model[6].requires_grad_(first)


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_parameters_may_be_frozen_and_unfrozen(ranks: Ranks, zero_stage: int) -> None:
    (expected,) = ranks.run(1, fit, Thawing, None, CLIPPED)
    pipeline = {"data_parallel_size": 2, "zero_stage": zero_stage}
    whole, *_ = ranks.run(4, fit, Thawing, pipeline, CLIPPED)
    assert_equal_weights(whole, expected)


class Scheduled(Dealt):
    """With a scheduler, which looks at whether the optimizer has stepped."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def fit_without_warnings(pipeline: Options) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*lr_scheduler.step()")
        return fit(Scheduled, pipeline)


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_schedulers_work_and_do_not_complain(ranks: Ranks, zero_stage: int) -> None:
    (expected,) = ranks.run(1, fit, Scheduled, None)
    pipeline = {"data_parallel_size": 2, "zero_stage": zero_stage}
    whole, *_ = ranks.run(4, fit_without_warnings, pipeline)
    assert_equal_weights(whole, expected)
