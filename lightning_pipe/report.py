"""What a training run came to, stage by stage."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StageReport:
    """One stage.

    Attributes:
        rank: The pipeline rank that held it.
        layers: Names of its first and last layer, and how many there are.
        parameters: Number of parameter elements.
        peak_in_flight: Most micro-batches whose backward was still due at a time.
        updates: Number of updates of its weights.
        live_versions: Most versions of its weights held at a time.
        weight_bytes: Bytes of these, measured.
        trained_parameters: Of the parameter elements those that are not frozen, at the end.
        backwards_skipped: Backwards with nothing to do, as all is frozen up to this stage.
        gradient_bytes_saved: Bytes of gradients that were not sent to the stage before, as nothing
            there needs them.
    """

    rank: int
    layers: tuple[str, str, int]
    parameters: int
    peak_in_flight: int
    updates: int
    live_versions: int
    weight_bytes: int
    trained_parameters: int
    backwards_skipped: int = 0
    gradient_bytes_saved: int = 0


@dataclass(frozen=True)
class PipelineReport:
    """A training run.

    Attributes:
        schedule: Its name.
        num_microbatches: Per batch.
        stages: In order.
        predicted_bubble: Share of idle time, mean over the ranks, if all stages took the same
            time, a backward twice that of a forward, and communication none. For a continuous
            schedule that of a fill of as many batches as there were on average.
        measured_bubble: Share of the rounds' time outside Forward and Backward, by rank.
        batches: Batches trained.
        continuous: Whether the pipeline stayed full between batches.
    """

    schedule: str
    num_microbatches: int
    stages: tuple[StageReport, ...]
    predicted_bubble: float
    measured_bubble: tuple[float, ...]
    batches: int
    continuous: bool

    def __str__(self) -> str:
        """A table for the terminal."""
        lines = [
            f"Pipeline: {self.schedule}; stages: {len(self.stages)}; micro-batches: "
            f"{self.num_microbatches}; batches: {self.batches}",
            f"{'stage':>5} {'rank':>5} {'layers':<34} {'parameters':>12} {'peak in flight':>15}",
        ]
        if self.continuous:
            lines[1] += f" {'updates':>8} {'versions':>9} {'weight bytes':>13}"
        for index, stage in enumerate(self.stages):
            first, last, count = stage.layers
            names = first if count == 1 else f"{first} .. {last} ({count})"
            line = (
                f"{index:>5} {stage.rank:>5} {names:<34} {stage.parameters:>12,} "
                f"{stage.peak_in_flight:>15}"
            )
            if self.continuous:
                line += f" {stage.updates:>8} {stage.live_versions:>9} {stage.weight_bytes:>13,}"
            lines.append(line)
        measured = sum(self.measured_bubble) / len(self.measured_bubble)
        by_rank = ", ".join(f"{bubble:.1%}" for bubble in self.measured_bubble)
        lines.append(
            f"bubble: predicted {self.predicted_bubble:.1%}, measured {measured:.1%} "
            f"(by rank {by_rank})"
        )
        lines += self._saved()
        return "\n".join(lines)

    def _saved(self) -> list[str]:
        """What frozen layers have spared, if anything."""
        skipped = sum(stage.backwards_skipped for stage in self.stages)
        unsent = sum(stage.gradient_bytes_saved for stage in self.stages)
        if not skipped and not unsent:
            return []
        trained = sum(stage.trained_parameters for stage in self.stages)
        parameters = sum(stage.parameters for stage in self.stages)
        idle = [str(index) for index, stage in enumerate(self.stages) if stage.backwards_skipped]
        where = f" (of stage {', '.join(idle)})" if idle else ""
        return [
            f"frozen: {trained:,} of {parameters:,} parameters are trained; saved: {skipped:,} "
            f"backwards{where}, {unsent:,} bytes of gradients"
        ]
