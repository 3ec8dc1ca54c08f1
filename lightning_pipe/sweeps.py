"""Ranks of a job of a Hydra sweep (``--multirun``).

A script that is started again with the same arguments would run the whole sweep again, in a folder
of its own. A rank runs one job instead, with the job's own overrides and in the job's folder.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

_WITH_VALUE = {"--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"}
_OWN = ("hydra.mode=", "hydra.run.dir=", "hydra.job.name=", "hydra.output_subdir=")
_VARIABLES = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class SweepJobs:
    """The jobs of a sweep that this process has run, one after the other."""

    def __init__(self) -> None:
        self._job: str | None = None
        self._before: dict[str, str | None] = {}

    def begin(self) -> bool:
        """Look whether a job of a sweep is running, which then starts ranks of its own.

        What the ranks of an earlier job had to know is forgotten, with the connections to them.

        Returns:
            Whether there is one.
        """
        config = _job()
        if config is None or config.runtime.output_dir == self._job:
            return config is not None
        if self._job is not None:
            for name, value in self._before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            if dist.is_initialized():
                dist.destroy_process_group()
        self._job = config.runtime.output_dir
        self._before = {name: os.environ.get(name) for name in _VARIABLES}
        return True


def command(local_rank: int) -> tuple[Sequence[str], str]:
    """What starts a rank of the running job, and where.

    Args:
        local_rank: On this machine.
    """
    import __main__

    config = _job()
    started_in = str(config.runtime.cwd)
    if __main__.__spec__ is None:
        script = [os.path.join(started_in, sys.argv[0])]
    else:
        script = ["-m", __main__.__spec__.name]
    return [
        *(sys.executable, *script, *_flags(sys.argv[1:]), *config.overrides.task),
        *(override for override in config.overrides.hydra if not override.startswith(_OWN)),
        "hydra.mode=RUN",
        f'hydra.run.dir="{config.runtime.output_dir}"',
        f"hydra.job.name=train_ddp_process_{local_rank}",
        f"hydra.job.num={config.job.num}",
        f"hydra.job.id={config.job.id}",
        "hydra.output_subdir=null",  # the job's process has written the configuration
    ], started_in


def _flags(arguments: Sequence[str]) -> Iterator[str]:
    """Of a command line: all but overrides, and but what asks for a sweep."""
    rest = iter(arguments)
    for argument in rest:
        if argument in _WITH_VALUE:
            yield from (argument, next(rest))
        elif argument.startswith("-") and argument not in ("-m", "--multirun"):
            yield argument


def _job() -> Any:
    """Hydra's configuration of the running job of a sweep; `None` if there is no sweep."""
    module: Any = sys.modules.get("hydra.core.hydra_config")  # not there: nobody uses Hydra
    if module is None or not module.HydraConfig.initialized():
        return None
    config = module.HydraConfig.get()
    return config if config.mode is not None and config.mode.name == "MULTIRUN" else None
