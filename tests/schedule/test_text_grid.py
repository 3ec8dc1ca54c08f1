"""What the drawings look like beyond the pictures of the generators."""

from __future__ import annotations

from lightning_pipe.schedule import (
    Backward,
    Forward,
    Placement,
    Reduce,
    SendActivation,
    Update,
    make_plan,
    simulate,
    text_grid,
)

TWO = make_plan("1f1b", Placement.round_robin(2), 3)


def test_timeline_draws_long_computes_over_several_slots() -> None:
    assert text_grid(simulate(TWO)) == (
        "rank 0 | F0 F1 .. .. B0 -- F2 B1 -- .. B2 --\nrank 1 | .. F0 B0 -- F1 B1 -- F2 B2 -- .. .."
    )


def test_mark() -> None:
    assert text_grid(TWO, mark=Backward(1, 0)) == (
        "rank 0 | F0   F1   ..   B0   F2   B1   ..   B2\n"
        "rank 1 | ..   F0   [B0] F1   B1   F2   B2   .."
    )


def test_what_is_not_a_compute_marks_the_compute_that_it_serves() -> None:
    assert text_grid(TWO, SendActivation(0, 2, peer=1)) == text_grid(TWO, Forward(0, 2))
    assert text_grid(TWO, Update(1)) == text_grid(TWO, Backward(1, 2))


def test_versions() -> None:
    plan = make_plan("pipedream", Placement.round_robin(2), (1, 1, 1))
    assert text_grid(plan, versions=True) == (
        "rank 0 | F0@0 F1@0 ..   B0@0 F2@1 B1@0 ..   B2@1\n"
        "rank 1 | ..   F0@0 B0@0 F1@1 B1@1 F2@2 B2@2 .."
    )
    assert "[F2@1]" in text_grid(plan, mark=Forward(0, 2), versions=True)
    assert "[F3?]" in text_grid(plan, mark=Forward(0, 3), versions=True)


def test_an_update_marks_its_own_last_backward() -> None:
    plan = make_plan("pipedream", Placement.round_robin(2), 3)
    assert text_grid(plan, Update(0, 1)) == text_grid(plan, Backward(0, 1))
    plan = make_plan("pipedream_2bw", Placement.round_robin(2), (2, 3, 1))
    assert text_grid(plan, Reduce(0, 1)) == text_grid(plan, Backward(0, 4))


def test_window() -> None:
    assert text_grid(TWO, mark=Backward(0, 1), max_slots=3) == (
        "rank 0 | ... F2   [B1] ..   ...\nrank 1 | ... B1   F2   B2   ..."
    )
    assert text_grid(TWO, max_slots=2) == "rank 0 | F0 F1 ...\nrank 1 | .. F0 ..."
    assert text_grid(TWO, max_slots=99) == text_grid(TWO)


def test_rank_numbers_are_aligned() -> None:
    rows = text_grid(make_plan("naive", Placement.round_robin(11), 1)).splitlines()
    assert rows[0].startswith("rank  0 | F0")
    assert rows[10].startswith("rank 10 | ..")
