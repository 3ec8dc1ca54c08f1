"""What pipelines of many devices gain, simulated: the tables of the README, as Markdown.

``python benchmarks/scaling.py`` takes about four minutes. On each device a forward takes 1 and a
backward 2, over all of its stages; `lightning_pipe.planning.predict` runs the clock.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Iterable, Sequence

from lightning_pipe.planning import Prediction, predict
from lightning_pipe.schedule import SCHEDULES, Costs, accepts

SCHEDULES_SHOWN = (
    ("gpipe, 1f1b", "1f1b", 1),
    ("interleaved, v=2", "interleaved", 2),
    ("interleaved, v=4", "interleaved", 4),
    ("zero_bubble (H1)", "zero_bubble", 1),
    ("zero_bubble (V)", "zero_bubble", 2),
)


def run(schedule: str, ranks: int, v: int, m: int, latency: float = 0.0) -> Prediction | None:
    """Predict stages of 1/v each; None if the schedule cannot take the numbers."""
    placement = SCHEDULES[schedule].place(ranks, v)
    if not accepts(schedule, placement, m):
        return None
    return predict(schedule, placement, m, Costs(1 / v, 2 / v, communication=latency))


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    print(f"| {' | '.join(headings)} |")
    print(f"|{'---|' * len(headings)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    print(flush=True)


def bubbles(ranks: Sequence[int], factors: Sequence[int]) -> None:
    print("Bubble, for P devices and m micro-batches\n")
    cases = [(p, factor * p) for p in ranks for factor in factors]

    def bubble(schedule: str, v: int, p: int, m: int) -> str:
        predicted = run(schedule, p, v, m)
        return "" if predicted is None else f"{predicted.mean_bubble:.1%}"

    table(
        ["", *(f"P={p}, m={m}" for p, m in cases)],
        [[name, *(bubble(s, v, p, m) for p, m in cases)] for name, s, v in SCHEDULES_SHOWN],
    )


def gain_of_interleaving(ranks: Sequence[int], latencies: Sequence[float], factor: int) -> None:
    print(f"Step time of interleaved over that of 1f1b, m={factor}P, by the time of a message,")
    print("in forwards of a device's whole part; and from which on interleaving is no faster\n")
    rows = []
    for v in (2, 4):
        for p in ranks:

            def ratio(latency: float, p: int = p, v: int = v) -> float:
                ours = run("interleaved", p, v, factor * p, latency)
                other = run("1f1b", p, 1, factor * p, latency)
                assert ours is not None
                assert other is not None
                return ours.makespan / other.makespan

            cells = [f"{ratio(latency):.3f}" for latency in latencies]
            rows.append([f"v={v}, P={p}", *cells, crossing(ratio)])
    table(["", *map(str, latencies), "break-even"], rows)


def crossing(ratio: Callable[[float], float]) -> str:
    """Find by bisection where a ratio that starts below 1 comes to 1."""
    low, high = 0.0, 4.0
    if ratio(high) < 1:
        return f"above {high:g}"
    while high - low > 0.005:
        middle = (low + high) / 2
        low, high = (middle, high) if ratio(middle) < 1 else (low, middle)
    return f"{high:.2f}"


def speed_up(ranks: Sequence[int], m: int, latency: float) -> None:
    print(f"Speed-up over one device, m={m}, a message takes {latency} of a forward\n")

    def gain(schedule: str, v: int, p: int) -> str:
        predicted = run(schedule, p, v, m, latency)
        return "" if predicted is None else f"{3 * m * p / predicted.makespan:.1f}"

    shown = [("gpipe", "gpipe", 1), ("1f1b", "1f1b", 1), *SCHEDULES_SHOWN[1:]]  # messages differ
    table(
        ["", *map(str, ranks)],
        [[name, *(gain(s, v, p) for p in ranks)] for name, s, v in shown],
    )


def cost_of_predicting(cases: Sequence[tuple[str, int, int, int]]) -> None:
    print("Seconds to predict\n")
    rows = []
    for schedule, v, p, m in cases:
        start = time.perf_counter()
        run(schedule, p, v, m)
        seconds = time.perf_counter() - start
        rows.append([schedule, str(v), str(p), str(m), f"{seconds:.1f}"])
    table(["schedule", "stages/rank", "P", "m", "s"], rows)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"Most memory of the process: {peak:.1f} GiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="few devices: in seconds")
    small = parser.parse_args().small
    bubbles([4] if small else [4, 16, 64, 256], [2] if small else [1, 4, 16])
    gain_of_interleaving([4] if small else [4, 16, 64], [0, 0.05, 0.2, 0.5], 4)
    speed_up([2, 4, 8] if small else [2**k for k in range(1, 11)], 32 if small else 2048, 0.05)
    cases = [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble", 2)]
    size = (8, 64) if small else (128, 1024)
    large = [] if small else [("1f1b", 1, 1024, 8192)]
    cost_of_predicting([(*case, *size) for case in cases] + large)


if __name__ == "__main__":
    main()
