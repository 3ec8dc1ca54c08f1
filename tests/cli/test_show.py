"""``lightning-pipe show``: what it prints, and the files that it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_pipe.cli import main
from lightning_pipe.schedule import Costs, Placement, make_plan, simulate, text_grid
from lightning_pipe.schedule.registry import look_up


@pytest.fixture(autouse=True)
def no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Any:
    """Give what a command line prints."""

    def run(*args: str) -> str:
        assert main(["show", *args]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def numbers(show: Any) -> Any:
    return lambda *args: json.loads(show(*args, "--json"))


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Any:
    """Give why a command line is refused."""

    def run(*args: str) -> str:
        assert main(["show", *args]) == 2
        return capsys.readouterr().err

    return run


def test_grid_and_table(show: Any) -> None:
    plan = make_plan("1f1b", Placement.round_robin(4), 8)
    lines = show().splitlines()
    assert lines[0] == "1f1b, 4 ranks, 8 micro-batches"
    assert "\n".join(lines[1:5]) == text_grid(plan), "a backward as long as a forward"
    assert [line.split() for line in lines[7:11]] == [
        [str(rank), str(rank), "27.3%", str(4 - rank), "1", "0"] for rank in range(4)
    ]
    assert lines[11].startswith("makespan 33, with a forward of 1 and a backward of 2")
    assert "bubble 27.3%" in lines[11]


def test_given_costs_are_drawn(show: Any) -> None:
    plan = make_plan("gpipe", Placement.round_robin(2), 2)
    costs = Costs([1, 2], [2, 4], communication=1.0)
    output = show("gpipe", "--ranks=2", "--microbatches=2", "--forward=1,2", "--communication=1")
    assert text_grid(simulate(plan, costs)) in output
    assert f"makespan {simulate(plan, costs).makespan:g};" in output


@pytest.mark.parametrize(
    ("args", "name", "stages", "batches", "costs"),
    [
        (["zero_bubble", "--stages-per-rank=2"], "zero_bubble", 2, 8, Costs()),
        (["interleaved", "--stages-per-rank=2", "--ranks=4"], "interleaved", 2, 8, Costs()),
        (["pipedream", "--microbatches=1", "--batches=6"], "pipedream", 1, (1,) * 6, Costs()),
        (["1f1b", "--backward=3", "--microbatches=5"], "1f1b", 1, 5, Costs(backward=3.0)),
        (
            ["zero_bubble", "--backward=3", "--backward-weight=1,1,1,2.5"],
            "zero_bubble",
            1,
            8,
            Costs(backward=3.0, backward_weight=[1, 1, 1, 2.5]),
        ),
        (["naive"], "naive", 1, 1, Costs()),
    ],
)
def test_json(
    args: list[str], name: str, stages: int, batches: Any, costs: Costs, numbers: Any
) -> None:
    plan = make_plan(name, look_up(name).place(4, stages), batches)
    timeline = simulate(plan, costs)
    found = numbers(*args)
    assert found["schedule"] == name
    assert found["rank_of_stage"] == list(plan.placement.rank_of)
    assert found["batches"] == list(plan.batches)
    assert found["makespan"] == pytest.approx(timeline.makespan)
    assert found["bubble_by_rank"] == pytest.approx(timeline.bubble)
    assert found["peak_in_flight_by_stage"] == list(timeline.peak_in_flight)


def test_versions_of_pipedream(show: Any, numbers: Any) -> None:
    args = ["pipedream", "--ranks=3", "--microbatches=1", "--batches=8"]
    assert "F3@1" in show(*args, "--versions")
    assert "@" not in show(*args)
    found = numbers(*args)
    assert found["staleness_by_stage"] == [2, 1, 0]
    assert found["live_versions_by_stage"] == [3, 2, 1]
    assert numbers(*args, "--vertical-sync")["live_versions_by_stage"] == [3, 3, 3]
    assert numbers(*args, "--no-weight-stashing")["live_versions_by_stage"] == [1, 1, 1]


def test_slots(show: Any) -> None:
    output = show("gpipe", "--slots", "3")
    assert "rank 0 | F0 F1 F2 ...\n" in output
    assert "the first 3 of 22 slots\n" in output


def test_many_ranks_have_a_short_table(show: Any) -> None:
    output = show("gpipe", "--ranks=100", "--microbatches=2", "--slots=1")
    table = output.partition("rank  stages")[2].splitlines()
    assert len(table) < 40
    assert any(line.split()[:2] == ["99", "99"] for line in table)


def test_csv_there_and_back(show: Any, numbers: Any, tmp_path: Path, refused: Any) -> None:
    """A file knows its ranks, stages and micro-batches."""
    path = str(tmp_path / "there.csv")
    args = ["interleaved", "--ranks=2", "--stages-per-rank=3", "--microbatches=6"]
    assert path in show(*args, "--output", path)
    assert numbers(path) == numbers(*args) | {"schedule": path, "output": None}
    assert "for 2 ranks" in refused(path, "--ranks=3")


def test_picture(show: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "a.svg"
    show("zero_bubble", "--output", str(path))
    assert "<svg" in path.read_text()


def test_trace(numbers: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    assert numbers("1f1b", "--output", str(path))["output"] == str(path)
    entries = json.loads(path.read_text())["traceEvents"]
    slices = [entry for entry in entries if entry.get("cat") == "compute"]
    assert len(slices) == 4 * 8 * 2
    assert max(entry["ts"] + entry["dur"] for entry in slices) == 33_000


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--output", "a.txt"], "must end in one of .png"),
        (["--slots", "0"], "--slots=0 must be at least 1"),
        (["--batches", "0"], "--batches=0 must be at least 1"),
        (["--batches", "2"], "synchronous and drains after each"),
        (["--ranks", "0"], "num_ranks=0"),
        (["--microbatches", "0"], "num_microbatches=0 must be at least 1"),
        (["--forward", "1,2"], "forward=[1.0, 2.0] must be one cost, or 4"),
        (["--vertical-sync"], "vertical_sync=True has no effect"),
        (["interleaved"], "set stages_per_rank"),
        (["pipedream", "--output", "a.csv"], "export a synchronous schedule"),
    ],
)
def test_refused(
    args: list[str], message: str, refused: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refused(*args)
    assert not list(tmp_path.iterdir())
