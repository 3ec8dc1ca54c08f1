"""How a step may call the pipelined module, and what is said of other ways."""

import copy
import pickle

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from .harness import Layout, Module, Rank, errors_on_ranks, on_ranks, the_cause

WIDTH = 3
RANKS = 3


def make_model(cls):
    torch.manual_seed(0)
    return cls(*(nn.Linear(WIDTH, WIDTH) for _ in range(RANKS)))


def make_batch():
    x, y = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    return x, y


def place(rank, stage, microbatch, doing):
    return f"lightning_pipe: pipeline rank {rank}, stage {stage}, micro-batch {microbatch}, {doing}"


def failure(training_step, num_ranks=RANKS, stages_per_rank=1):
    """Run one batch of a model with this step; the rank that failed, and its error."""
    cls = type("Model", (Module,), {"training_step": training_step})
    models = [make_model(cls) for _ in range(num_ranks)]
    schedule = "1f1b" if stages_per_rank == 1 else "gpipe"
    layout = Layout(schedule, num_ranks, stages_per_rank=stages_per_rank)

    def work(transport):
        Rank(models[transport.rank], layout, transport).step(make_batch())

    return the_cause(errors_on_ranks(num_ranks, work))


def calls_twice(self, batch, batch_idx):
    x, y = batch
    return nn.functional.mse_loss(self.net(x), self.net(y))


def calls_twice_and_hides_it(self, batch, batch_idx):
    output = self.net(batch[0])
    try:
        self.net(batch[1])
    except Exception:
        return nn.functional.mse_loss(output, batch[1])


def never_calls(self, batch, batch_idx):
    return batch[0].mean()


def calls_from_the_second_microbatch_on(self, batch, batch_idx):
    self.runs = getattr(self, "runs", 0) + 1
    return Module.training_step(self, batch, batch_idx) if self.runs > 1 else batch[0].mean()


def swallows_everything(self, batch, batch_idx):
    try:
        return Module.training_step(self, batch, batch_idx)
    except:  # noqa: E722
        return batch[0].mean()


def swallows_and_tries_again(self, batch, batch_idx):
    for _ in range(2):
        try:
            return Module.training_step(self, batch, batch_idx)
        except BaseException:
            pass
    return batch[0].mean()


def loss_on_meta(self, batch, batch_idx):
    Module.training_step(self, batch, batch_idx)
    return sum(parameter.square().sum() for parameter in self.net[0].parameters())


def loss_is_not_scalar(self, batch, batch_idx):
    return nn.functional.mse_loss(self.net(batch[0]), batch[1], reduction="none")


def returns_nothing(self, batch, batch_idx):
    Module.training_step(self, batch, batch_idx)


def returns_a_float(self, batch, batch_idx):
    return Module.training_step(self, batch, batch_idx).item()


def returns_other_keys(self, batch, batch_idx):
    return {"total": Module.training_step(self, batch, batch_idx)}


LAST = RANKS - 1


@pytest.mark.parametrize(
    ("step", "rank", "message"),
    [
        (calls_twice, LAST, "called the pipelined module twice"),
        (calls_twice_and_hides_it, LAST, "called the pipelined module twice"),
        (never_calls, 0, "did not call the pipelined module"),
        (calls_from_the_second_microbatch_on, 0, "did not call the pipelined module"),
        (swallows_everything, 0, "caught the exception by which a stage leaves it"),
        (swallows_and_tries_again, 0, "caught the exception by which a stage leaves it"),
        (loss_on_meta, LAST, "The loss is on the meta device"),
        (loss_is_not_scalar, LAST, r"The loss has shape (2, 3); expected a scalar"),
        (returns_nothing, LAST, "training_step returned NoneType"),
        (returns_a_float, LAST, "training_step returned float"),
        (returns_other_keys, LAST, "with keys ['total']"),
    ],
)
def test_steps_that_cannot_be_pipelined(step, rank, message):
    failed, error = failure(step)
    assert isinstance(error, MisconfigurationException)
    assert message in str(error)
    assert failed == rank
    assert error.__notes__ == [place(rank, rank, 0, "in Forward")]


