"""All ranks pause and stop after the same batch, though none waits for another to agree on it."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint, Timer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, IterableDataset

from .lit import Options, assert_equal_weights, trainer, weights
from .ranks import Ranks
from .scripts import run_script

NUM_RANKS, NUM_BATCHES = 3, 12
LIMIT_S = 10.0
SCHEDULES: dict[str, Options] = {
    "gpipe": {"schedule": "gpipe", "num_microbatches": 4},
    "1f1b": {"schedule": "1f1b", "num_microbatches": 4},
    "pipedream": {"schedule": "pipedream"},
}
HOUR = timedelta(hours=1)
AT_ONCE = timedelta(microseconds=1)


class Chain(L.LightningModule):
    """Six layers and nothing beside them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return mse_loss(self.model(batch), batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.model(batch)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def loader(count: int = NUM_BATCHES) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(torch.randn(4 * count, 4, generator=generator).double(), 4)  # type: ignore[arg-type]


@dataclass
class Seen(Callback):
    """What this rank has gone through.

    Attributes:
        last: Number of the last batch that it trained.
        validated: Numbers of the batches after which it validated.
        evaluated: Batches of evaluation.
    """

    last: int = -1
    validated: list[int] = field(default_factory=list)
    evaluated: int = 0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.last = number_of(trainer)

    def on_validation_start(self, *_: Any) -> None:
        self.validated.append(self.last)

    def on_validation_batch_end(self, *_: Any) -> None:
        self.evaluated += 1

    on_test_batch_end = on_validation_batch_end

    __hash__ = object.__hash__


def number_of(trainer: L.Trainer) -> int:
    return trainer.fit_loop.epoch_loop.total_batch_idx


# ------------------------------------------------------------------------------------ SIGTERM


@dataclass(frozen=True)
class Moment:
    """When a rank receives SIGTERM.

    Attributes:
        hook: In which.
        batch: In the hook of which batch, if it has one.
        times: How often.
        waiting: Not in the hook, but in the step that follows, in which it waits for another rank.
        options: Of the Trainer, and how many batches it validates on.
    """

    hook: str = "on_train_batch_start"
    batch: int = 5
    times: int = 1
    waiting: bool = False
    options: Options = field(default_factory=dict)


MOMENTS = {
    "at the beginning of a batch": Moment(),
    "at the end of a batch": Moment("on_train_batch_end"),
    "twice, while it waits for another rank": Moment(times=2, waiting=True),
    "before the first batch": Moment("on_train_start"),
    "in the fill": Moment(batch=0),
    "in the sanity check": Moment("on_sanity_check_start", options={"num_sanity_val_steps": -1}),
    "in the last batch of the sanity check": Moment(
        "on_sanity_check_start", options={"num_sanity_val_steps": 1}
    ),
    "in validation": Moment("on_validation_batch_start", 1, options={"val_check_interval": 5}),
    "in the last batch": Moment(batch=NUM_BATCHES - 1, options={"limit_val_batches": 0}),
}


class Asked(Callback):
    """Sends SIGTERM to the process of one rank, as a cluster that is about to end it."""

    def __init__(self, rank: int, moment: Moment) -> None:
        self._rank, self._moment = rank, moment
        self.at: float | None = None

    def _be_asked(self, hook: str, trainer: L.Trainer, batch: int | None = None) -> None:
        moment = self._moment
        if self.at is not None or hook != moment.hook or batch not in (None, moment.batch):
            return
        self.at = time.monotonic()
        if moment.waiting and trainer.global_rank != self._rank:
            time.sleep(0.3)
        if trainer.global_rank == self._rank:
            for _ in range(moment.times):
                if moment.waiting:
                    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
                else:
                    os.kill(os.getpid(), signal.SIGTERM)

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._be_asked("on_train_start", trainer)

    def on_sanity_check_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._be_asked("on_sanity_check_start", trainer)

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._be_asked("on_train_batch_start", trainer, number_of(trainer))

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._be_asked("on_train_batch_end", trainer, number_of(trainer))

    def on_validation_batch_start(
        self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        if not trainer.sanity_checking:
            self._be_asked("on_validation_batch_start", trainer, batch_idx)

    def on_test_batch_start(
        self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        self._be_asked("on_test_batch_start", trainer, batch_idx)


@dataclass
class Stopped:
    """How a run ended on a rank.

    Attributes:
        seen: Until then.
        by: Name of the exception.
        took: Seconds since a rank was asked.
        step: Of the Trainer.
        trained: Whether all layers were, as the first rank has them in the end.
    """

    seen: Seen
    by: str
    took: float
    step: int
    trained: bool = True


def fit_until_asked(
    schedule: str, rank: int, moment: Moment, directory: Path | None = None, /, **pipeline: Any
) -> Stopped:
    """Train on this rank until the one that is asked has let all know."""
    seen, asked = Seen(), Asked(rank, moment)
    callbacks: list[Callback] = [seen, asked]
    if directory is not None:
        callbacks += [
            ModelCheckpoint(directory, "stopped", save_on_exception=True, save_top_k=0),
            OnExceptionCheckpoint(directory, "on_exception"),
        ]
    options: Options = {"max_epochs": 1, **moment.options, "callbacks": callbacks}
    run = trainer({**SCHEDULES[schedule], **pipeline}, **options, enable_checkpointing=True)
    module = Chain()
    stopped = until_stopped(run, seen, asked, lambda: run.fit(module, loader(), loader(3)))
    if run.is_global_zero and seen.last >= 0:
        before = Chain().double().parameters()
        stopped.trained = not any(map(torch.equal, module.parameters(), before))
    return stopped


def until_stopped(run: L.Trainer, seen: Seen, asked: Asked, function: Callable[[], Any]) -> Stopped:
    by = "nothing"
    try:
        function()
    except BaseException as error:
        by = type(error).__name__
    assert asked.at is not None
    return Stopped(seen, by, time.monotonic() - asked.at, run.global_step)


def assert_stopped_together(stopped: list[Stopped]) -> None:
    assert [one.by for one in stopped] == [SIGTERMException.__name__] * len(stopped)
    assert len({(one.seen.last, one.seen.evaluated, one.step) for one in stopped}) == 1
    assert max(one.took for one in stopped) < LIMIT_S
    assert all(one.trained for one in stopped)


@pytest.mark.parametrize(
    ("schedule", "rank"),
    [
        ("gpipe", 1),
        *((schedule, r) for schedule in ("1f1b", "pipedream") for r in range(NUM_RANKS)),
    ],
)
def test_sigterm_to_any_rank_stops_all_after_the_same_batch(
    ranks: Ranks, schedule: str, rank: int
) -> None:
    moment = MOMENTS["at the beginning of a batch"]

    stopped = ranks.run(NUM_RANKS, fit_until_asked, schedule, rank, moment)

    assert_stopped_together(stopped)
    if rank == 0 or schedule != "pipedream":
        assert stopped[0].seen.last == moment.batch  # as on one device
    else:
        assert moment.batch < stopped[0].seen.last <= moment.batch + NUM_RANKS


@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_where_the_last_stage_is_on_the_first_rank(ranks: Ranks, rank: int) -> None:
    """Of other ranks' signals rank 0 hears a batch later."""
    moment = MOMENTS["at the beginning of a batch"]

    stopped = ranks.run(2, _fit_there_and_back, rank, moment)

    assert_stopped_together(stopped)
    assert stopped[0].seen.last == moment.batch + (rank > 0)


def _fit_there_and_back(rank: int, moment: Moment) -> Stopped:
    there_and_back: Options = {"schedule": "zero_bubble", "stages_per_rank": 2}
    return fit_until_asked("1f1b", rank, moment, **there_and_back)


@pytest.mark.parametrize("moment", [m for m in MOMENTS if m != "at the beginning of a batch"])
@pytest.mark.parametrize(("schedule", "rank"), [("1f1b", 0), ("pipedream", 2)])
def test_sigterm_at_any_moment_stops_all_ranks(
    ranks: Ranks, schedule: str, rank: int, moment: str
) -> None:
    when = MOMENTS[moment]

    stopped = ranks.run(NUM_RANKS, fit_until_asked, schedule, rank, when)

    assert_stopped_together(stopped)
    last, evaluated = stopped[0].seen.last, stopped[0].seen.evaluated
    match moment:
        case "before the first batch":
            assert last < NUM_RANKS + 1
        case "in the sanity check":
            assert (last, evaluated) == (-1, 1)
        case "in the last batch of the sanity check":
            assert (last, evaluated) == (0, 1)
        case "in validation":
            assert (last, evaluated) == (4, 2)  # of three
        case _:
            assert when.batch <= last <= when.batch + 1 + NUM_RANKS


@pytest.mark.parametrize("rank", [0, 2])
def test_sigterm_where_only_the_last_rank_has_outputs(ranks: Ranks, rank: int) -> None:
    """Rank 0 stops validation; of another rank's signal it learns in training."""
    moment = MOMENTS["in validation"]

    stopped = ranks.run(NUM_RANKS, _fit_with_outputs_on_the_last_rank, rank, moment)

    assert_stopped_together(stopped)
    assert stopped[0].seen.evaluated == (2 if rank == 0 else 3)


def _fit_with_outputs_on_the_last_rank(rank: int, moment: Moment) -> Stopped:
    return fit_until_asked("1f1b", rank, moment, evaluation_outputs="last")


def evaluate_until_asked(rank: int) -> Stopped:
    seen, asked = Seen(), Asked(rank, Moment("on_test_batch_start", 1))
    run = trainer(SCHEDULES["1f1b"], callbacks=[seen, asked])
    return until_stopped(run, seen, asked, lambda: run.test(Chain(), loader(), verbose=False))


@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_stops_an_evaluation(ranks: Ranks, rank: int) -> None:
    stopped = ranks.run(NUM_RANKS, evaluate_until_asked, rank)

    assert_stopped_together(stopped)
    assert stopped[0].seen.evaluated == 2


@dataclass
class Saved:
    """What came of a stopped run's checkpoints, on a rank."""

    stopped: Stopped
    expected: dict[str, Tensor]
    resumed: dict[str, Tensor]
    resumed_step: int


def stop_and_resume(schedule: str, rank: int, directory: Path) -> Saved:
    """Stop, train anew up to the same batch, and go on from the checkpoint, on this rank."""
    moment = MOMENTS["at the beginning of a batch"]
    stopped = fit_until_asked(schedule, rank, moment, directory)
    anew, resumed = Chain(), Chain()
    trainer(SCHEDULES[schedule], max_steps=stopped.step).fit(anew, loader())
    run = trainer(SCHEDULES[schedule], max_steps=stopped.step + 3)
    run.fit(resumed, loader(), ckpt_path=directory / "stopped.ckpt", weights_only=False)
    return Saved(stopped, weights(anew), weights(resumed), run.global_step)


@pytest.mark.parametrize(("schedule", "rank"), [("1f1b", 0), ("pipedream", 1)])
def test_the_checkpoint_of_a_stopped_run_is_complete(
    ranks: Ranks, schedule: str, rank: int, tmp_path: Path
) -> None:
    """It has the updates of all batches, and is one that a single device goes on from."""
    saved: Saved = ranks.run(NUM_RANKS, stop_and_resume, schedule, rank, tmp_path)[0]

    last = saved.stopped.seen.last
    assert saved.stopped.step == last + 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["on_exception.ckpt", "stopped.ckpt"]
    for path in tmp_path.iterdir():
        checkpoint = torch.load(path, weights_only=False)
        assert_equal_weights(checkpoint["state_dict"], saved.expected)
        assert checkpoint["global_step"] == last + 1
        assert set(checkpoint["optimizer_states"][0]["state"]) == set(range(12))
    if schedule != "pipedream":
        alone = Chain()
        trainer(None, max_steps=last + 1).fit(alone, loader())
        assert_equal_weights(saved.expected, weights(alone))
    alone = Chain()
    run = trainer(None, max_steps=last + 4)
    run.fit(alone, loader(), ckpt_path=tmp_path / "stopped.ckpt", weights_only=False)
    assert run.global_step == saved.resumed_step == last + 4
    if schedule != "pipedream":
        assert_equal_weights(saved.resumed, weights(alone))


def test_a_script_ends_as_it_does_on_one_device(tmp_path: Path) -> None:
    """All processes that Lightning launched, with exit code 0; the signal comes at any time."""
    script, rank = Path(__file__).with_name("train_until_stopped.py"), 2

    command = [script, "pipedream", str(rank), "0.2"]
    ended = run_script(*command, directory=tmp_path, num_ranks=NUM_RANKS)

    assert ended.code == 0, ended.output
    assert "Traceback" not in ended.output
    written = {path.name: path.read_text() for path in tmp_path.iterdir() if not path.suffix}
    asked_at = float(written[f"asked{rank}"])
    assert all(float(written[f"ended{here}"]) - asked_at < LIMIT_S for here in range(NUM_RANKS))
    (last,) = {int(written[f"last{here}"]) for here in range(NUM_RANKS)}
    assert torch.load(tmp_path / "stopped.ckpt", weights_only=False)["global_step"] == last + 1


def test_ctrl_c_ends_a_script_at_once(tmp_path: Path) -> None:
    """No rank waits for another one's connections, which messages under way keep open."""
    script = Path(__file__).with_name("train_until_stopped.py")

    command = [script, "1f1b", "0", "0.2", "ctrl-c"]
    ended = run_script(*command, directory=tmp_path, num_ranks=NUM_RANKS)

    assert ended.code == 1, ended.output
    assert "Detected KeyboardInterrupt" in ended.output
    done = [float((tmp_path / f"ended{rank}").read_text()) for rank in range(1, NUM_RANKS)]
    assert ended.at - max(done) < LIMIT_S / 2  # a rank that does not end is killed after 6 s


# ------------------------------------------------------------------------------------- clocks


class RankTimer(Timer):
    """On each rank the time is up in another batch."""

    def __init__(self, batches: tuple[int, ...]) -> None:
        super().__init__(HOUR)
        self._batches = batches
        self._trainer: L.Trainer | None = None

    def setup(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        self._trainer = trainer

    def time_elapsed(self, *_: Any) -> float:
        assert self._trainer is not None
        up = number_of(self._trainer) >= self._batches[self._trainer.global_rank]
        return HOUR.total_seconds() if up else 0.0


def fit_with(schedule: str, make: Callable[..., Options], *arguments: Any) -> Seen:
    seen = Seen()
    options = make(int(os.environ["LOCAL_RANK"]), *arguments)
    options = {"max_epochs": 1, **options, "callbacks": [seen, *options.get("callbacks", [])]}
    trainer(SCHEDULES[schedule], **options).fit(Chain(), loader(), loader(1))
    return seen


def with_timer(rank: int, batches: tuple[int, ...]) -> Options:
    return {"callbacks": [RankTimer(batches)], "max_epochs": -1}


@pytest.mark.parametrize("batches", [(4, 99, 99), (4, 1, 2)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_timer_stops_all_ranks_when_the_time_of_rank_0_is_up(
    ranks: Ranks, schedule: str, batches: tuple[int, ...]
) -> None:
    seen = ranks.run(NUM_RANKS, fit_with, schedule, with_timer, batches)

    assert [one.last for one in seen] == [4] * NUM_RANKS


def with_checkpoints(rank: int, times: tuple[timedelta, ...], directory: Path) -> Options:
    every = ModelCheckpoint(
        directory, "{step}", save_top_k=-1, train_time_interval=times[rank], monitor=None
    )
    return {"callbacks": [every], "enable_checkpointing": True}


def with_validations(rank: int, times: tuple[timedelta, ...]) -> Options:
    return {"val_check_interval": times[rank], "check_val_every_n_epoch": None}


TIMES = {True: (AT_ONCE, HOUR, HOUR), False: (HOUR, AT_ONCE, AT_ONCE)}
"""By whether something is due on rank 0 after each batch."""


@pytest.mark.parametrize("due", TIMES)
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_checkpoints_follow_the_clock_of_rank_0(
    ranks: Ranks, schedule: str, due: bool, tmp_path: Path
) -> None:
    seen = ranks.run(NUM_RANKS, fit_with, schedule, with_checkpoints, TIMES[due], tmp_path)

    assert [one.last for one in seen] == [NUM_BATCHES - 1] * NUM_RANKS
    assert len(list(tmp_path.iterdir())) == (NUM_BATCHES if due else 0)


@pytest.mark.parametrize("due", TIMES)
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_validations_follow_the_clock_of_rank_0(ranks: Ranks, schedule: str, due: bool) -> None:
    seen = ranks.run(NUM_RANKS, fit_with, schedule, with_validations, TIMES[due])

    expected = list(range(NUM_BATCHES)) if due else []
    assert [one.validated for one in seen] == [expected] * NUM_RANKS


COLLECTIVES = (
    *("broadcast", "all_reduce", "barrier", "monitored_barrier", "all_gather", "reduce", "gather"),
    *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),
)


class Meetings(Callback):
    """Counts the collectives of torch.distributed from one batch's start to the next one's."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self.by_batch: list[dict[str, int]] = []

    @contextmanager
    def counted(self) -> Iterator[None]:
        patch = pytest.MonkeyPatch()
        for name in COLLECTIVES:
            counting = self._counting(name, getattr(dist, name))
            for module in (dist, distributed_c10d):
                patch.setattr(module, name, counting)
        try:
            yield
        finally:
            patch.undo()

    def _counting(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            self._calls[name] += 1
            return original(*args, **kwargs)

        return counting

    def on_train_batch_start(self, *_: Any) -> None:
        self.by_batch.append(dict(self._calls))
        self._calls.clear()


def count_meetings(pipeline: Options, directory: Path) -> tuple[dict[str, int], Counter[str]]:
    """Those before the first batch, and those between batches."""
    meetings = Meetings()
    clocks = [Timer(HOUR), ModelCheckpoint(directory, train_time_interval=HOUR)]
    run = trainer(
        pipeline,
        max_epochs=1,
        callbacks=[*clocks, meetings],
        enable_checkpointing=True,
        val_check_interval=HOUR,
        check_val_every_n_epoch=None,
    )
    with meetings.counted():
        run.fit(Chain(), loader(), loader(1))
    before, *between = meetings.by_batch
    assert len(between) == NUM_BATCHES - 1
    return before, sum(map(Counter, between), Counter())


@pytest.mark.parametrize("schedule", ["naive", *SCHEDULES])
def test_no_batch_waits_for_all_ranks(ranks: Ranks, schedule: str, tmp_path: Path) -> None:
    """Neither to ask for signals nor for the time."""
    pipeline = SCHEDULES.get(schedule, {"schedule": schedule})

    for before, between in ranks.run(NUM_RANKS, count_meetings, pipeline, tmp_path):
        assert before["barrier"] > 0  # they are counted
        assert not between


# ------------------------------------------------------------------------------ unequal lengths


class Stream(IterableDataset[Tensor]):
    """Ends earlier on one rank than on the others; its length is not known."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __iter__(self) -> Iterator[Tensor]:
        return iter(loader(self._count).dataset[: 4 * self._count])  # type: ignore[index]


def fit_stream(schedule: str, short: int, count: int) -> tuple[str, float]:
    """What a rank raises, and after how long."""
    mine = int(os.environ["LOCAL_RANK"]) == short
    start = time.monotonic()
    message = "nothing was raised"
    try:
        stream = DataLoader(Stream(count if mine else NUM_BATCHES), 4)
        trainer(SCHEDULES[schedule], max_epochs=2).fit(Chain(), stream)
    except Exception as error:
        message = "".join(traceback.format_exception(error))
    return message, time.monotonic() - start


@pytest.mark.parametrize("short", range(NUM_RANKS))
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_data_that_ends_earlier_on_one_rank_is_an_error(
    ranks: Ranks, schedule: str, short: int
) -> None:
    for message, took in ranks.run(NUM_RANKS, fit_stream, schedule, short, 5):
        said = re.search(r"ranks (\d) and (\d) disagree on where training pauses", message)
        assert said is not None, message
        assert str(short) in said.groups()
        assert "after training batch 4 of train_dataloader" in message
        assert took < LIMIT_S


@pytest.mark.parametrize("short", [0, 2])
def test_data_that_is_empty_on_one_rank_is_an_error(ranks: Ranks, short: int) -> None:
    for message, took in ranks.run(NUM_RANKS, fit_stream, "1f1b", short, 0):
        assert "are not at the same place" in message
        assert took < LIMIT_S


# ------------------------------------------------------------------------------------ unpatched


def fit_again(directory: Path) -> list[list[str]]:
    """What of the Trainer and its callbacks is replaced, before and after fits."""
    timer = Timer(HOUR)
    callbacks = [timer, ModelCheckpoint(directory, train_time_interval=HOUR)]
    options: Options = {"enable_checkpointing": True, "callbacks": callbacks, "max_epochs": 1}
    options |= {"val_check_interval": HOUR, "check_val_every_n_epoch": None}
    run = trainer(SCHEDULES["pipedream"], **options)
    replaced = [_replaced(run)]
    for epochs in (1, 2):
        run.fit_loop.max_epochs = epochs
        run.fit(Chain(), loader(), loader(1))
        replaced.append(_replaced(run))
    run.test(Chain(), loader(1), verbose=False)
    replaced.append(_replaced(run))
    assert run.global_step == 2 * NUM_BATCHES
    if run.global_rank == 0:
        timer._duration = 0.0
        alone = trainer(None, **options)
        alone.fit(Chain(), loader(), loader(1))
        assert alone.global_step == 0
    return replaced


def _replaced(run: L.Trainer) -> list[str]:
    """Methods that instances have of their own."""
    loop = run.fit_loop
    owners = [
        *(run, run.strategy, run._signal_connector, run._logger_connector, run.precision_plugin),
        *(loop, loop.epoch_loop, loop.epoch_loop.val_loop, *run.callbacks),  # type: ignore[attr-defined]
    ]
    return [
        f"{type(owner).__name__}.{name}"
        for owner in owners
        for name, value in vars(owner).items()
        if callable(value) and callable(getattr(type(owner), name, None))
    ]


def test_after_a_run_nothing_is_replaced(ranks: Ranks, tmp_path: Path) -> None:
    for before, *after in ranks.run(NUM_RANKS, fit_again, tmp_path):
        assert after == [before] * 3
