"""Pipeline schedules as data: generate, lower, validate, simulate and draw them. Pure Python.

``make_plan(name, placement, num_microbatches)`` gives the instructions of every rank for one batch,
or for one fill over several. `Rounds` cuts such a fill into batches.
"""

from __future__ import annotations

from lightning_pipe.schedule.costs import Costs
from lightning_pipe.schedule.csv_file import dump_csv, load_csv
from lightning_pipe.schedule.errors import ScheduleError
from lightning_pipe.schedule.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Communication,
    Compute,
    Forward,
    Instruction,
    Receive,
    ReceiveActivation,
    ReceiveGradient,
    Reduce,
    Send,
    SendActivation,
    SendGradient,
    Update,
    dependencies,
)
from lightning_pipe.schedule.plan import accepts, make_plan
from lightning_pipe.schedule.programs import Placement, Plan, VersionPolicy
from lightning_pipe.schedule.progress import ReceiveModel
from lightning_pipe.schedule.registry import (
    SCHEDULES,
    Schedule,
    look_up,
    policy_for,
    register_schedule,
    schedule_names,
)
from lightning_pipe.schedule.render import text_grid
from lightning_pipe.schedule.rounds import Rounds
from lightning_pipe.schedule.simulate import Event, Timeline, simulate
from lightning_pipe.schedule.validate import validate
from lightning_pipe.schedule.versions import live_versions, staleness

__all__ = [
    "SCHEDULES",
    "Backward",
    "BackwardInput",
    "BackwardWeight",
    "Communication",
    "Compute",
    "Costs",
    "Event",
    "Forward",
    "Instruction",
    "Placement",
    "Plan",
    "Receive",
    "ReceiveActivation",
    "ReceiveGradient",
    "ReceiveModel",
    "Reduce",
    "Rounds",
    "Schedule",
    "ScheduleError",
    "Send",
    "SendActivation",
    "SendGradient",
    "Timeline",
    "Update",
    "VersionPolicy",
    "accepts",
    "dependencies",
    "dump_csv",
    "live_versions",
    "load_csv",
    "look_up",
    "make_plan",
    "policy_for",
    "register_schedule",
    "schedule_names",
    "simulate",
    "staleness",
    "text_grid",
    "validate",
]