def test_several_stages_on_one_rank_are_told_apart():
    _, error = failure(swallows_everything, num_ranks=1, stages_per_rank=3)
    assert "caught the exception" in str(error)
    assert error.__notes__ == [place(0, 0, 0, "in Forward")]


def test_except_exception_around_the_call_is_fine():
    class Careful(Module):
        def training_step(self, batch, batch_idx):
            try:
                return super().training_step(batch, batch_idx)
            except Exception as error:
                raise AssertionError("nothing to catch here") from error

    models = [make_model(Careful) for _ in range(2)]
    losses = on_ranks(2, lambda t: Rank(models[t.rank], Layout(), t).fit([make_batch()]))
    assert losses[0] == losses[1]


def test_a_failing_step_says_where():
    def step(self, batch, batch_idx):
        loss = Module.training_step(self, batch, batch_idx)
        if torch.equal(batch[0], make_batch()[0][4:6]):
            raise ZeroDivisionError("of the user")
        return loss

    rank, error = failure(step)
    assert rank == LAST
    assert isinstance(error, ZeroDivisionError)
    assert error.__notes__ == [place(LAST, LAST, 2, "in Forward")]


def test_a_failing_backward_says_where():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ZeroDivisionError("of the user")

    def step(self, batch, batch_idx):
        return Fails.apply(Module.training_step(self, batch, batch_idx))

    rank, error = failure(step)
    assert rank == LAST
    assert isinstance(error, ZeroDivisionError)
    assert error.__notes__ == [place(LAST, LAST, 0, "in Backward")]


def test_a_rank_that_lost_another_says_what_it_waited_for():
    cls = type("Model", (Module,), {"training_step": loss_is_not_scalar})
    models = [make_model(cls) for _ in range(RANKS)]
    layout = Layout(num_ranks=RANKS)

    def work(transport):
        Rank(models[transport.rank], layout, transport).step(make_batch())

    errors = errors_on_ranks(RANKS, work)
    assert sorted(errors) == [0, 1, 2]
    (note,) = errors[1].__notes__
    assert note.startswith("lightning_pipe: pipeline rank 1, stage 1, micro-batch ")
    assert "waiting in Receive" in note


def test_gradients_that_were_there_stay():
    """Lightning zeroes gradients between the step and the backward: they must not be the new."""
    model = make_model(Module)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)

    def work(transport):
        rank = Rank(model, Layout(num_ranks=1), transport)
        result = rank.step(make_batch())
        assert all((p.grad == 7).all() for p in model.parameters())
        rank.optimizer.zero_grad()
        result.deliver(scale=0.5)

    on_ranks(1, work)
    whole = make_model(Module)
    whole.training_step(make_batch(), 0).backward()
    for ours, expected in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad / 2)


def test_what_the_last_rank_attaches_reaches_all():
    models = [make_model(Module) for _ in range(2)]

    def work(transport):
        rank = Rank(models[transport.rank], Layout(), transport)
        step = rank.model.training_step
        attached = f"from rank {transport.rank}"
        result = rank.pipeline.train(step, make_batch(), 0, attach=lambda: attached)
        return result.finished[0].attachment

    assert on_ranks(2, work) == ["from rank 1"] * 2


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))]
)
def test_copies_of_a_pipelined_module_are_ordinary(duplicate):
    """An exponential moving average or a logger copies it; the pipeline can't be copied."""
    model = make_model(Module)
    x, _ = make_batch()

    def work(transport):
        rank = Rank(model, Layout("gpipe", 1, 4, stages_per_rank=3), transport)
        other = duplicate(rank.model.net)
        measured = rank.pipeline._evaluation.executor.measured
        rounds = measured.rounds
        output = other(x)
        assert measured.rounds == rounds, "the copy used the pipeline"
        assert output.requires_grad
        torch.testing.assert_close(output, rank.model.net(x))

    on_ranks(1, work)
