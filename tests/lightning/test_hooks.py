"""Every hook of a module and of a callback is called when one device would call it.

All that Lightning's base classes have is recorded, so a hook that a new version brings is, too.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.core import hooks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from trainer.lit import Classifier, Options, assert_equal_weights, loader, samples, trainer, weights
from trainer.ranks import Ranks

# What a user calls; Lightning does not.
FOR_USERS = {
    "optimizers", "lr_schedulers", "print", "log", "log_dict", "all_gather", "manual_backward",
    "toggle_optimizer", "untoggle_optimizer", "toggled_optimizer", "freeze", "unfreeze", "to_onnx",
    "to_torchscript", "to_tensorrt",
}  # fmt: skip
# Overriding it changes what Lightning does, and each has a test of its own.
NOT_RECORDED = {
    "backward": "refused if overridden, and never called: every stage runs its own",
    "configure_sharded_model": "an old name of configure_model",
    "configure_model": "builds layers",
}
# Around an asynchronous update; a round makes none, one or several of them.
OF_UPDATES = {"on_before_optimizer_step", "configure_gradient_clipping", "clip_gradients"}
# A record differs from one device's in these, and in nothing else.
DIFFERENT = {
    "training_step": "runs for every micro-batch, with the micro-batch",
    "prepare_data": "runs on rank 0 alone, as with other strategies",
}


def is_hook(name: str, value: Any) -> bool:
    return not name.startswith("_") and inspect.isfunction(value)


MODULE_HOOKS = [
    name
    for owner in (L.LightningModule, hooks.ModelHooks, hooks.DataHooks, hooks.CheckpointHooks)
    for name, value in vars(owner).items()
    if is_hook(name, value) and name not in FOR_USERS | NOT_RECORDED.keys()
]
CALLBACK_HOOKS = [name for name, value in vars(Callback).items() if is_hook(name, value)]

Entry = tuple[str, list[float]]
"""What was called, with what and when; and the numbers among what it was called with."""


class Record:
    """The calls of one rank, in order."""

    def __init__(self) -> None:
        self.trainer: L.Trainer | None = None
        self.entries: list[Entry] = []
        self.training_steps: list[str] = []

    def add(self, owner: str, hook: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        numbers: list[float] = []
        shown = [describe(value, numbers) for value in args]
        shown += [f"{name}={describe(value, numbers)}" for name, value in kwargs.items()]
        text = f"{owner}.{hook}({', '.join(shown)})"
        if (run := self.trainer) is not None:
            text += f" epoch {run.current_epoch} step {run.global_step} {run.state.stage}"
        if owner == "module" and hook == "training_step":
            self.training_steps.append(text)
        elif hook not in DIFFERENT:
            self.entries.append((text, numbers))


def describe(value: Any, numbers: list[float]) -> str:
    """The gist of an argument. Tensors and floats with one number add that to ``numbers``."""
    match value:
        case bool() | int() | str() | None:
            return re.sub(r"'/\S*(?=/saved\.ckpt)|'/\S*(?=')", "'directory", repr(value))
        case float():
            numbers.append(value)
            return "float"
        case Tensor():
            if value.numel() == 1 and not value.is_meta:
                numbers.append(float(value.detach()))
            return f"Tensor{list(value.shape)}"
        case {"state": _, "param_groups": groups}:  # a rank's optimizer has a part of the state
            return f"optimizer {describe(groups, numbers)}"
        case Path():
            return "path"
        case Mapping():
            items = (f"{key!r}: {describe(item, numbers)}" for key, item in value.items())
            return f"{{{', '.join(items)}}}"
        case list() | tuple():
            return f"[{', '.join(describe(item, numbers) for item in value)}]"
    return type(value).__name__


def recording(owner: str, name: str, base: type) -> Callable[..., Any]:
    original = getattr(base, name)

    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.record.add(owner, name, args, kwargs)
        return original(self, *args, **kwargs)

    return hook


def load(count: int, seed: int = 0) -> DataLoader[Any]:
    return DataLoader(samples(count, seed), batch_size=16)


class Steps(Classifier):
    """All steps, and loaders of its own."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        loss = self.loss(batch)
        self.log("val_loss", loss)
        return loss

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        result: Tensor = self.model(batch[0])
        return result

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.model(x)
        return result

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        each_step = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return [optimizer], [
            {"scheduler": each_step, "interval": "step"},
            {"scheduler": plateau, "monitor": "val_loss/dataloader_idx_1"},
        ]

    def train_dataloader(self) -> Any:
        return load(80)

    def val_dataloader(self) -> Any:
        return [load(20, seed=1), load(9, seed=2)]

    def test_dataloader(self) -> Any:
        return load(20, seed=3)

    predict_dataloader = test_dataloader


