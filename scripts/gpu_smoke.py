#!/usr/bin/env python3
"""Check on one GPU what no CPU can: that what was proven there holds with tensors on a device.

Four ranks share the device; messages and sums go through host memory, over gloo. Each run trains
with plain SGD, and is compared with the same steps written out on the device without a pipeline:
an update by the gradients of one batch, computed with the weights that the schedule says (those of
some updates before, with an asynchronous one). Then: peaks of memory with checkpointing and
offload.

Prints a table, and "GPU smoke: N checks passed" or, with exit code 1, which failed. Without a GPU
it says so and ends with exit code 0.

    python scripts/gpu_smoke.py                  # under six minutes
    python scripts/gpu_smoke.py --device cpu     # the same without a GPU: tries the script itself
    python scripts/gpu_smoke.py --device cpu --short
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import lightning as L
import torch
import torch.multiprocessing as mp
from runtime.device_memory import Run, f_then_b
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_pipe import PipelineStrategy
from lightning_pipe.runtime.host_copies import CudaCopies, PlainCopies

RANKS, LAYERS, WIDTH = 4, 8, 64
BATCHES, BATCH = 6, 16
LR = 2.0
LIMIT_S = 330.0  # for all
CHECK_S = 60.0  # for one; a rank that waits for another gives up before
Result = tuple[str, bool, str]  # name, whether it passed, details


# ------------------------------------------------------------------------------- what is trained


def make_layers() -> nn.Sequential:
    """The same in each process."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))
    )


def make_batches() -> list[list[Tensor]]:
    """Inputs and targets, of all replicas."""
    numbers = torch.Generator().manual_seed(1)
    return [
        [torch.randn(BATCH, WIDTH, generator=numbers) for _ in range(2)] for _ in range(BATCHES)
    ]


