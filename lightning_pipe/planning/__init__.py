"""Choose a pipeline before it runs: predicted time, memory and cut points, on arrays.

`plan` gives the best configurations for a profile and devices; `predict` the time of any schedule,
for pipelines that are too large for `lightning_pipe.schedule.simulate`.
"""

from __future__ import annotations

from lightning_pipe.planning.cuts import Cuts
from lightning_pipe.planning.infeasible import InfeasibleError
from lightning_pipe.planning.memory import Checkpointing, StageMemory
from lightning_pipe.planning.planner import Candidate, plan
from lightning_pipe.planning.predict import Prediction, predict

__all__ = [
    "Candidate",
    "Checkpointing",
    "Cuts",
    "InfeasibleError",
    "Prediction",
    "StageMemory",
    "plan",
    "predict",
]
