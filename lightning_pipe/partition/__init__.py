"""Find the layers of a model, decide where to cut, and build one rank's part of it."""

from lightning_pipe.partition.absent import absent, has_deferred, is_absent, present
from lightning_pipe.partition.balance import balance, partition, uniform
from lightning_pipe.partition.build import (
    outside_buffers,
    outside_parameters,
    shard,
    shared_between_stages,
    stage_slices,
    tied_parameters,
)
from lightning_pipe.partition.call_arguments import call_arguments
from lightning_pipe.partition.class_swap import (
    original_class,
    original_forward,
    restore_class,
    swap_class,
)
from lightning_pipe.partition.deferred import DeferredTensors
from lightning_pipe.partition.freed_memory import return_freed_memory
from lightning_pipe.partition.glue import check_glue
from lightning_pipe.partition.layers import (
    PipelinedLayers,
    find_layers,
    keyword_names,
    parameter_counts,
)
from lightning_pipe.partition.materialise import materialise
from lightning_pipe.partition.measure import measure
from lightning_pipe.partition.profile import LayerProfile, Profile

__all__ = [
    "LayerProfile",
    "Profile",
    "call_arguments",
    "measure",
    "DeferredTensors",
    "PipelinedLayers",
    "absent",
    "balance",
    "check_glue",
    "find_layers",
    "has_deferred",
    "is_absent",
    "keyword_names",
    "materialise",
    "original_class",
    "original_forward",
    "outside_buffers",
    "outside_parameters",
    "parameter_counts",
    "partition",
    "present",
    "restore_class",
    "return_freed_memory",
    "shard",
    "shared_between_stages",
    "stage_slices",
    "swap_class",
    "tied_parameters",
    "uniform",
]