class Module(L.LightningModule):
    """Trains on its replica's share of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_layers()
        self.ends: list[float] = []

    def train_dataloader(self) -> Any:
        grid = self.trainer.strategy.grid  # type: ignore[attr-defined]
        mine = [[x[grid.data_rank :: grid.data] for x in batch] for batch in make_batches()]
        return DataLoader(mine, batch_size=None)  # type: ignore[arg-type]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        entering = batch[0].to(self.model[-1][0].weight.dtype) if self.is_half else batch[0]
        return F.mse_loss(self.model(entering).float(), batch[1])

    @property
    def is_half(self) -> bool:
        return bool(self.trainer.precision == "bf16-true")

    def on_train_batch_end(self, *_: Any) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=LR)


def written_out(device: torch.device, delays: Sequence[int]) -> list[Tensor]:
    """The weights after all steps, in 32 bits and without a pipeline.

    Args:
        device: Where to compute.
        delays: For each layer, by how many updates its weights are older than the newest ones when
            a batch reads them.
    """
    model = make_layers().to(device)
    layers = [list(layer.parameters()) for layer in model]
    versions = [[[p.detach().clone() for p in layer]] for layer in layers]
    for number, (inputs, target) in enumerate(make_batches()):
        for layer, kept, delay in zip(layers, versions, delays, strict=True):
            for parameter, value in zip(layer, kept[max(0, number - delay)], strict=True):
                parameter.data = value.clone()
        model.zero_grad()
        F.mse_loss(model(inputs.to(device)), target.to(device)).backward()
        for layer, kept in zip(layers, versions, strict=True):
            pairs = zip(kept[-1], layer, strict=True)
            kept.append([newest - LR * p.grad for newest, p in pairs])
    return [value for kept in versions for value in kept[-1]]


# ---------------------------------------------------------------------------------------- checks


@dataclass(frozen=True)
class Parity:
    """A pipeline trains to the weights of one device."""

    name: str
    pipeline: dict[str, Any]
    precision: str = "32-true"
    tolerance: float = 1e-5
    delays: tuple[int, ...] = (0,) * LAYERS
    num_ranks: int = RANKS
    scales: bool = False  # whether a scaler of losses is expected, on a GPU

    def run(self, device: torch.device, rank: int) -> tuple[bool, str]:
        if device.type == "cpu" and self.pipeline.get("activation_offload"):
            os.environ["LIGHTNING_PIPE_CPU_OFFLOAD"] = "1"
        module = Module()
        trainer = L.Trainer(
            strategy=PipelineStrategy(
                parallel_devices=[device] * self.num_ranks,  # which Trainer(devices=...) refuses
                timeout=timedelta(seconds=CHECK_S - 15),
                **self.pipeline,
            ),
            precision=self.precision,  # type: ignore[arg-type]
            max_epochs=1,
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
        )
        trainer.fit(module)
        if rank != 0:
            return True, ""
        expected = written_out(device, self.delays)
        pairs = list(zip(module.parameters(), expected, strict=True))
        off = max((p.detach().to(device).float() - e).abs().max().item() for p, e in pairs)
        moved = max(
            (e - s.to(device)).abs().max().item() for e, s in zip(expected, start(), strict=True)
        )
        step = statistics.median(
            b - a for a, b in zip(module.ends[:-1], module.ends[1:], strict=True)
        )
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        passed = off <= self.tolerance < moved / 3
        passed &= not (self.scales and device.type == "cuda") or scaler is not None
        return (
            passed,
            f"off by {off:.0e} of {moved:.0e} (allowed {self.tolerance:.0e}), "
            f"{1e3 * step:.1f} ms a step",
        )


def start() -> list[Tensor]:
    """The weights before the first step."""
    return [p.detach() for p in make_layers().parameters()]


@dataclass(frozen=True)
class Memory:
    """What a stage keeps for its backwards leaves the device; gradients stay as they are."""

    name: str = "memory of activations"
    num_ranks: int = RANKS  # of which one has something to do: new processes take longer

    def run(self, device: torch.device, rank: int) -> tuple[bool, str]:
        if rank != 0:
            return True, ""
        copies: Any = CudaCopies(device) if device.type == "cuda" else PlainCopies()
        sizes = {} if device.type == "cuda" else {"width": 16, "rows": 32}
        runs: dict[str, Run] = {}
        f_then_b(device, None, **sizes)  # what a first run allocates for good
        for checkpointing in ("none", "stage"):
            for offload in (None, copies):
                name = checkpointing + ("" if offload is None else " + offload")
                runs[name] = f_then_b(device, offload, checkpointing, **sizes)  # type: ignore[arg-type]
        plain = runs["none"]
        equal = all(
            torch.allclose(a, b, rtol=1e-4, atol=1e-5)
            for run in runs.values()
            for a, b in zip(run.gradients, plain.gradients, strict=True)
        )
        smaller = all(
            run.peak_bytes < 0.8 * plain.peak_bytes for name, run in runs.items() if name != "none"
        )
        peaks = ", ".join(
            f"{name} {run.peak_bytes / 2**20:.0f} MiB in {1e3 * run.seconds:.0f} ms"
            for name, run in runs.items()
        )
        return equal and (smaller or device.type == "cpu"), peaks


Check = Parity | Memory


def all_checks(device: torch.device, short: bool) -> list[Check]:
    """In this order; what is least certain comes late, since a failure costs a new start."""
    behind = tuple(RANKS - 1 - layer * RANKS // LAYERS for layer in range(LAYERS))
    replicas = {"data_parallel_size": 2, "num_microbatches": 4}
    zero_3 = Parity("ZeRO 3", replicas | {"zero_stage": 3})
    if device.type == "cuda":  # layers are gathered by NCCL, which takes one rank for each GPU
        zero_3 = Parity("ZeRO 3, 1 replica", {"zero_stage": 3})
    checks: list[Check] = [
        Parity("1f1b", {"schedule": "1f1b"}),
        Parity("2 replicas", replicas),
        Parity("naive", {"schedule": "naive"}),
        Parity("gpipe", {"schedule": "gpipe"}),
        Parity("interleaved", {"schedule": "interleaved", "stages_per_rank": 2}),
        Parity("zero_bubble", {"schedule": "zero_bubble"}),
        Parity("pipedream", {"schedule": "pipedream"}, delays=behind),
        Parity(
            "pipedream, vertical sync",
            {"schedule": "pipedream", "vertical_sync": True},
            delays=(RANKS - 1,) * LAYERS,
        ),
        Parity("pipedream_2bw", {"schedule": "pipedream_2bw"}, delays=(1,) * LAYERS),
        Parity("checkpointing by stage", {"activation_checkpointing": "stage"}),
        Parity("offload", {"activation_offload": True}),
        Parity(
            "offload, checkpointing by layer",
            {"activation_offload": True, "activation_checkpointing": "layer"},
        ),
        Parity("bf16-mixed", {}, "bf16-mixed", tolerance=2e-3),
        Parity("bf16-true", {}, "bf16-true", tolerance=5e-3),
        Parity("16-mixed", {}, "16-mixed", tolerance=2e-3, scales=True),
        Parity("2 replicas, 16-mixed", replicas, "16-mixed", tolerance=2e-3, scales=True),
        Parity("ZeRO 1", replicas | {"zero_stage": 1}),
        Parity("ZeRO 1, bf16-true", replicas | {"zero_stage": 1}, "bf16-true", tolerance=5e-3),
        Parity("ZeRO 2", replicas | {"zero_stage": 2}),
        zero_3,
        Memory(),
    ]
    return [replace(check, num_ranks=2) for check in (checks[0], checks[-1])] if short else checks


# ------------------------------------------------------------------------------------- processes


def serve(rank: int, port: int, checks: Sequence[Check], device: torch.device, said: Any) -> None:
    """One rank: run the checks one after the other; rank 0 says what came of each."""
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for check in checks:
        os.environ["WORLD_SIZE"] = str(check.num_ranks)  # Lightning drops it after a run
        passed, details = check.run(device, rank)
        if rank == 0:
            said.put((check.name, passed, details))


def run_together(checks: Sequence[Check], device: torch.device, until: float) -> list[Result]:
    """Run checks in one set of processes, up to the first that raises an error or hangs."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    said = mp.get_context("spawn").SimpleQueue()
    results: list[Result] = []
    ranks = mp.spawn(serve, (port, checks, device, said), checks[0].num_ranks, join=False)
    error, limit = "", min(until, time.monotonic() + CHECK_S)
    try:
        ended = False
        while not ended:
            ended = ranks.join(0.2)
            while not said.empty():
                results.append(said.get())
                report(results[-1])
                limit = min(until, time.monotonic() + CHECK_S)
            if time.monotonic() > limit:
                raise TimeoutError("took too long")
    except Exception as failure:
        error = str(failure)
    finally:
        for process in ranks.processes:
            process.kill()
    while not said.empty():
        results.append(said.get())
        report(results[-1])
    if len(results) < len(checks):
        print(error, file=sys.stderr, flush=True)
        lines = error.strip().splitlines() or ["the processes ended without a word"]
        results.append((checks[len(results)].name, False, lines[-1]))
        report(results[-1])
    return results


