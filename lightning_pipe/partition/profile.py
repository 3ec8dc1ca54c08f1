"""What each layer of a model costs: time and bytes, measured or estimated. Pure data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

_VERSION = 1


@dataclass(frozen=True)
class LayerProfile:
    """One layer. Seconds and bytes are for `Profile.batch_size` samples.

    Attributes:
        name: Of the layer in its module.
        forward_seconds: Of a forward.
        backward_seconds: Of a backward.
        activation_bytes: What it keeps for its backward, parameters excluded.
        output_bytes: What it hands to the next layer.
        parameter_bytes: Of its weights.
        gradient_bytes: Of their gradients.
        optimizer_bytes: Of the optimizer's state for them.
        forward_overhead: Seconds of a forward that do not shrink with the number of samples.
        backward_overhead: Likewise, of a backward.
    """

    name: str
    forward_seconds: float
    backward_seconds: float
    activation_bytes: int
    output_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    forward_overhead: float = 0.0
    backward_overhead: float = 0.0


@dataclass(frozen=True)
class Profile:
    """All layers of a model, in order.

    Attributes:
        layers: One entry per layer.
        batch_size: Samples that the numbers are for.
        input_bytes: What enters the first layer.
        device: What it was measured on.
        loss_activation_bytes: What the step keeps for backward besides the layers: in the loss.
    """

    layers: tuple[LayerProfile, ...]
    batch_size: int
    input_bytes: int
    device: str = ""
    loss_activation_bytes: int = 0

    @classmethod
    def estimated(cls, costs: Sequence[float], batch_size: int = 1) -> Profile:
        """Make a profile of a number per layer: a forward's cost; a backward takes twice as long.

        Args:
            costs: In any unit.
            batch_size: Samples that the costs are for.
        """
        layers = tuple(
            LayerProfile(str(index), float(cost), 2.0 * cost, 0, 0, 0, 0, 0)
            for index, cost in enumerate(costs)
        )
        return cls(layers, batch_size, 0)

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_text(json.dumps({"version": _VERSION, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read what `save` has written.

        Raises:
            MisconfigurationException: If the file is not such a profile.
        """
        try:
            content = json.loads(Path(path).read_text())
            if content.pop("version") != _VERSION:
                raise ValueError(f"its version is not {_VERSION}")
            layers = tuple(LayerProfile(**layer) for layer in content.pop("layers"))
            return cls(layers, **_known(content))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise MisconfigurationException(
                f"{path} is not a profile that `lightning-pipe profile` wrote: {error}"
            ) from error


def _known(content: dict[str, Any]) -> dict[str, Any]:
    unknown = content.keys() - {field.name for field in fields(Profile)}
    if unknown:
        raise ValueError(f"it has unknown entries {sorted(unknown)}")
    return content
