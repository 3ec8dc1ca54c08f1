"""Pipeline parallelism for PyTorch Lightning: ``Trainer(strategy=PipelineStrategy(...))``."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import StrategyRegistry

if TYPE_CHECKING:
    from lightning_pipe.chain import run_layers as run_layers
    from lightning_pipe.checking.parity import compare_gradients as compare_gradients
    from lightning_pipe.monitoring.monitor import PipelineMonitor as PipelineMonitor
    from lightning_pipe.planning import plan as plan
    from lightning_pipe.pretrained import load_safetensors as load_safetensors
    from lightning_pipe.schedule.registry import register_schedule as register_schedule
    from lightning_pipe.strategy import PipelineStrategy as PipelineStrategy

__version__ = "0.1.0"
__all__ = [
    "PipelineMonitor",
    "PipelineStrategy",
    "compare_gradients",
    "load_safetensors",
    "plan",
    "register_schedule",
    "run_layers",
]

_HOMES = {  # imported when first asked for
    "PipelineMonitor": "lightning_pipe.monitoring.monitor",
    "PipelineStrategy": "lightning_pipe.strategy",
    "compare_gradients": "lightning_pipe.checking.parity",
    "load_safetensors": "lightning_pipe.pretrained",
    "plan": "lightning_pipe.planning",
    "register_schedule": "lightning_pipe.schedule.registry",
    "run_layers": "lightning_pipe.chain",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _register(schedule: str, stages_per_rank: int = 1) -> None:
    def create(**kwargs: Any) -> Any:
        from lightning_pipe.strategy import PipelineStrategy

        return PipelineStrategy(schedule=schedule, stages_per_rank=stages_per_rank, **kwargs)

    name = f"pipe_{schedule}"
    if name not in StrategyRegistry.available_strategies():
        StrategyRegistry.register(name, create, description=f"PipelineStrategy({schedule!r})")


_register("naive")
_register("gpipe")
_register("1f1b")
_register("interleaved", stages_per_rank=2)
_register("zero_bubble")
_register("pipedream")
_register("pipedream_2bw")
