"""``lightning-pipe plan``: the best configurations for a model and the devices that there are."""

from __future__ import annotations

import json as json_format
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from math import inf, isfinite
from pathlib import Path
from typing import Any, Literal, cast

import yaml as yaml_format  # type: ignore[import-untyped]

from lightning_pipe.cli.units import bytes_per_second, in_gib, seconds, size_in_bytes
from lightning_pipe.partition.profile import Profile
from lightning_pipe.planning import Candidate, InfeasibleError
from lightning_pipe.planning import plan as make
from lightning_pipe.planning.memory import Checkpointing

_TARGET = "lightning_pipe.PipelineStrategy"


def plan(
    profile: str,
    devices: int,
    *,
    memory: str | None = None,
    bandwidth: str | None = None,
    latency: str = "0s",
    batch_size: int | None = None,
    schedules: str | None = None,
    activation_checkpointing: str = "none,stage,layer",
    replicas: int | Literal["auto"] | None = None,
    zero: str = "0",
    tensor: int = 1,
    devices_per_node: int | None = None,
    node_bandwidth: str | None = None,
    count: int = 10,
    yaml: Literal["hydra", "cli"] | None = None,
    json: bool = False,
) -> int:
    """Choose depth, cuts, schedule and micro-batches from a profile.

    All configurations that the strategy takes are compared: pipelines of any depth up to the number
    of devices, and replicas of them, cut so that the slowest stage is as fast as memory allows. The
    best few dozen are simulated with their messages and the sums of their gradients, which begin
    with a stage's last backward, and shown in the order of the time of one step. Not planned are
    activation_offload, and what replicas send for parameters that several stages share.

    Args:
        profile: File that `lightning-pipe profile` wrote, or your own estimate: a number per layer,
            "1,1,2.5", the cost of its forward for one sample, in any unit; a backward costs twice
            as much. Costs have no bytes: neither memory nor bandwidth counts then.
        devices: Number of devices. Fewer are used where that is faster.
        memory: Memory of a device, as 80GiB. Default: unlimited.
        bandwidth: Of the link between two devices in each direction, as 25GB/s or 100Gbit/s; of one
            node, if there are several. Default: unlimited.
        latency: Time until a message without content has arrived, as 20us.
        batch_size: Samples of a step. Default: as profiled.
        schedules: To choose from, as "1f1b,gpipe". Default: all synchronous ones. pipedream and
            pipedream_2bw change the mathematics of training, so they are compared only if they are
            named, in their steady state.
        activation_checkpointing: To choose from.
        replicas: Pipelines that share a batch (data_parallel_size), or "auto": any number that
            divides both the devices and the batch. Default: auto if memory or bandwidth are
            limited, else 1, since replicas that cost nothing are always worth it.
        zero: What replicas divide (zero_stage): 0 to 3, several to choose from as "0,1", or "auto",
            the lowest stage that fits into memory. Parts are taken to be equal; the 32-bit copies
            that zero_stage keeps of weights in half precision are left out.
        tensor: Devices that share each layer (tensor_parallel_size), if the module distributes
            them. What they gain is an upper bound: all work and parameters are divided, and what
            they send each other inside a layer is left out.
        devices_per_node: Nodes are filled one after the other, tensor ranks first, then replicas,
            then the pipeline; a configuration uses whole nodes, or a part of one.
        node_bandwidth: Of the link between two devices of different nodes. Default: as bandwidth.
        count: Number of rows at most.
        yaml: Print the best configuration instead: "hydra" for a file in conf/strategy, "cli" for
            LightningCLI's --config.
        json: Print the rows as JSON instead.

    Returns:
        1 if nothing fits into memory, else 0.

    Examples:
        lightning-pipe plan profile.json 8 --memory 80GiB --bandwidth 25GB/s --latency 10us
        lightning-pipe plan 1,1,1,1,2,2,1,1 4 --batch-size 64
        lightning-pipe plan profile.json 8 --memory 24GiB --yaml hydra > conf/strategy/planned.yaml
        lightning-pipe plan profile.json 8 --schedules 1f1b,pipedream_2bw --json
        lightning-pipe plan profile.json 8 --memory 24GiB --bandwidth 25GB/s --zero auto
        lightning-pipe plan profile.json 16 --bandwidth 200GB/s --devices-per-node 8
          --node-bandwidth 25GB/s

    Raises:
        ValueError: If an option is wrong.
    """
    if yaml is not None and json:
        raise ValueError("--yaml and --json are two formats: choose one")
    layers, is_measured = _profile(profile, batch_size)
    limit = None if memory is None else size_in_bytes(memory, "memory")
    try:
        with _progress() as report:
            candidates = make(
                layers,
                devices,
                limit,
                inf if bandwidth is None else bytes_per_second(bandwidth, "bandwidth"),
                seconds(latency, "latency"),
                batch_size,
                None if schedules is None else schedules.split(","),
                cast("list[Checkpointing]", activation_checkpointing.split(",")),
                replicas,
                count,
                report,
                _zero_stages(zero),
                tensor,
                devices_per_node,
                None
                if node_bandwidth is None
                else bytes_per_second(node_bandwidth, "node-bandwidth"),
            )
    except InfeasibleError as error:
        if json:
            print(json_format.dumps({"fits": False, **_reasons(error)}))
        print(f"lightning-pipe plan: {error}", file=sys.stderr)
        return 1
    if yaml is not None:
        print(as_yaml(candidates[0], yaml, is_measured, devices_per_node), end="")
    elif json:
        print(json_format.dumps({"fits": True, "candidates": _rows(candidates)}))
    else:
        _print(candidates, layers, is_measured)
    return 0


