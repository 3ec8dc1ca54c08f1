"""Schedules that torch.distributed.pipelining writes are ours, and ours are its."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed.pipelining.schedules as torch_schedules

from lightning_pipe.schedule import (
    Backward,
    Forward,
    Placement,
    ScheduleError,
    accepts,
    dump_csv,
    load_csv,
    look_up,
    make_plan,
)


def torch_schedule(name: str, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> Any:
    """An object of torch's, for rank 0, with stages that only say where they are."""
    num_stages = num_ranks * stages_per_rank
    stages = [
        SimpleNamespace(
            group=None,
            group_size=num_ranks,
            group_rank=0,
            num_stages=num_stages,
            stage_index=index,
            is_first=index == 0,
            is_last=index == num_stages - 1,
            has_backward=True,
            submod=None,
        )
        for index in range(stages_per_rank)
    ]
    return getattr(torch_schedules, name)(stages, num_microbatches, loss_fn=lambda *_: None)


TORCH = [
    ("ScheduleInterleaved1F1B", 4, 2, 8),
    ("ScheduleLoopedBFS", 3, 2, 5),
    ("ScheduleInterleavedZeroBubble", 2, 2, 4),
    ("ScheduleZBVZeroBubble", 3, 2, 6),
    ("ScheduleZBVZeroBubble", 4, 2, 12),
    ("ScheduleDualPipeV", 2, 2, 4),
    ("ScheduleDualPipeV", 3, 2, 8),
]


def in_torchs_spelling(order: Any) -> list[list[str]]:
    """The computes of torch's order, overlapping ones apart."""
    rows = []
    for rank in sorted(order):
        steps = [step for step in order[rank] if step is not None]
        rows.append([str(part) for step in steps for part in (step.sub_actions or (step,))])
    return rows


@pytest.mark.parametrize(("name", "num_ranks", "stages_per_rank", "count"), TORCH)
def test_what_torch_writes_is_a_valid_plan(
    tmp_path: Path, name: str, num_ranks: int, stages_per_rank: int, count: int
) -> None:
    theirs = torch_schedule(name, num_ranks, stages_per_rank, count)
    path = str(tmp_path / f"{name}.csv")
    theirs._dump_csv(path)

    placement = look_up(path).place(num_ranks, stages_per_rank)
    plan = make_plan(path, placement, count)  # validates

    computes = [[str(s) for s in steps] for steps in load_csv(path)]
    assert computes == in_torchs_spelling(theirs.pipeline_order)
    assert set(plan.placement.stages_of(0)) == {0, num_ranks * 2 - 1 if "V" in name else num_ranks}
    assert make_plan(path, placement, count, "rendezvous").num_microbatches == count


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_our_zb_v_is_torchs(num_ranks: int) -> None:
    for count in (2 * num_ranks, 2 * num_ranks + 3):
        theirs = torch_schedule("ScheduleZBVZeroBubble", num_ranks, 2, count)
        ours = make_plan("zero_bubble", Placement.v_shaped(num_ranks), count)
        assert [row.split(",") for row in dump_csv(ours).split()] == in_torchs_spelling(
            theirs.pipeline_order
        )


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zero_bubble"])
def test_ours_are_read_by_torch_and_by_us(tmp_path: Path, schedule: str) -> None:
    placement = look_up(schedule).place(2, 2)
    plan = make_plan(schedule, placement, 4)
    path = tmp_path / "ours.csv"
    path.write_text(dump_csv(plan))

    again = make_plan(str(path), look_up(str(path)).place(2, 2), 4)
    assert again.programs == plan.programs

    theirs = torch_schedule("ScheduleLoopedBFS", 2, 2, 4)
    theirs._load_csv(str(path), format="compute_only")
    assert in_torchs_spelling(theirs.pipeline_order) == [
        row.split(",") for row in dump_csv(plan).split()
    ]


def test_idle_cells_and_communication_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("0F0,0SEND_F0,,0RECV_B0,0B0,0REDUCE_GRAD\n ,1RECV_F0,1F0, 1B0,1SEND_B0\n\n")
    plan = make_plan(str(path), Placement.round_robin(2), 1)
    assert plan.programs == make_plan("gpipe", Placement.round_robin(2), 1).programs


def test_a_file_takes_its_own_shape_only(tmp_path: Path) -> None:
    path = str(tmp_path / "a.csv")
    Path(path).write_text(dump_csv(make_plan("1f1b", Placement.round_robin(2), 3)))
    assert accepts(path, Placement.round_robin(2), 3)
    assert not accepts(path, Placement.round_robin(2), 4)
    with pytest.raises(ScheduleError, match="for batches of 3 micro-batches"):
        make_plan(path, Placement.round_robin(2), 4)
    with pytest.raises(ScheduleError, match="is for 2 ranks and 2 stages in all"):
        look_up(path).place(4, 1)
    assert look_up(path).most_microbatches(Placement.round_robin(2)) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0X0\n", r"row 1: '0X0' is no compute; expected cells as '2F0'"),
        ("", "has no computes"),
        ("0F0,0B0,1F0\n1B0\n", "stage 1 is on ranks 0 and 1"),
        ("0F0,0B0\n2F0,2B0\n", "no row has stage 1"),
        ("0F0\n1F0,1B0\n", "0B0 is missing"),
        ("0B0,0F0\n1F0,1B0\n", "0RECV_B0 waits for ever, a deadlock"),
        ("0F0,0B0\n1F0,1I0\n", "1W0 is missing"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = str(tmp_path / "wrong.csv")
    Path(path).write_text(text)
    with pytest.raises(ScheduleError, match=message):
        make_plan(path, look_up(path).place(2, 1), 1)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"none\.csv'?: No such file"):
        look_up(str(tmp_path / "none.csv"))


def test_files_of_excel(tmp_path: Path) -> None:
    path = tmp_path / "marked.csv"
    path.write_text("0F0,0B0\n", encoding="utf-8-sig")
    assert load_csv(path) == ((Forward(0, 0), Backward(0, 0)),)
    path.write_text("0F0,0B0\n", encoding="utf-16")
    with pytest.raises(ScheduleError, match="is no text in UTF-8"):
        load_csv(path)


def test_asynchronous_schedules_cannot_be_exported() -> None:
    with pytest.raises(ScheduleError, match="makes 4 updates"):
        dump_csv(make_plan("pipedream", Placement.round_robin(2), (2, 2)))
