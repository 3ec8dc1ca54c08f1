"""The options of PipelineStrategy, as far as they can be checked without a model."""

from __future__ import annotations

from math import prod
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_pipe.runtime.mesh import Grid
from lightning_pipe.schedule import (
    SCHEDULES,
    ScheduleError,
    look_up,
    make_plan,
    policy_for,
    schedule_names,
)

_CHOICES = {
    "activation_checkpointing": ("none", "stage", "layer"),
    "evaluation_outputs": ("all", "last"),
    "start_method": ("popen", "fork", "spawn"),
}


def check_arguments(arguments: dict[str, Any]) -> None:
    """Check the constructor's arguments as far as they can be without a model.

    Raises:
        MisconfigurationException: One cannot work, or has no effect.
    """
    schedule = arguments["schedule"]
    for name, choices in _CHOICES.items():
        if arguments[name] not in choices:
            raise MisconfigurationException(
                f"PipelineStrategy({name}={arguments[name]!r}): expected one of "
                f"{', '.join(map(repr, choices))}."
            )
    _check_sizes(arguments)
    if arguments["process_group_backend"] not in (None, "gloo"):
        raise MisconfigurationException(
            f"PipelineStrategy(process_group_backend={arguments['process_group_backend']!r}): "
            "expected 'gloo', the only backend so far (tensors of a GPU travel through the host)."
        )
    count = arguments["num_microbatches"]
    if count != "auto" and (not isinstance(count, int) or count < 1):
        raise MisconfigurationException(
            f"PipelineStrategy(num_microbatches={count!r}): expected 'auto' or a number from 1."
        )
    _check_activations(arguments)
    if arguments["partition"] == "time" and arguments["tensor_parallel_size"] != 1:
        raise MisconfigurationException(
            "PipelineStrategy(partition='time') with tensor_parallel_size="
            f"{arguments['tensor_parallel_size']}: layers are measured on one rank, but need "
            "several. Use 'parameters', 'uniform' or a list of layers."
        )
    check_schedule(schedule, count, arguments["stages_per_rank"], num_ranks=None)
    check_zero(schedule, arguments["zero_stage"], arguments["reshard_after_forward"])
    try:
        policy_for(schedule, arguments["weight_stashing"], arguments["vertical_sync"])
    except ScheduleError as error:
        raise MisconfigurationException(f"PipelineStrategy: {error}") from error


def _check_activations(arguments: dict[str, Any]) -> None:
    """Check that what is kept of activations can be divided, if it is to be."""
    if not arguments["partition_activations"]:
        return
    keeps, ranks = arguments["activation_checkpointing"], arguments["tensor_parallel_size"]
    if keeps == "none" or ranks == 1:
        raise MisconfigurationException(
            f"PipelineStrategy(partition_activations=True) with activation_checkpointing={keeps!r} "
            f"and tensor_parallel_size={ranks}: it divides what checkpointing keeps among the "
            "ranks that share a layer. Set activation_checkpointing='stage' or 'layer' and "
            "tensor_parallel_size from 2, or leave it out."
        )


def check_zero(schedule: str, zero_stage: Any, reshards: bool) -> None:
    """Check what replicas divide among them.

    Args:
        schedule: Its name.
        zero_stage: The option.
        reshards: Whether layers are gathered for each micro-batch.

    Raises:
        MisconfigurationException: It does not go with the schedule.
    """
    if zero_stage not in (0, 1, 2, 3):
        raise MisconfigurationException(
            f"PipelineStrategy(zero_stage={zero_stage!r}): expected 0, 1, 2 or 3."
        )
    if reshards and zero_stage != 3:
        raise MisconfigurationException(
            f"PipelineStrategy(reshard_after_forward=True) with zero_stage={zero_stage}: only "
            "zero_stage=3 gathers parameters, which could be freed after a forward. Leave it out."
        )
    if zero_stage > 1 and look_up(schedule).continuous:
        raise MisconfigurationException(
            f"PipelineStrategy(zero_stage={zero_stage}) with schedule={schedule!r}: a replica has "
            "only a part of the gradients or of the weights, but old versions of the weights are "
            "kept whole, and every micro-batch updates them. Use zero_stage=1, or a synchronous "
            "schedule ('1f1b')."
        )