def as_yaml(
    candidate: Candidate,
    target: Literal["hydra", "cli"],
    is_measured: bool = True,
    devices_per_node: int | None = None,
) -> str:
    """Write a configuration as Hydra's `instantiate` or LightningCLI's ``--config`` takes it.

    One document cannot serve both: each refuses the key by which the other knows the class.

    Args:
        candidate: The configuration.
        target: Who is to read it.
        is_measured: Whether times are seconds.
        devices_per_node: If there may be several nodes.
    """
    config = candidate.strategy_config()
    unit = "s" if is_measured else "(costs)"
    words = f"{candidate.step_seconds:.3g} {unit} a step, {candidate.mean_bubble:.1%} bubble"
    trainer = {"devices": min(candidate.devices, devices_per_node or candidate.devices)}
    if candidate.devices > trainer["devices"]:
        trainer["num_nodes"] = candidate.devices // trainer["devices"]
    heading = f"# Planned: {words}."
    if target == "cli":
        strategy = {"class_path": _TARGET, "init_args": config}
        document: dict[str, Any] = {"trainer": {**trainer, "strategy": strategy}}
    else:
        document = {"_target_": _TARGET, **config}
        needs = [f"trainer.{name}={number}" for name, number in trainer.items()]
        heading += f" Needs {' '.join(needs)}."
    if candidate.data_parallel_size > 1:
        heading += (
            f"\n# Each of {candidate.data_parallel_size} replicas loads its share of a batch."
        )
    heading += "\n"
    text: str = yaml_format.safe_dump(document, sort_keys=False, default_flow_style=None, width=99)
    return heading + text


def _profile(profile: str, batch_size: int | None) -> tuple[Profile, bool]:
    """Read a profile, or make one of costs; say whether it was measured."""
    try:
        costs = [float(number) for number in profile.split(",")]
    except ValueError:
        if not Path(profile).is_file():
            raise ValueError(
                f"{profile!r} is neither a file that `lightning-pipe profile` wrote nor costs of "
                "layers, as 1,1,2,1"
            ) from None
        return Profile.load(profile), True
    if not all(isfinite(cost) and cost >= 0 for cost in costs):
        raise ValueError(f"costs={profile} must be finite numbers, none below 0")
    if batch_size is None:
        raise ValueError("costs are for one sample: say with --batch-size how many there are")
    return Profile.estimated(costs), False