def report(result: Result) -> None:
    """Print a row of the table."""
    name, passed, details = result
    print(f"| {name} | {'passed' if passed else 'FAILED'} | {details.strip()} |", flush=True)


def main() -> int:
    """Run all, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--short", action="store_true", help="two checks on two ranks only")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("GPU smoke: skipped, torch finds no CUDA device (--device cpu tries the script).")
        return 0
    device = torch.device("cuda:0" if arguments.device == "cuda" else "cpu")
    begin, checks, results = time.monotonic(), all_checks(device, arguments.short), list[Result]()
    print("| check | | |\n|---|---|---|")
    while len(results) < len(checks):
        rest = checks[len(results) :]
        alike = [check for check in rest if check.num_ranks == rest[0].num_ranks]
        results += run_together(alike, device, begin + LIMIT_S)
    failed = [name for name, passed, _ in results if not passed]
    print(f"took {time.monotonic() - begin:.0f} s on {name_of(device)}")
    if failed:
        print(f"GPU smoke: {len(failed)} of {len(results)} checks failed: {', '.join(failed)}")
        return 1
    print(f"GPU smoke: {len(results)} checks passed")
    return 0


def name_of(device: torch.device) -> str:
    """For the last lines."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


if __name__ == "__main__":
    sys.exit(main())
