"""``lightning-pipe profile``: what each layer of a module takes, and a file of it."""

from __future__ import annotations

import json as json_format
import sys
import time
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipe.assembly import check_call
from lightning_pipe.cli.target import Target, load_target
from lightning_pipe.cli.units import in_gib
from lightning_pipe.partition import (
    DeferredTensors,
    LayerProfile,
    PipelinedLayers,
    Profile,
    call_arguments,
    find_layers,
    measure,
)
from lightning_pipe.quiet import quiet_lightning
from lightning_pipe.runtime.microbatch import first_samples

if TYPE_CHECKING:
    from rich.progress import Progress

_PATIENCE_S = 2.0  # before there is a progress bar


def profile(
    target: str,
    overrides: list[str] | None = None,
    *,
    data: str | None = None,
    module: str | None = None,
    output: str = "profile.json",
    batch_size: int | None = None,
    repeats: int = 5,
    device: str = "auto",
    precision: str | None = None,
    json: bool = False,
) -> None:
    """Measure time and memory of each layer of a module.

    Layers run one by one, forward and backward, on copies: memory for one layer is enough. They run
    on the first batch of the training data or, without data, on the module's example_input_array.
    The file is what `lightning-pipe plan` and PipelineStrategy(partition="profile.json") read.

    Args:
        target: What to measure: package.module:Name or path/to/file.py:Name of a LightningModule,
            of a function that returns one or a pair (module, data); or the YAML file of a Hydra or
            LightningCLI configuration.
        overrides: Words that change it, as model.width=64 or data.batch_size=8.
        data: Where the data is, if the target is a Python name without any: name of a datamodule
            or of a function that returns one or a dataloader.
        module: Name of the nn.Sequential to cut. Default: that of the target's strategy, or the
            only large one.
        output: File to write; must end in .json.
        batch_size: Take so many samples of the first batch. Default: all.
        repeats: How often each layer runs; the numbers are medians.
        device: cpu, cuda, cuda:1, or auto: cuda if there is one.
        precision: Of the Trainer. Default: that of the target.
        json: Print the numbers as JSON instead of a table.

    Examples:
        lightning-pipe profile my_project.py:LitModel
        lightning-pipe profile my_project.py:LitModel model.depth=48 --data my_project.py:Text
        lightning-pipe profile conf/train.yaml data.batch_size=32 --output big_batch.json

    Raises:
        ValueError: If an option is wrong, or the target cannot be loaded or measured.
    """
    if Path(output).suffix != ".json":
        raise ValueError(f"--output={output} must end in .json")
    if repeats < 1:
        raise ValueError(f"--repeats={repeats} must be at least 1")
    where = _device(device)
    with redirect_stdout(sys.stderr), quiet_lightning():  # what the user's code prints
        loaded = load_target(target, overrides or [], data)
        path = module or loaded.strategy_options.get("module")
        measured = _measured(loaded, path, batch_size, repeats, where, precision)
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    measured.save(output)
    if json:
        print(json_format.dumps({"output": output, **asdict(measured)}))
    else:
        _print(measured, output)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device={name} is none: expected cpu, cuda, cuda:1 or auto") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device={name}: expected cpu, cuda, cuda:1 or auto")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ValueError(f"--device={name}, but torch sees {count} CUDA devices: try cpu")
    return device


def _measured(
    target: Target,
    path: str | None,
    batch_size: int | None,
    repeats: int,
    device: torch.device,
    precision: Any,
) -> Profile:
    """Build module and batch in the order in which a Trainer would, and run all layers."""
    root = target.module
    trainer = _trainer(target, device, precision)
    plugin = trainer.precision_plugin
    has_batch = target.data is not None or is_overridden("train_dataloader", root)
    if not has_batch and getattr(root, "example_input_array", None) is None:
        raise MisconfigurationException(
            f"{type(root).__name__} has no example_input_array and no train_dataloader, and no "
            "data is named: give --data, or set one of them."
        )
    if isinstance(target.data, LightningDataModule):
        target.data.prepare_data()
        target.data.setup("fit")
    root.prepare_data()
    root.setup("fit")
    deferred = DeferredTensors()
    if is_overridden("configure_model", root):
        with plugin.module_init_context(), deferred.recording():
            root.configure_model()
    found = find_layers(root, path)
    _give_memory_outside(root, found, deferred)
    plugin.convert_module(root)
    batch = _first_batch(target, plugin) if has_batch else None
    if batch_size is not None:
        if has_batch:
            batch = first_samples(batch, batch_size)
        else:
            root.example_input_array = first_samples(root.example_input_array, batch_size)
    with plugin.forward_context():
        args, kwargs, size = call_arguments(root, found, batch)
    args, kwargs = plugin.convert_input((args, kwargs))
    check_call(found, args, kwargs)
    context = plugin.forward_context
    with _Bar() as bar:
        return measure(root, found, args, kwargs, size, repeats, device, bar.show, context, batch)


