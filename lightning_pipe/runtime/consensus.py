"""Several pipelines that train one model go on together.

Replicas load data of their own, and each has a first rank that decides for its pipeline. So the
first ranks of all pipelines compare notes before a batch: by one message of some numbers, which
costs no more than the sum of gradients for which replicas meet anyway.
"""

from __future__ import annotations

import zlib
from dataclasses import replace

from lightning_pipe.runtime.errors import PipelineError
from lightning_pipe.runtime.groups import Group
from lightning_pipe.runtime.handshake import Agreement


class Consensus:
    """Lets the pipelines of the world agree; used on the first rank of each.

    Args:
        peers: The first ranks of all pipelines, those of the first replica first.
        per_replica: How many pipelines load the same data, with a part of each layer.
    """

    def __init__(self, peers: Group, per_replica: int = 1) -> None:
        self._peers, self._per_replica = peers, per_replica

    @property
    def is_needed(self) -> bool:
        """Whether there are several pipelines."""
        return self._peers.size > 1

    def reach(self, activity: str, loader: str, batch: int, mine: Agreement) -> Agreement:
        """Agree on what comes next.

        The first pipeline's clock counts. All stop if one is asked to, all end their epoch with
        the first whose data ends, and batches are cut into as many micro-batches as the smallest
        one allows.

        Args:
            activity: As the user calls it, "training" for instance.
            loader: Names where the batch comes from.
            batch: Number of the batch.
            mine: What this pipeline would do.

        Raises:
            PipelineError: They are not at the same place.
        """
        if not self.is_needed:
            return replace(mine, last=False)
        bits = sum(decision << place for place, decision in enumerate(mine.decisions))
        what = zlib.crc32(activity.encode())
        flags = int(mine.asked), int(mine.stops), int(mine.last)
        given = self._peers.gather([what, batch, *flags, mine.count, mine.samples, bits])
        for place, (their_activity, their_batch, *_) in enumerate(given):
            if (their_activity, their_batch) != (what, batch):
                self._refuse(activity, loader, batch, place, their_batch)
        _, _, asked, stops, last, counts, samples, decisions = zip(*given, strict=True)
        total = sum(samples[:: self._per_replica])
        return replace(
            mine,
            asked=any(asked),
            stops=any(stops),
            last=any(last) and not mine.last,  # else its own ranks know, or are wrong
            count=min(counts),
            share=mine.samples / total if total else 1.0,
            decisions=tuple(bool(decisions[0] >> i & 1) for i in range(len(mine.decisions))),
        )

    def confirm(self, loader: str, batch: int, ends: bool) -> None:
        """Raise unless all pipelines pause after a batch, or none does.

        Args:
            loader: Names where the batch comes from.
            batch: Number of the batch.
            ends: Whether this pipeline pauses after it, for validation or for good.

        Raises:
            PipelineError: Replicas would wait for each other.
        """
        if not self.is_needed:
            return
        pauses = [theirs for (theirs,) in self._peers.gather([int(ends)])]
        if len(set(pauses)) > 1:
            who = sorted({i // self._per_replica for i, theirs in enumerate(pauses) if theirs})
            raise PipelineError(
                f"After batch {batch} of {loader}, replicas {who} leave the loop or validate, and "
                "the others do not. Give the data the same length on all replicas, or validate "
                "after a number of batches: val_check_interval is a fraction of a replica's own."
            )

    def _refuse(self, activity: str, loader: str, batch: int, place: int, theirs: int) -> None:
        here = self._peers.index // self._per_replica
        raise PipelineError(
            f"Replicas {here} and {place // self._per_replica} are not at the same place: "
            f"{activity} batch {batch} of {loader}, and there batch {theirs} of this or of another "
            "loop. Replicas must run the same number of batches: give the data the same length on "
            "all of them, and let none skip a step or stop by itself."
        )