class Chained(Steps):
    """All parameters are in layers."""

    def __init__(self) -> None:
        super().__init__()
        del self.log_temperature

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])


class Stateful(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"is": "kept"}


def make_recorded(record: Record, base: type[Steps]) -> tuple[L.LightningModule, Callback]:
    """A module and a callback all of whose hooks are recorded."""

    def subclass(owner: str, base: type, names: Iterable[str]) -> Any:
        recorded = {name: recording(owner, name, base) for name in names}
        made = type(f"Recorded{owner.title()}", (base,), {**recorded, "record": record})
        return made()

    # Lightning loads before it converts to the Trainer's precision, and would round to float32.
    module = subclass("module", base, MODULE_HOOKS).double()
    return module, subclass("callback", Stateful, CALLBACK_HOOKS)


def record_all(
    pipeline: Options | None, directory: Path, base: type[Steps] = Steps, accumulate: int = 2
) -> tuple[list[Entry], list[str]]:
    """Fit two epochs with accumulation and saving, resume for a third, validate, test, predict."""
    L.seed_everything(3, verbose=False)
    record = Record()
    module, callback = make_recorded(record, base)
    for epochs, ckpt_path in (2, None), (3, directory / "saved.ckpt"):
        saving = ModelCheckpoint(directory, "saved", enable_version_counter=False)
        run = record.trainer = trainer(
            pipeline,
            callbacks=[callback, saving],
            enable_checkpointing=True,
            max_epochs=epochs,
            accumulate_grad_batches=accumulate,
            num_sanity_val_steps=1,
            gradient_clip_val=0.1,
        )
        run.fit(module, ckpt_path=ckpt_path, weights_only=False)
    run.validate(module, verbose=False)
    run.test(module, verbose=False)
    run.predict(module)
    return record.entries, record.training_steps


def assert_same(calls: list[str], expected: list[str], where: str) -> None:
    """Show where two long texts begin to differ."""
    actual_text, expected_text = "\n".join(calls), "\n".join(expected)
    same = len(os.path.commonprefix([actual_text, expected_text]))
    start = max(0, same - 100)
    assert actual_text[start : same + 100] == expected_text[start : same + 100], where


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Entry], list[str]]:
    return record_all(None, tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize(
    ("size", "pipeline"),
    [
        (2, {"num_microbatches": 4}),
        (2, {"schedule": "interleaved", "stages_per_rank": 2, "num_microbatches": 4}),
    ],
    ids=["1f1b", "interleaved"],
)
def test_every_rank_calls_what_one_device_calls(
    ranks: Ranks,
    tmp_path: Path,
    expected: tuple[list[Entry], list[str]],
    size: int,
    pipeline: Options,
) -> None:
    expected_entries, expected_steps = expected
    for rank, (entries, steps) in enumerate(ranks.run(size, record_all, pipeline, tmp_path)):
        calls = [call for call, _ in entries]
        assert_same(calls, [call for call, _ in expected_entries], f"rank {rank}")
        for (call, numbers), (_, theirs) in zip(entries, expected_entries, strict=True):
            assert numbers == pytest.approx(theirs, rel=0, abs=1e-10), f"rank {rank}: {call}"
        stages = pipeline.get("stages_per_rank", 1)
        assert len(steps) == len(expected_steps) * 4 * stages, f"rank {rank}"


def test_the_record_is_whole(expected: tuple[list[Entry], list[str]]) -> None:
    """All hooks were called, but for those that wait for something else."""
    elsewhere = {
        "callback": {"on_exception"},
        "module": {"forward", *DIFFERENT},
    }
    called = {call.split("(")[0] for call, _ in expected[0]}
    missing = {
        f"{owner}.{name}"
        for owner, names in (("module", MODULE_HOOKS), ("callback", CALLBACK_HOOKS))
        for name in names
        if name not in elsewhere[owner]
    } - called
    assert not missing


def hook_of(call: str) -> str:
    return call.split("(")[0].split(".")[1]


@pytest.mark.parametrize(
    ("pipeline", "micro_batches"),
    [({"schedule": "pipedream"}, 1), ({"schedule": "pipedream", "num_microbatches": 2}, 2)],
    ids=["pipedream", "pipedream, 2 micro-batches"],
)
def test_asynchronous_schedules_call_hooks_once_per_batch(
    ranks: Ranks, tmp_path: Path, pipeline: Options, micro_batches: int
) -> None:
    """But for those around an update, which are called for each update."""
    expected, _ = record_all(None, tmp_path / "one", Chained, 1)
    batches = sum(hook_of(call) == "on_train_batch_start" for call, _ in expected) // 2

    results = ranks.run(2, record_all, pipeline, tmp_path / "two", Chained, 1)
    for rank, (entries, _) in enumerate(results):
        calls, theirs = (
            [call for call, _ in record if hook_of(call) not in OF_UPDATES]
            for record in (entries, expected)
        )
        assert_same(calls, theirs, f"rank {rank}")
        for hook in OF_UPDATES:
            times = sum(call.startswith(f"module.{hook}(") for call, _ in entries)
            assert times == batches * micro_batches, f"rank {rank}, {hook}"


def gradients(module: L.LightningModule) -> list[tuple[nn.Parameter, Tensor]]:
    """Of the parameters that this rank owns."""
    return [(p, p.grad) for p in module.parameters() if p.grad is not None]


class ClipsByNorm(Classifier):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        limit = 0.05 if self.current_epoch == 0 else 0.02
        self.clip_gradients(optimizer, limit, "norm")


class ClipsByValue(Classifier):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, 0.01, "value")