def _zero_stages(text: str) -> Literal["auto"] | list[int]:
    """Read the stages of ZeRO to choose from."""
    if text == "auto":
        return "auto"
    if not all(part in ("0", "1", "2", "3") for part in text.split(",")):
        raise ValueError(f"--zero={text} must be auto, or some of 0, 1, 2 and 3, as 0,1")
    return [int(part) for part in text.split(",")]


def _reasons(error: InfeasibleError) -> dict[str, Any]:
    return {
        "missing_bytes": error.missing_bytes,
        "closest": error.closest,
        "remedies": list(error.remedies),
    }


def _rows(candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
    return [
        {
            **asdict(candidate),
            "mean_bubble": candidate.mean_bubble,
            "strategy": candidate.strategy_config(),
        }
        for candidate in candidates
    ]


def _print(candidates: Sequence[Candidate], profile: Profile, is_measured: bool) -> None:
    """Print a table, and how the best is cut."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    with_memory = any(max(candidate.peak_bytes) for candidate in candidates)
    with_replicas = any(candidate.data_parallel_size > 1 for candidate in candidates)
    with_zero = any(candidate.zero_stage for candidate in candidates)
    with_samples = is_measured and not with_zero  # 80 characters have no room for both
    columns = ["schedule", "ranks", "stages\n/rank", "micro-\nbatches", "check-\npoints"]
    columns += ["repli-\ncas"] if with_replicas else []
    columns += ["ZeRO"] if with_zero else []
    columns += ["step\n(s)"] if is_measured else ["step\n(costs)"]
    columns += ["samples\n/s"] if with_samples else []
    columns += ["bubble"]
    columns += ["peak\n/rank"] if with_memory else []
    for name in columns:
        justify: Any = "left" if name in ("schedule", "check-\npoints") else "right"
        table.add_column(name, justify=justify, no_wrap=True)
    for index, candidate in enumerate(candidates):
        cells: list[Any] = [
            candidate.schedule,
            candidate.pipeline_parallel_size,
            candidate.stages_per_rank,
        ]
        cells += [candidate.num_microbatches, candidate.activation_checkpointing]
        cells += [candidate.data_parallel_size] if with_replicas else []
        cells += [_zero_in_words(candidate)] if with_zero else []
        cells += [f"{candidate.step_seconds:.4g}"]
        cells += [f"{candidate.samples_per_second:.4g}"] if with_samples else []
        cells += [f"{candidate.mean_bubble:.1%}"]
        cells += [in_gib(max(candidate.peak_bytes))] if with_memory else []
        table.add_row(*map(str, cells), style="bold" if index == 0 else None)
    console.print(f"The best of each kind, for {len(profile.layers)} layers\n")
    console.print(table)
    if any(candidate.reshard_after_forward for candidate in candidates):
        console.print("\n* with reshard_after_forward", highlight=False)
    if candidates[0].tensor_parallel_size > 1:
        shared = f"{candidates[0].tensor_parallel_size} devices share each layer: an upper bound."
        console.print(f"\n{shared}", highlight=False)
    sizes = ", ".join(map(str, candidates[0].partition))
    console.print(f"\nLayers of the stages of the best: {sizes}", highlight=False)
    console.print("Print it as a configuration: --yaml hydra, --yaml cli", highlight=False)


def _zero_in_words(candidate: Candidate) -> str:
    return f"{candidate.zero_stage}{'*' if candidate.reshard_after_forward else ''}"


@contextmanager
def _progress() -> Iterator[Callable[[float], None]]:
    """Show on the terminal how much is done."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("Planning", total=1.0)
        yield lambda share: progress.update(task, completed=share)