def _check_sizes(arguments: dict[str, Any]) -> None:
    """Check the numbers of ranks, as far as they can be without knowing how many there are."""
    for name in ("pipeline_parallel_size", "data_parallel_size", "tensor_parallel_size"):
        size = arguments[name]
        alternative = "" if name == "tensor_parallel_size" else ", or 'auto'"
        if not (size == "auto" and alternative) and (not isinstance(size, int) or size < 1):
            raise MisconfigurationException(
                f"PipelineStrategy({name}={size!r}): expected a number from 1{alternative}."
            )
    if arguments["data_parallel_size"] == arguments["pipeline_parallel_size"] == "auto":
        raise MisconfigurationException(
            "PipelineStrategy(data_parallel_size='auto') fills the world with replicas, so it must "
            "know how long a pipeline is. Set pipeline_parallel_size to a number."
        )


def check_world(
    world_size: int,
    pipeline_parallel_size: Any,
    data_parallel_size: Any = 1,
    tensor_parallel_size: int = 1,
    rank: int = 0,
) -> Grid:
    """What each rank does, given the number of processes.

    Args:
        world_size: The number.
        pipeline_parallel_size: The option.
        data_parallel_size: The option.
        tensor_parallel_size: The option.
        rank: Of this process.

    Raises:
        MisconfigurationException: They do not fit.
    """
    known = [size for size in (pipeline_parallel_size, data_parallel_size) if size != "auto"]
    ranks = prod(known) * tensor_parallel_size
    fits = world_size % ranks == 0 if len(known) == 1 else world_size == ranks
    if fits:
        rest = world_size // ranks
        pipeline, data = (
            rest if size == "auto" else size
            for size in (pipeline_parallel_size, data_parallel_size)
        )
        return Grid(pipeline, data, tensor_parallel_size, rank)
    raise MisconfigurationException(
        f"PipelineStrategy(pipeline_parallel_size={pipeline_parallel_size!r}, data_parallel_size="
        f"{data_parallel_size!r}, tensor_parallel_size={tensor_parallel_size}) with {world_size} "
        f"processes: expected {'a multiple of ' if len(known) == 1 else ''}{ranks}, their product. "
        f"Use Trainer(devices={ranks}) on one node, or leave pipeline_parallel_size at 'auto'. "
        "More stages than ranks come from stages_per_rank."
    )


def check_schedule(
    schedule: str,
    num_microbatches: Any,
    stages_per_rank: int,
    num_ranks: int | None,
    activation_checkpointing: str = "none",
    zero_stage: int = 0,
) -> None:
    """Check that a schedule is known and takes its options.

    Args:
        schedule: Its name.
        num_microbatches: A number, or "auto", which adapts itself.
        stages_per_rank: A number.
        num_ranks: As long as it is unknown, what depends on it is not checked.
        activation_checkpointing: The option.
        zero_stage: The option.

    Raises:
        MisconfigurationException: With the reason and what would be valid.
    """
    if not isinstance(stages_per_rank, int) or stages_per_rank < 1:
        raise MisconfigurationException(
            f"PipelineStrategy(stages_per_rank={stages_per_rank!r}): expected a number from 1."
        )
    if schedule in SCHEDULES and schedule not in schedule_names():
        raise MisconfigurationException(
            f"PipelineStrategy(schedule={schedule!r}) does not train. Choose one of "
            f"{', '.join(schedule_names())}."
        )
    try:
        recipe = look_up(schedule)
        if num_ranks is None:
            return
        placement = recipe.place(num_ranks, stages_per_rank)
        count = num_microbatches
        if count == "auto":
            count = recipe.most_microbatches(placement)
        plan = make_plan(schedule, placement, (count, count) if recipe.continuous else count)
    except ScheduleError as error:
        raise MisconfigurationException(f"PipelineStrategy: {error}") from error
    if not placement.in_order:
        raise MisconfigurationException(
            f"PipelineStrategy(schedule={schedule!r}): its stages are on ranks "
            f"{placement.rank_of}; expected ranks numbered in the order in which a micro-batch "
            "reaches them first. Number them so."
        )
    if plan.split:
        _check_split(schedule, zero_stage)
    if plan.split and activation_checkpointing != "none":
        raise MisconfigurationException(
            f"PipelineStrategy(activation_checkpointing={activation_checkpointing!r}): schedule="
            f"{schedule!r} runs backwards in two parts, and each would compute the forward again. "
            "Set activation_checkpointing='none', or choose '1f1b' or 'interleaved'."
        )


def _check_split(schedule: str, zero_stage: int) -> None:
    if zero_stage > 1:
        raise MisconfigurationException(
            f"PipelineStrategy(zero_stage={zero_stage}) with schedule={schedule!r}, which runs "
            "backwards in two parts: gradients of weights come later than where they would be "
            "divided. Use zero_stage=1, or '1f1b' or 'interleaved'."
        )
