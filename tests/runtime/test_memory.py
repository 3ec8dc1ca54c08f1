"""What a stage keeps until its backward, measured by autograd's own hooks."""

from collections import Counter
from contextlib import contextmanager
from weakref import WeakSet

import pytest
import torch
from torch import nn

from .harness import Layout, Module, Rank, on_ranks

WIDTH, SAMPLES = 8, 4  # samples in each micro-batch


class SavedBytes:
    """The bytes of the storages that autograd keeps for this thread, each counted once."""

    def __init__(self, excluded):
        self._excluded = {tensor.untyped_storage().data_ptr() for tensor in excluded}
        self._references, self._now, self.peak = Counter(), 0, 0

    @contextmanager
    def measuring(self):
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor):
            yield

    def _pack(self, tensor):
        saved = _Saved(tensor, self)
        if saved.storage not in self._excluded:
            self._references[saved.storage] += 1
            if self._references[saved.storage] == 1:
                self._now += tensor.untyped_storage().nbytes()
                self.peak = max(self.peak, self._now)
        return saved

    def release(self, saved):
        if saved.storage not in self._excluded:
            self._references[saved.storage] -= 1
            if self._references[saved.storage] == 0:
                self._now -= saved.tensor.untyped_storage().nbytes()


class _Saved:
    """Lives as long as autograd keeps the tensor."""

    def __init__(self, tensor, owner):
        self.tensor, self.owner = tensor, owner
        self.storage = tensor.untyped_storage().data_ptr()

    def __del__(self):
        self.owner.release(self)


class Doubling(Module):
    """Makes what enters stage 0, so that each micro-batch has a storage of its own."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.mse_loss(self.net(2 * x), y)


def make_model(num_stages):
    torch.manual_seed(0)
    return Doubling(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2 * num_stages))
    )


def bytes_of_one_microbatch(num_stages, checkpointing):
    """What the layers of one stage keep of one micro-batch; for "stage" only what enters it."""
    stage = make_model(num_stages).net[:2]
    entering = torch.randn(SAMPLES, WIDTH).double()
    if checkpointing == "stage":
        return entering.nbytes
    saved = SavedBytes(stage.parameters())
    with saved.measuring():
        kept = stage(entering)  # noqa: F841
    return saved.peak


def peak_bytes_of_rank_0(layout, num_stages):
    batch = torch.randn(2, layout.num_microbatches * SAMPLES, WIDTH).double()
    models = [make_model(num_stages) for _ in range(layout.num_ranks)]

    def work(transport):
        rank = Rank(models[transport.rank], layout, transport)
        saved = SavedBytes([*rank.model.parameters(), batch])
        with saved.measuring():
            rank.step(tuple(batch))
        return saved.peak

    return on_ranks(layout.num_ranks, work)[0]


@pytest.mark.parametrize("checkpointing", ["none", "stage"])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_activations_kept_on_stage_0(schedule, num_ranks, count, checkpointing):
    in_flight = {"gpipe": count, "1f1b": min(num_ranks, count)}[schedule]
    layout = Layout(schedule, num_ranks, count, checkpointing=checkpointing)
    peak = peak_bytes_of_rank_0(layout, num_ranks)
    assert peak == in_flight * bytes_of_one_microbatch(num_ranks, checkpointing)


@pytest.mark.parametrize(("num_ranks", "per_rank", "count"), [(2, 2, 8), (2, 3, 8), (3, 2, 6)])
def test_interleaving_keeps_megatrons_number_on_rank_0(num_ranks, per_rank, count):
    """Warm-up of rank 0 and the one that follows it (Narayanan et al. 2021)."""
    in_flight = min((num_ranks - 1) * 2 + (per_rank - 1) * num_ranks + 1, per_rank * count)
    layout = Layout("interleaved", num_ranks, count, per_rank)
    peak = peak_bytes_of_rank_0(layout, num_ranks * per_rank)
    assert peak == in_flight * bytes_of_one_microbatch(num_ranks * per_rank, "none")


def test_layer_checkpointing_keeps_what_enters_each_layer():
    peak = peak_bytes_of_rank_0(Layout("gpipe", checkpointing="layer"), num_stages=2)
    assert peak == 4 * 2 * bytes_of_one_microbatch(2, "stage")  # micro-batches x layers


@pytest.mark.parametrize(
    ("schedule", "count", "expected"),
    [
        ("gpipe", 5, [5, 5, 5, 5]),
        ("1f1b", 8, [4, 3, 2, 1]),
        ("1f1b", 3, [3, 3, 2, 1]),
        ("naive", 1, [1, 1, 1, 1]),
    ],
)
def test_measured_peak_in_flight(schedule, count, expected):
    models = [make_model(4) for _ in range(4)]
    batch = torch.randn(2, count, WIDTH).double()

    def work(transport):
        rank = Rank(models[transport.rank], Layout(schedule, 4, count), transport)
        rank.step(tuple(batch))
        rank.model.net(batch[0])  # evaluation does not count
        return rank.pipeline.measured

    measured = on_ranks(4, work)
    assert [m.peak_in_flight for m in measured] == [{s: peak} for s, peak in enumerate(expected)]
    assert all(m.rounds == 1 and 0 < m.busy <= m.wall for m in measured)


class Watched(nn.Linear):
    """Knows which of its outputs are alive; its backward does not need them."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.alive, self.most = WeakSet(), 0

    def forward(self, x):
        output = super().forward(x)
        self.alive.add(output)
        self.most = max(self.most, len(self.alive))
        return output


def test_what_was_sent_is_not_kept():
    """Only the gradient edge of an output is needed until its backward."""

    def make():
        torch.manual_seed(0)
        return Module(Watched(), nn.Linear(WIDTH, WIDTH))

    models = [make(), make()]
    watched = models[0].net[0]
    batch = torch.randn(2, 8, WIDTH).double()

    def work(transport):
        layout = Layout("gpipe", num_microbatches=8)
        Rank(models[transport.rank], layout, transport).step(tuple(batch))

    on_ranks(2, work)
    assert watched.most <= 2  # the new one, and the last that the loop still has a name for