def _trainer(target: Target, device: torch.device, precision: Any) -> Trainer:
    """Make a Trainer of that precision, and attach module and data: hooks may ask for it."""
    trainer = Trainer(
        accelerator="cpu" if device.type == "cpu" else "gpu",
        devices=1,
        precision=precision or target.trainer_options.get("precision"),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    is_datamodule = isinstance(target.data, LightningDataModule)
    data = {"datamodule" if is_datamodule else "train_dataloaders": target.data}
    trainer.strategy.connect(target.module)
    target.module.trainer = trainer
    trainer.state.fn = TrainerFn.FITTING
    trainer._data_connector.attach_data(target.module, **data)
    return trainer


def _first_batch(target: Target, plugin: Precision) -> Any:
    """Load the first batch, and let it go through the user's hooks, but to the CPU."""
    root, loader = target.module, target.data
    if isinstance(loader, LightningDataModule):
        loader = loader.train_dataloader()
    elif loader is None:
        loader = root.train_dataloader()
    # A list is one of loaders, as Lightning has it, or simply of batches.
    is_list = isinstance(loader, list | tuple) and all(isinstance(x, DataLoader) for x in loader)
    several = isinstance(loader, dict) or is_list
    batches = iter(CombinedLoader(loader, "max_size_cycle") if several else loader)
    first = next(batches, None)
    if first is None:
        raise MisconfigurationException(
            f"{type(loader).__name__} gives no batch at all: expected at least one to measure on."
        )
    batch = first[0] if several else first  # a CombinedLoader gives its place as well
    batch = root._on_before_batch_transfer(plugin.convert_input(batch))
    return root._apply_batch_transfer_handler(batch, torch.device("cpu"))


def _give_memory_outside(
    root: LightningModule, found: PipelinedLayers, deferred: DeferredTensors
) -> None:
    """Make what ``configure_model`` has built outside of the layers: the step runs through it."""
    inside = {part for layer in found.layers for part in layer.modules()}
    made: dict[int, nn.Parameter] = {}
    for part in root.modules():
        if part in inside:
            continue
        for name, parameter in part._parameters.items():
            if parameter is not None and deferred.is_deferred(parameter):
                twin = nn.Parameter(deferred.real(parameter).detach(), parameter.requires_grad)
                part._parameters[name] = made.setdefault(id(parameter), twin)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = deferred.real(buffer)


# ------------------------------------------------------------------------------------------- output


def _print(measured: Profile, output: str) -> None:
    """Print a table with a row for each layer, and one for all."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    layers = measured.layers
    whole = sum(layer.forward_seconds + layer.backward_seconds for layer in layers)
    console = Console(highlight=False)
    console.print(
        f"{len(layers)} layer{'s'[: len(layers) > 1]}, {measured.batch_size} samples, "
        f"on {measured.device}",
        style="bold",
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("layer")
    for name in ("forward\n(ms)", "backward\n(ms)", "share", "acti-\nvations", "out-\nput"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("para-\nmeters", "opti-\nmizer"):
        table.add_column(name, justify="right", no_wrap=True)
    for layer in layers:
        share = (layer.forward_seconds + layer.backward_seconds) / whole if whole else 0.0
        table.add_row(Text(layer.name), *_cells(layer, share))
    total = LayerProfile(
        "all",
        sum(layer.forward_seconds for layer in layers),
        sum(layer.backward_seconds for layer in layers),
        sum(layer.activation_bytes for layer in layers),
        layers[-1].output_bytes,
        sum(layer.parameter_bytes for layer in layers),
        sum(layer.gradient_bytes for layer in layers),
        sum(layer.optimizer_bytes for layer in layers),
    )
    table.add_section()
    table.add_row("all", *_cells(total, 1.0), style="bold")
    console.print(table)
    if measured.loss_activation_bytes:
        loss = in_gib(measured.loss_activation_bytes)
        console.print(f"besides, the loss keeps {loss} of activations", soft_wrap=True)
    console.print(f"written: {output}", soft_wrap=True, markup=False)


def _cells(layer: LayerProfile, share: float) -> list[str]:
    times = [f"{1e3 * t:.3f}" for t in (layer.forward_seconds, layer.backward_seconds)]
    numbers = layer.activation_bytes, layer.output_bytes, layer.parameter_bytes
    return [*times, f"{share:.1%}", *map(in_gib, (*numbers, layer.optimizer_bytes))]


class _Bar:
    """A progress bar on stderr, if it takes longer than that.

    It is drawn between layers only: a thread that draws would be measured with them.
    """

    def __enter__(self) -> _Bar:
        """Begin to wait."""
        self._begin = time.monotonic()
        self._progress: Progress | None = None
        self._task: Any = None
        return self

    def show(self, done: int, of: int) -> None:
        """Say how many layers are done."""
        if time.monotonic() - self._begin < _PATIENCE_S:
            return
        if self._progress is None:
            self._progress = _new_progress()
            self._task = self._progress.add_task("Layers", total=of)
            self._progress.start()
        self._progress.update(self._task, completed=done)
        self._progress.refresh()

    def __exit__(self, *_: object) -> None:
        """Remove it."""
        if self._progress is not None:
            self._progress.stop()


def _new_progress() -> Progress:
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    is_off = not console.is_terminal
    return Progress(console=console, transient=True, auto_refresh=False, disable=is_off)
