"""The pipelined call: what happens when the user's code calls the module that was cut."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn


class Callee(Protocol):
    """Answers the call."""

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do what ``forward(*args, **kwargs)`` of the whole module would do."""
        ...


class StageOutput(BaseException):
    """Carries a stage's output out of the user's step, past its ``except Exception``.

    Raised where the pipelined call would return on any stage but the last: there is nothing for
    the rest of the step to work on.
    """

    def __init__(self, output: Any) -> None:
        super().__init__("left the step at the pipelined call")
        self.output = output


class PipelinedModule(nn.Module):
    """Mixed into the class of the pipelined module: its ``forward`` goes to the pipeline."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Go through the pipeline; a copy of the module, which has none, calls its layers."""
        held = self.__dict__.get("_lightning_pipe")
        if held is None or held.callee is None:
            return super().forward(*args, **kwargs)
        return held.callee.call(args, kwargs)


def attach(module: nn.Module, callee: Callee | None) -> None:
    """Let ``callee`` answer the calls of a module whose class has :class:`PipelinedModule`."""
    module.__dict__["_lightning_pipe"] = _Held(callee)


class _Held:
    """A reference that stays behind when its module is copied or pickled."""

    def __init__(self, callee: Callee | None = None) -> None:
        self.callee = callee

    def __reduce__(self) -> tuple[type[_Held], tuple[()]]:
        return _Held, ()