class ScalesBeforeStep(Classifier):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for _, gradient in gradients(self):
            gradient.mul_(0.1 if self.global_step % 2 else 2.0)


class DecaysAfterBackward(Classifier):
    """Once per batch, with the gradients summed so far."""

    def on_after_backward(self) -> None:
        for parameter, gradient in gradients(self):
            gradient.add_(parameter.detach(), alpha=0.1)


class FollowsGradientOfLastStep(Classifier):
    """Sees gradients that are about to go, and moves along them later."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[nn.Parameter, Tensor]] = []

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.seen = [(parameter, gradient.clone()) for parameter, gradient in gradients(self)]

    def on_train_batch_end(self, *_: Any) -> None:
        for parameter, gradient in self.seen:
            parameter.data.add_(gradient, alpha=-0.1)


class KeepsSomeGradient(Classifier):
    """A momentum in `.grad` itself."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        for _, gradient in gradients(self):
            gradient.mul_(0.5)


class WarmsUp(Classifier):
    """Sets the learning rate, and does not step at every batch."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + self.trainer.global_step)
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class StepsSchedulerItself(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(self.trainer.global_step // 2)


OVERRIDES: dict[str, type[Classifier]] = {
    made.__name__: made
    for made in (
        ClipsByNorm, ClipsByValue, ScalesBeforeStep, DecaysAfterBackward, FollowsGradientOfLastStep,
        KeepsSomeGradient, WarmsUp, StepsSchedulerItself,
    )
}  # fmt: skip


def train_each(
    pipeline: Options | None, names: Sequence[str], accumulate: int
) -> dict[str, dict[str, Tensor]]:
    trained = {}
    for name in names:
        L.seed_everything(4, verbose=False)
        module = OVERRIDES[name]()
        trainer(pipeline, accumulate_grad_batches=accumulate).fit(module, loader(80))
        trained[name] = weights(module)
    return trained


@pytest.mark.parametrize("accumulate", [1, 2])
def test_overridden_hooks_act_as_on_one_device(ranks: Ranks, accumulate: int) -> None:
    expected = train_each(None, list(OVERRIDES), accumulate)

    actual = ranks.run(2, train_each, {"num_microbatches": 4}, list(OVERRIDES), accumulate)[0]

    for name, their_weights in expected.items():
        try:
            assert_equal_weights(actual[name], their_weights)
        except AssertionError as error:
            raise AssertionError(name) from error


def test_the_overrides_make_a_difference() -> None:
    """Else their test could not fail."""
    L.seed_everything(4, verbose=False)
    module = Classifier()
    trainer(None).fit(module, loader(80))
    plain = weights(module)["model.0.weight"]
    for name, trained in train_each(None, list(OVERRIDES), 1).items():
        assert (trained["model.0.weight"] - plain).abs().max() > 1e-4, name
