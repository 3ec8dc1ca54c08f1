"""End a random rank at a random moment, restart from the last checkpoint, compare; many times.

Takes some 15 seconds for each repetition, so that neither pytest nor continuous integration runs
it: ``python tests/soak/restart_after_faults.py [--repetitions 20] [--seed 0]``, from anywhere.
Each repetition launches the script `train.py` as a user does. A rank is killed, or raises; all
ranks must end within 10 s, by an error. The script is then launched again. In the end the weights
must be those of one device that was never interrupted, to 1e-10.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"

from soak.train import EVERY_N_STEPS, MICROBATCHES, STEPS, Faulty, fit  # noqa: E402
from trainer.lit import weights  # noqa: E402
from trainer.scripts import run_script  # noqa: E402

NUM_RANKS, LIMIT_S, TOLERANCE = 3, 10.0, 1e-10


def repeat(
    expected: dict[str, torch.Tensor], fault: list[str], directory: Path
) -> tuple[float, ...]:
    """Fail once and restart.

    Args:
        expected: weights.
        fault: rank, step, micro-batch and how.
        directory: where to run, empty.

    Returns:
        After how many seconds all ranks had ended, the step from which the training went on, and
        by how much a weight differs at most.
    """
    script = Path(__file__).with_name("train.py")
    ended = run_script(script, *fault, directory=directory, num_ranks=NUM_RANKS, moment=2 * LIMIT_S)
    assert ended.code != 0, "the script ended well"
    assert (directory / "failed_at").exists(), ended.output[-4000:]
    took = ended.gone - float((directory / "failed_at").read_text())
    assert "PeerLostError" in ended.output or "ValueError: a fault" in ended.output, ended.output
    restarted = run_script(script, directory=directory, num_ranks=NUM_RANKS)
    assert restarted.code == 0, restarted.output
    actual, resumed = torch.load(directory / "final.pt")
    step = int(Path(resumed).stem.removeprefix("step=")) if resumed else 0
    difference = max(float((actual[n] - w).abs().max()) for n, w in expected.items())
    assert list(actual) == list(expected)
    return took, step, difference


def main() -> None:
    """Repeat, print a line each, and end with an error if any went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    module = Faulty()
    with tempfile.TemporaryDirectory() as empty:
        os.chdir(empty)
        fit(module, None, default_root_dir=empty)
    expected = weights(module)
    wrong = 0
    start = time.monotonic()
    for number in range(options.repetitions):
        ranges = NUM_RANKS, STEPS, MICROBATCHES
        fault = [*(str(chance.randrange(n)) for n in ranges), chance.choice(["kill", "raise"])]
        said = "rank {}, step {}, micro-batch {}: {}".format(*fault)
        with tempfile.TemporaryDirectory() as directory:
            try:
                took, step, difference = repeat(expected, fault, Path(directory))
            except AssertionError as error:
                wrong += 1
                print(f"{number:3} {said}: WRONG: {error}", flush=True)
                continue
        right = took < LIMIT_S and difference <= TOLERANCE
        right &= step == int(fault[1]) // EVERY_N_STEPS * EVERY_N_STEPS
        wrong += not right
        print(
            f"{number:3} {said}: ended after {took:.1f} s, went on from step {step:.0f}, "
            f"difference {difference:.1e}{'' if right else ': WRONG'}",
            flush=True,
        )
    print(f"{options.repetitions} repetitions, {wrong} wrong, {time.monotonic() - start:.0f} s")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
