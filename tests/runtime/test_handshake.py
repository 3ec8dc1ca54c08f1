"""Ranks that are not about to do the same say so, within one batch, and do not hang."""

import pytest
import torch
from torch import nn

from lightning_pipe.runtime.errors import PipelineError
from lightning_pipe.runtime.handshake import checksum

from .harness import Layout, Module, Rank, errors_on_ranks, on_ranks, the_cause

WIDTH = 3


class Biased(Module):
    """Adds something to what it calls the layers with."""

    bias = 0.0

    def training_step(self, batch, batch_idx):
        x, y = batch
        return super().training_step((x + self.bias, y), batch_idx)


def make_models(num_ranks):
    torch.manual_seed(0)
    return [Biased(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))) for _ in range(num_ranks)]


def make_batch(seed=1, samples=8):
    x, y = torch.randn(2, samples, WIDTH, generator=torch.Generator().manual_seed(seed)).double()
    return x, y


def failure(work, num_ranks=2):
    """Run `work` on each rank, once all are built; the rank that failed, and its error."""
    models = make_models(num_ranks)
    layout = Layout(num_ranks=num_ranks)
    return the_cause(errors_on_ranks(num_ranks, lambda t: work(Rank(models[t.rank], layout, t))))


DIFFERENT = {
    "data": lambda rank: make_batch(seed=rank),
    "order of samples": lambda rank: tuple(t.roll(rank, 0) for t in make_batch()),
    "targets": lambda rank: (make_batch()[0], make_batch(seed=rank)[1]),
    "size": lambda rank: make_batch(samples=8 + rank),
    "shape of the same numbers": lambda rank: tuple(
        t.reshape(8, *(1,) * rank, 3) for t in make_batch()
    ),
    "number of micro-batches": lambda rank: make_batch(samples=4 - 2 * rank),
    "dtype": lambda rank: (make_batch()[0], make_batch()[1].float() if rank else make_batch()[1]),
}


@pytest.mark.parametrize("batch_of", DIFFERENT.values(), ids=DIFFERENT)
def test_different_batches(batch_of):
    rank, error = failure(lambda rank: rank.step(batch_of(rank.index)))
    assert rank == 1
    assert isinstance(error, PipelineError)
    assert "ranks 0 and 1 got different batches from the training dataloader" in str(error)
    assert "training batch 0" in str(error)


def test_the_rank_that_differs_is_found_among_many():
    rank, error = failure(lambda rank: rank.step(make_batch(seed=rank.index // 2)), num_ranks=3)
    assert rank == 2
    assert "Pipeline ranks 1 and 2" in str(error)


def test_the_first_difference_is_found_in_a_later_batch():
    def work(rank):
        rank.step(make_batch())
        rank.step(make_batch(seed=rank.index))

    _, error = failure(work)
    assert "training batch 1" in str(error)


def test_different_arguments():
    def work(rank):
        rank.model.bias = float(rank.index)
        rank.step(make_batch())

    rank, error = failure(work)
    assert rank == 1
    assert "called the pipelined module with different arguments" in str(error)
    assert "the training dataloader" in str(error)


def test_different_batch_numbers():
    def work(rank):
        rank.num_batches = 5 * rank.index
        rank.step(make_batch())

    rank, error = failure(work)
    assert rank == 1
    assert "not at the same place: training batch 0 and training batch 5" in str(error)
    assert "the training dataloader" in str(error)


@pytest.mark.parametrize("training", [0, 1])
def test_different_activities(training):
    """A rank whose training data ended early goes on to validation."""

    def work(rank):
        if rank.index == training:
            rank.step(make_batch())
        else:
            with rank.pipeline.evaluating("validation", "val_dataloader", 0):
                rank.model.net(make_batch()[0])

    rank, error = failure(work)
    assert rank == 1
    assert "not at the same place" in str(error)
    assert "validation batch 0" in str(error)
    assert "training batch 0" in str(error)


def test_different_batches_in_evaluation():
    def work(rank):
        with rank.pipeline.evaluating("validation", "val_dataloader", 3):
            rank.model.net(make_batch(seed=rank.index)[0])

    rank, error = failure(work)
    assert rank == 1
    assert "got different batches from val_dataloader (validation batch 3)" in str(error)


def test_equal_batches_pass():
    models = make_models(3)

    def work(transport):
        Rank(models[transport.rank], Layout(num_ranks=3), transport).fit([make_batch()] * 3)

    on_ranks(3, work)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int64,
        torch.uint16, torch.uint32, torch.uint64, torch.complex64,
    ],
)  # fmt: skip
def test_a_checksum_sees_one_element(dtype):
    zeros, other = torch.zeros(2, 5).to(dtype), torch.zeros(2, 5).to(dtype)
    other[1, 4] = 1
    assert checksum([zeros]) == checksum([zeros.clone()])
    assert checksum([zeros]) != checksum([other])


def test_a_checksum_sees_a_change_of_all_samples_of_a_large_tensor():
    large = torch.zeros(5000, 7)
    assert checksum([large]) != checksum([large + 1])


def test_a_checksum_does_not_depend_on_strides():
    x = torch.randn(4, 6)
    assert checksum([x]) == checksum([x.t().contiguous().t()])
    conjugated = torch.complex(x, x).conj()
    assert checksum([conjugated]) == checksum([conjugated.resolve_conj()])


def test_a_checksum_takes_whatever_a_batch_holds():
    others = [
        "text",
        None,
        3,
        torch.empty(0, 4),
        torch.eye(3).to_sparse(),
        torch.ones(2, device="meta"),
    ]
    assert checksum(others) == checksum([])
    assert checksum([torch.tensor(1.0)]) != checksum([torch.tensor(2.0)])


def test_a_checksum_stays_inside_a_tensor_whose_size_no_float32_holds():
    """256 images of 3 x 224 x 224: in float32 the last index is rounded up, out of range."""
    assert checksum([torch.ones(1).expand(256 * 3 * 224 * 224)])
