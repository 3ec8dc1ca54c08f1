#!/usr/bin/env python3
"""Measure pipeline-parallel engines side by side on one small CPU machine.

Four workloads:

sleep     Every stage sleeps instead of computing, so that 8 processes on 2 cores still
          show the true bubbles of a schedule and the overhead of the engine that runs it.
overhead  The same with no sleep at all: what remains is the engine, autograd and gloo.
gpt       A small GPT trained on the bytes of Python's standard library.
memory    The activation bytes that autograd holds on each rank of the gpt workload.

Peers ("peer/schedule"): lightning_pipe without a Trainer and through Trainer.fit
("lightning_pipe_fit"), torch.distributed.pipelining, DeepSpeed's PipelineEngine, DDP, one
process, and two loops written here over plain send/recv: "naive/sequential" (no overlap at
all) and "raw/1f1b" (the least that a Python engine over gloo can do).

Every measurement is one JSON line on stdout (and in --out); a table comes last, on stderr.
All traffic stays on the loopback interface. DeepSpeed is measured if it can be imported.

Read the sleep ratios against "single/accumulate", which has no pipeline at all: waking up
costs about 1.4 ms a micro-batch here, so that 10 ms sleeps cannot come below 1.05.

    python peers.py sleep
    python peers.py sleep --p 4 --m 8 --only 1f1b --steps 10
    python peers.py all --out results.jsonl
"""

from __future__ import annotations

import argparse
import cProfile
import dataclasses
import functools
import importlib.util
import io
import itertools
import json
import multiprocessing
import os
import pstats
import queue
import resource
import statistics
import sys
import sysconfig
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # else gloo listens on the address of the host name
os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

CPU = torch.device("cpu")
GROUP_TIMEOUT_S = 120  # a rank that waits longer than this for another one fails


@dataclasses.dataclass(frozen=True)
class Job:
    """One line of the result: one peer on one workload."""

    workload: str
    peer: str
    schedule: str
    p: int  # processes
    m: int  # micro-batches in a step
    v: int = 1  # stages (chunks) in a process
    steps: int = 5
    warmup: int = 2
    threads: int = 1  # intra-op threads in a process
    t_f: float = 0.0  # seconds of a rank's forward of one micro-batch (sleep workload)
    t_b: float = 0.0
    checkpointing: bool = False  # recompute the blocks in backward (memory workload)
    profile: bool = False

    @property
    def key(self) -> str:
        return f"{self.peer}/{self.schedule}"


# --------------------------------------------------------------------------- workloads


class Naps:
    """What the sleeps of this process really took."""

    seconds = 0.0
    count = 0


def nap(seconds: float) -> None:
    if seconds > 0:
        start = time.perf_counter()
        time.sleep(seconds)
        Naps.seconds += time.perf_counter() - start
        Naps.count += 1


class Nap(torch.autograd.Function):
    """The identity; sleeps in forward and in backward."""

    @staticmethod
    def forward(ctx, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        nap(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        nap(ctx.backward_s)
        return grad, None, None


class NapStage(nn.Module):
    """A stage that takes t_f forward and t_b backward, and no CPU.

    Half of the backward lies on the path to the input's gradient and half on the path to
    the weight's, so that zero-bubble schedules can take the two apart. The bias comes first
    so that stage 0, whose input needs no gradient, has the same backward as the others.
    """

    def __init__(self, width: int, t_f: float, t_b: float) -> None:
        super().__init__()
        self.t_f, self.t_b = t_f, t_b
        self.bias = nn.Parameter(torch.zeros(width))
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = Nap.apply(x + self.bias, self.t_f, self.t_b / 2)
        return hidden + Nap.apply(self.weight, 0.0, self.t_b / 2)


class SleepWork:
    """Also the overhead workload, where both times are zero."""

    rows, width = 8, 64

    def __init__(self, job: Job) -> None:
        self.job = job
        self.boundary_shape = (self.rows, self.width)

    def stage(self, index: int, count: int) -> nn.Module:
        return NapStage(self.width, self.job.t_f / self.job.v, self.job.t_b / self.job.v)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        shape = (self.rows * self.job.m, self.width)
        return torch.ones(shape), torch.zeros(shape)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target)

    def optimizer(self, parameters) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-3)


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int, recompute: bool) -> None:
        super().__init__()
        self.heads, self.recompute = heads, recompute
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def body(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.body, x, use_reentrant=False)
        return self.body(x)


class Embedding(nn.Module):
    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.token(tokens) + self.position


class GptWork:
    batch_size, length, width, heads, blocks, vocabulary = 32, 128, 256, 4, 8, 256

    def __init__(self, job: Job) -> None:
        self.job = job
        self.boundary_shape = (self.batch_size // job.m, self.length, self.width)
        self.text = stdlib_bytes()

    def stage(self, index: int, count: int) -> nn.Module:
        """The blocks split evenly; every rank draws the whole model, so all agree on it."""
        torch.manual_seed(0)
        first = Embedding(self.vocabulary, self.length, self.width)
        blocks = [Block(self.width, self.heads, self.job.checkpointing) for _ in range(self.blocks)]
        last = nn.Sequential(nn.LayerNorm(self.width), nn.Linear(self.width, self.vocabulary))
        share = self.blocks // count
        layers = blocks[index * share : (index + 1) * share]
        if index == 0:
            layers.insert(0, first)
        if index == count - 1:
            layers.append(last)
        return nn.Sequential(*layers)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(1000 + step)
        starts = torch.randint(len(self.text) - self.length - 1, (self.batch_size,), generator=draw)
        rows = torch.stack([self.text[s : s + self.length + 1] for s in starts]).long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    def optimizer(self, parameters) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3)


def stdlib_bytes(limit: int = 4_000_000) -> Tensor:
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


WORKLOADS = {"sleep": SleepWork, "overhead": SleepWork, "gpt": GptWork, "memory": GptWork}


# ------------------------------------------------------------------------------- peers
#
# A peer is a function (job, work, rank) -> Engine. It raises if the peer refuses the job.


@dataclasses.dataclass
class Engine:
    step: Callable[[int], float | None]  # one optimizer step; the mean loss where it is known
    modules: list[nn.Module]  # what this rank trains
    ideal_s: float | None = None  # the step time of the schedule if all but the sleep were free
    buffer_bytes: Callable[[], int] = lambda: 0  # buffers that the engine keeps between steps


def parameters(modules: list[nn.Module]) -> list[nn.Parameter]:
    return [parameter for module in modules for parameter in module.parameters()]


def torch_pipelining(job: Job, work, rank: int) -> Engine:
    from torch.distributed import pipelining

    loop = range(rank, job.p * job.v, job.p)  # the stages of a rank, where there are v of them
    vee = (rank, 2 * job.p - 1 - rank)
    cls, v, indices = {
        "gpipe": (pipelining.ScheduleGPipe, 1, loop),
        "1f1b": (pipelining.Schedule1F1B, 1, loop),
        "interleaved-1f1b": (pipelining.ScheduleInterleaved1F1B, 2, loop),
        "interleaved-zb": (pipelining.ScheduleInterleavedZeroBubble, 2, loop),
        "zbv": (pipelining.ScheduleZBVZeroBubble, 2, vee),
        "dualpipev": (pipelining.ScheduleDualPipeV, 2, vee),
    }[job.schedule]
    assert v == job.v, f"{job.schedule} is measured with {v} stages in a rank"

    count = job.p * job.v
    modules = [work.stage(index, count) for index in indices]
    stages = [
        pipelining.PipelineStage(module, index, count, CPU)
        for module, index in zip(modules, indices)
    ]
    schedule = cls(stages if v > 1 else stages[0], n_microbatches=job.m, loss_fn=work.loss)
    optimizer = work.optimizer(parameters(modules))
    first, last = any(s.is_first for s in stages), any(s.is_last for s in stages)

    def step(number: int) -> float | None:
        inputs, target = work.batch(number)
        losses: list[Tensor] = []
        optimizer.zero_grad()
        schedule.step(
            *([inputs] if first else []),
            target=target if last else None,
            losses=losses,
            return_outputs=False,
        )
        optimizer.step()
        return torch.stack(losses).mean().item() if last else None

    def buffer_bytes() -> int:
        infos = [
            info
            for stage in stages
            for received in (stage.args_recv_info, stage.grad_recv_info)
            for infos in received.values()
            for info in infos
        ]
        return sum(info.buffer.nbytes for info in infos if info.buffer is not None)

    if v == 1:  # not from pipeline_order: that of Schedule1F1B is wrong for the last rank
        ideal_s = (job.m + job.p - 1) * (job.t_f + job.t_b)
    else:
        ideal_s = makespan(schedule.pipeline_order, job, count)
    return Engine(step, modules, ideal_s, buffer_bytes)


def makespan(pipeline_order: dict[int, list], job: Job, stages: int) -> float:
    """When the last action of a schedule ends if communication and the engine cost nothing.

    Kinds of action: F forward, B backward, I backward of the input, W of the weight.
    """
    t_f, t_b = job.t_f / job.v, job.t_b / job.v
    cost = {"F": t_f, "B": t_b, "I": t_b / 2, "W": t_b / 2}
    todo: dict[int, list[tuple[str, int, int]]] = {}
    for rank, slots in pipeline_order.items():
        actions = [action for slot in slots if slot for action in slot.sub_actions or (slot,)]
        found = ((a.computation_type.value, a.stage_index, a.microbatch_index) for a in actions)
        todo[rank] = [action for action in found if action[0] in cost]
    free = dict.fromkeys(todo, 0.0)  # when the rank is done with what it has
    ends: dict[tuple[str, int, int], float] = {}  # a backward of either kind is "B" here

    def needs(kind: str, stage: int, batch: int) -> Iterator[tuple[str, int, int]]:
        if kind == "F" and stage > 0:
            yield "F", stage - 1, batch
        if kind in "BI":
            yield "F", stage, batch
            if stage < stages - 1:
                yield "B", stage + 1, batch

    while any(todo.values()):
        before = len(ends)
        for rank, actions in todo.items():
            while actions and all(need in ends for need in needs(*actions[0])):
                kind, stage, batch = actions.pop(0)
                ready = max((ends[need] for need in needs(kind, stage, batch)), default=0.0)
                free[rank] = max(free[rank], ready) + cost[kind]
                ends["B" if kind == "I" else kind, stage, batch] = free[rank]
        if len(ends) == before:
            raise ValueError("the schedule deadlocks")
    return max(free.values())


def deepspeed_pipe(job: Job, work, rank: int) -> Engine:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.pipe import PipelineModule

    deepspeed.init_distributed("gloo")  # takes over the process group that is already there
    module = PipelineModule(
        layers=[work.stage(index, job.p) for index in range(job.p)],
        num_stages=job.p,
        loss_fn=work.loss,
        partition_method="uniform",
    )
    batch_size = work.batch(0)[0].shape[0]
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=work.optimizer(module.parameters()),
        config={
            "train_micro_batch_size_per_gpu": batch_size // job.m,
            "gradient_accumulation_steps": job.m,
            "gradient_clipping": 0.0,  # it clips to a norm of 1 unless told not to
            "steps_per_print": 10**9,
        },
    )

    def step(number: int) -> float:
        inputs, target = work.batch(number)
        micro_batches = zip(inputs.chunk(job.m), target.chunk(job.m))
        return engine.train_batch(iter(micro_batches)).item()

    return Engine(step, [module], (job.m + job.p - 1) * (job.t_f + job.t_b))


class Inbox:
    """Receives `count` tensors from a peer, always asking for the next one ahead of need.

    gloo moves no data before the receiver asks for it: asking late costs a round trip.
    """

    def __init__(self, peer: int, shape: tuple[int, ...], count: int) -> None:
        self.peer, self.shape, self.left = peer, shape, count
        self.ask()

    def ask(self) -> None:
        self.left -= 1
        self.buffer = torch.empty(self.shape)
        self.request = dist.irecv(self.buffer, self.peer)

    def take(self) -> Tensor:
        self.request.wait()
        tensor = self.buffer
        if self.left:
            self.ask()
        return tensor


def raw(job: Job, work, rank: int) -> Engine:
    """A pipeline with nothing but autograd and send/recv; two orders of the same actions."""
    module = work.stage(rank, job.p)
    optimizer = work.optimizer(module.parameters())
    first, last = rank == 0, rank == job.p - 1
    ahead = {"1f1b": min(job.m, job.p - 1 - rank), "sequential": 0}[job.schedule]

    def step(number: int) -> float | None:
        inputs, target = (part.chunk(job.m) for part in work.batch(number))
        activations = None if first else Inbox(rank - 1, work.boundary_shape, job.m)
        gradients = None if last else Inbox(rank + 1, work.boundary_shape, job.m)
        waiting: list[tuple[Tensor, Tensor]] = []  # forwards whose backward is due
        sent: list[tuple[dist.Work, Tensor]] = []
        losses: list[Tensor] = []

        def forward(index: int) -> None:
            x = activations.take().requires_grad_() if activations else inputs[index]
            y = module(x)
            if last:
                y = work.loss(y, target[index])
                losses.append(y.detach())
            else:
                sent.append((dist.isend(y.detach(), rank + 1), y))
            waiting.append((x, y))

        def backward() -> None:
            x, y = waiting.pop(0)
            if gradients:
                y.backward(gradients.take())
            else:
                (y / job.m).backward()
            if not first:
                sent.append((dist.isend(x.grad, rank - 1), x.grad))

        optimizer.zero_grad()
        for index in range(ahead):
            forward(index)
        for index in range(ahead, job.m):
            forward(index)
            backward()
        for _ in range(ahead):
            backward()
        for request, _ in sent:
            request.wait()
        optimizer.step()
        return torch.stack(losses).mean().item() if last else None

    slots = job.m * job.p if job.schedule == "sequential" else job.m + job.p - 1
    return Engine(step, [module], slots * (job.t_f + job.t_b))


def one_process(job: Job, work, rank: int) -> Engine:
    """No pipeline: one process, or DDP if there are more; m micro-batches accumulate."""
    module = work.stage(0, 1)
    model = nn.parallel.DistributedDataParallel(module) if job.peer == "ddp" else module
    optimizer = work.optimizer(module.parameters())

    def step(number: int) -> float:
        inputs, target = (part.chunk(job.p)[rank] for part in work.batch(number))
        losses = []
        optimizer.zero_grad()
        for x, y in zip(inputs.chunk(job.m), target.chunk(job.m)):
            loss = work.loss(model(x), y)
            (loss / job.m).backward()
            losses.append(loss.detach())
        optimizer.step()
        mean = torch.stack(losses).mean()
        if job.peer == "ddp":
            dist.all_reduce(mean)
        return mean.item() / job.p

    return Engine(step, [module], job.m * (job.t_f + job.t_b))


def lightning_pipe(job: Job, work, rank: int) -> Engine:
    """This project's runtime, without a Trainer."""
    import ours

    stages = ours.stages_of(job, work, rank)
    ideal_s = ours.ideal_seconds(job.schedule, job.p, job.m, job.v, job.t_f, job.t_b)
    return Engine(ours.step_function(job, work, rank, stages), list(stages.values()), ideal_s)


PEERS = {
    "lightning_pipe": lightning_pipe,
    "torch": torch_pipelining,
    "deepspeed": deepspeed_pipe,
    "raw": raw,
    "naive": raw,
    "single": one_process,
    "ddp": one_process,
}


# --------------------------------------------------------------------------- measuring


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that autograd holds for backward: each storage once, no parameters.

    What non-reentrant checkpointing recomputes inside backward is not seen, its inputs are.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self.ignored = {p.untyped_storage().data_ptr() for p in parameters(modules)}
        self.holders: Counter[int] = Counter()
        self.live = self.peak = 0
        super().__init__(self.pack, self.unpack)

    def pack(self, tensor: Tensor):
        return Held(self, tensor.detach())  # a node that held its own output would leak

    def unpack(self, held: Held) -> Tensor:
        return held.tensor

    def add(self, tensor: Tensor, sign: int) -> None:
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key in self.ignored or not storage.nbytes():
            return
        before = self.holders[key] > 0
        self.holders[key] += sign
        self.live += ((self.holders[key] > 0) - before) * storage.nbytes()
        self.peak = max(self.peak, self.live)


class Held:
    def __init__(self, counter: SavedBytes, tensor: Tensor) -> None:
        self.counter, self.tensor = counter, tensor
        counter.add(tensor, +1)

    def __del__(self) -> None:
        self.counter.add(self.tensor, -1)


def rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def measure(job: Job, rank: int) -> dict:
    """What one rank has to say about one job."""
    torch.set_num_threads(job.threads)
    torch.manual_seed(0)
    bare_mib = rss_mib()
    work = WORKLOADS[job.workload](job)
    if job.peer == "lightning_pipe_fit":
        return measure_fit(job, work, rank, bare_mib)
    try:
        engine = PEERS[job.peer](job, work, rank)
    except Exception as error:  # a constructor's; all ranks refuse alike
        return {"refused": f"{type(error).__name__}: {error}"}

    idle_mib = rss_mib()
    saved = SavedBytes(engine.modules) if job.workload == "memory" else None
    profiler = cProfile.Profile() if job.profile and rank == 0 else None
    spans, cpu_s, losses = [], [], []
    for number in range(job.warmup + job.steps):
        dist.barrier()
        if number == job.warmup:
            Naps.seconds, Naps.count = 0.0, 0
            if profiler:
                profiler.enable()
        cpu, start = time.process_time(), time.perf_counter()
        if saved:
            with saved:
                loss = engine.step(number)
        else:
            loss = engine.step(number)
        spans.append((start, time.perf_counter()))
        cpu_s.append(time.process_time() - cpu)
        losses.append(loss)
    dist.barrier()
    if profiler:
        profiler.disable()
        report = io.StringIO()
        pstats.Stats(profiler, stream=report).sort_stats("tottime").print_stats(25)
        print(job, report.getvalue(), file=sys.stderr)

    return {
        "spans": spans[job.warmup :],
        "cpu_s": statistics.median(cpu_s[job.warmup :]),
        "losses": losses,
        "ideal_s": engine.ideal_s,
        "nap_s": Naps.seconds / job.steps,
        "naps": Naps.count // job.steps,
        "rss_peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "rss_idle_mib": idle_mib,
        "rss_bare_mib": bare_mib,
        "saved_peak_mib": saved.peak / 2**20 if saved else None,
        "buffers_mib": engine.buffer_bytes() / 2**20,
    }


def measure_fit(job: Job, work, rank: int, bare_mib: float) -> dict:
    """The same of a job that runs through Lightning's Trainer, which has a loop of its own."""
    import ours

    os.environ.update(NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    found = ours.measure_fit(job, work, rank)
    naps_a_step = 3 * job.m * job.v if job.t_f else 0
    steps = Naps.count / naps_a_step if naps_a_step else 1
    return {
        "spans": found["spans"],
        "cpu_s": statistics.median(found["cpu"]),
        "losses": found["losses"],
        "ideal_s": found["ideal_s"],
        "nap_s": Naps.seconds / steps,
        "naps": naps_a_step,
        "rss_peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "rss_idle_mib": bare_mib,
        "rss_bare_mib": bare_mib,
        "saved_peak_mib": None,
        "buffers_mib": 0.0,
    }


def worker(rank: int, jobs: list[Job], store: str, answers) -> None:
    world = jobs[0].p
    os.dup2(2, 1)  # DeepSpeed prints; stdout is for the results alone
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))  # DeepSpeed
    # A file as the store: the TCP store would listen on all interfaces.
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )
    for index, job in enumerate(jobs):
        try:
            answers.put((index, rank, measure(job, rank)))
        except Exception:
            answers.put((index, rank, {"failed": traceback.format_exc(limit=-3)}))
            return  # the group is out of step; the others time out
    dist.destroy_process_group()


def run_group(jobs: list[Job]) -> Iterator[tuple[Job, list[dict]]]:
    """Run jobs of one process count, one after the other, in one set of processes."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=worker, args=(rank, jobs, f"{folder}/store", answers))
            for rank in range(jobs[0].p)
        ]
        for process in processes:
            process.start()
        found: dict[tuple[int, int], dict] = {}  # by job and rank; ranks may run ahead
        for index, job in enumerate(jobs):
            wanted = [(index, rank) for rank in range(job.p)]
            while not all(key in found for key in wanted):
                try:
                    *key, answer = answers.get(timeout=5)
                    found[tuple(key)] = answer
                except queue.Empty:
                    if not any(process.is_alive() for process in processes):
                        break
            missing = {"failed": "the process ended without an answer"}
            result = [found.get(key, missing) for key in wanted]
            yield job, result
            if any("failed" in answer for answer in result):
                break
        for process in processes:
            process.join(GROUP_TIMEOUT_S + 30)
            if process.is_alive():  # our own child, by its handle
                process.terminate()
                process.join()


def run(jobs: list[Job]) -> Iterator[dict]:
    """Jobs that can share processes do; after a failure the rest go on in new ones."""
    alone = itertools.count()

    def company(job: Job) -> tuple:
        # a rank's peak RSS only grows: these jobs each get processes of their own
        by_itself = next(alone) if job.workload in ("gpt", "memory") else -1
        return job.workload, job.p, job.peer in ("deepspeed", "lightning_pipe_fit"), by_itself

    for _, jobs_together in itertools.groupby(jobs, company):
        group = list(jobs_together)
        while group:
            done = 0
            for job, answers in run_group(group):
                yield record(job, answers)
                done += 1
            group = group[done:]


def record(job: Job, answers: list[dict]) -> dict:
    line = {name: getattr(job, name) for name in ("workload", "peer", "schedule", "p", "m", "v")}
    line |= {"median_s": None, "ideal_s": None, "ratio": None}
    for fault in ("failed", "refused"):
        found = [answer[fault] for answer in answers if fault in answer]
        if found:
            return line | {"extra": {fault: found[0]}}

    # perf_counter() is one clock for all processes of a machine on Linux
    steps = [
        max(end for _, end in spans) - min(start for start, _ in spans)
        for spans in zip(*(answer["spans"] for answer in answers))
    ]
    median = line["median_s"] = statistics.median(steps)
    ideal = answers[0]["ideal_s"]
    if ideal:
        line |= {"ideal_s": ideal, "ratio": median / ideal}
    losses = next(a["losses"] for a in reversed(answers) if a["losses"][-1] is not None)

    def each(name: str, digits: int = 1) -> list[float]:
        return [round(answer[name], digits) for answer in answers]

    extra = {
        "steps": len(steps),
        "min_s": min(steps),
        "max_s": max(steps),
        "cpu_s": each("cpu_s", 5),
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "load": os.getloadavg()[0],
    }
    if job.workload == "sleep":
        work_s = job.m * (job.t_f + job.t_b)
        stretch = statistics.mean(answer["nap_s"] for answer in answers) / work_s
        extra |= {
            "no_bubble_s": work_s,
            "naps": each("naps"),  # in a step, by rank: 3 m v if no work is done twice
            "nap_stretch": stretch,  # how much longer than asked the sleeps took
            "ratio_to_real_naps": median / ideal / stretch,
        }
    if job.workload == "overhead":
        extra["us_per_microbatch"] = median / job.m * 1e6  # one forward and one backward
        extra["cpu_us_per_microbatch"] = [a["cpu_s"] / job.m * 1e6 for a in answers]
    if job.workload in ("gpt", "memory"):
        tokens = GptWork.batch_size * GptWork.length
        extra |= {
            "threads": job.threads,
            "tokens_per_s": tokens / median,
            "rss_peak_mib": each("rss_peak_mib"),
            "rss_idle_mib": each("rss_idle_mib"),
            "rss_bare_mib": each("rss_bare_mib"),
            "buffers_mib": each("buffers_mib", 2),
        }
    if job.workload == "memory":
        extra |= {"checkpointing": job.checkpointing, "saved_peak_mib": each("saved_peak_mib", 2)}
    return line | {"extra": extra}


def add_gpt_ideal(lines: list[dict]) -> None:
    """The last line's ideal: the work of one process on one thread, split evenly, plus bubbles."""
    line, alone = (
        lines[-1],
        [
            line["median_s"]
            for line in lines
            if line["workload"] == "gpt"
            and line["peer"] == "single"
            and line["extra"]["threads"] == 1
        ],
    )
    if line["workload"] == "gpt" and line["p"] > 1 and line["median_s"] and alone:
        slots = 1 if line["peer"] == "ddp" else (line["m"] + line["p"] - 1) / line["m"]
        line["ideal_s"] = min(alone) / line["p"] * slots
        line["ratio"] = line["median_s"] / line["ideal_s"]


# ------------------------------------------------------------------------ the job lists

OURS = (
    ("lightning_pipe", "gpipe", 1),
    ("lightning_pipe", "1f1b", 1),
    ("lightning_pipe", "interleaved", 2),
    ("lightning_pipe", "zero_bubble", 1),  # H1
    ("lightning_pipe", "zero_bubble", 2),  # ZB-V
)
OURS_FIT = ("lightning_pipe_fit", "1f1b", 1)  # through Trainer.fit
TORCH_SCHEDULES = (
    ("torch", "gpipe", 1),
    ("torch", "1f1b", 1),
    ("torch", "interleaved-1f1b", 2),
    ("torch", "interleaved-zb", 2),
    ("torch", "zbv", 2),
    ("torch", "dualpipev", 2),
)
DEEPSPEED = ("deepspeed", "1f1b", 1)
RAW = ("raw", "1f1b", 1)
NAIVE = ("naive", "sequential", 1)


def sleep_jobs(options) -> Iterator[Job]:
    make = functools.partial(
        Job, "sleep", steps=options.steps or 5, t_f=options.t_f, t_b=2 * options.t_f
    )
    for m in options.m or (1, 32):
        yield make("single", "accumulate", 1, m)
    for p in options.p or (2, 4, 8):
        for peer, schedule, v in (NAIVE, RAW, *OURS, OURS_FIT, *TORCH_SCHEDULES, DEEPSPEED):
            for m in options.m or (1, 4, 8, 32):
                if peer != "naive" or m == 1:
                    yield make(peer, schedule, p, m, v)


def overhead_jobs(options) -> Iterator[Job]:
    make = functools.partial(Job, "overhead", warmup=5, steps=options.steps or 40)
    for m in options.m or (32,):
        yield make("single", "accumulate", 1, m)
    for p in options.p or (2, 4):
        for peer, schedule, v in (RAW, *OURS, OURS_FIT, *TORCH_SCHEDULES, DEEPSPEED):
            for m in options.m or (32,):
                yield make(peer, schedule, p, m, v)


def gpt_jobs(options) -> Iterator[Job]:
    make = functools.partial(Job, "gpt", steps=options.steps or 18)
    for m in (1, 8):
        yield make("single", "accumulate", 1, m, threads=1)
    for m in (1, 8):
        yield make("single", "accumulate", 1, m, threads=2)
    yield make("ddp", "all-reduce", 2, 1)
    for p in options.p or (2,):
        for peer, schedule in (
            ("lightning_pipe", "gpipe"),
            ("lightning_pipe", "1f1b"),
            ("lightning_pipe_fit", "1f1b"),
            ("torch", "gpipe"),
            ("torch", "1f1b"),
            ("deepspeed", "1f1b"),
        ):
            for m in options.m or (4, 8, 16):
                yield make(peer, schedule, p, m)


def memory_jobs(options) -> Iterator[Job]:
    make = functools.partial(Job, "memory", steps=options.steps or 2, warmup=1)
    for p in options.p or (2, 4):
        for checkpointing in (False, True):
            for peer, schedule in (("torch", "gpipe"), ("torch", "1f1b"), ("deepspeed", "1f1b")):
                for m in options.m or (16,):
                    yield make(peer, schedule, p, m, checkpointing=checkpointing)


JOBS = {"sleep": sleep_jobs, "overhead": overhead_jobs, "gpt": gpt_jobs, "memory": memory_jobs}


# ------------------------------------------------------------------------------- output


def remark(line: dict) -> str:
    extra = line["extra"]
    match line["workload"]:
        case "sleep":
            return f"to real naps {extra['ratio_to_real_naps']:.3f}"
        case "overhead":
            cpu = "/".join(f"{us:.0f}" for us in extra["cpu_us_per_microbatch"])
            return f"{extra['us_per_microbatch']:.0f} us a micro-batch, CPU {cpu}"
        case "gpt":
            speed = f"{extra['threads']} thr {extra['tokens_per_s']:.0f} tok/s"
            return f"{speed}, loss {extra['loss_last']:.4f}, RSS MiB {extra['rss_peak_mib']}"
        case "memory":
            recompute = "recompute, " if extra["checkpointing"] else ""
            saved = f"saved MiB {extra['saved_peak_mib']}, buffers {extra['buffers_mib']}"
            return f"{recompute}{saved}, RSS {extra['rss_peak_mib']}"


def table(lines: list[dict]) -> str:
    rows = [f"{'workload peer/schedule':36} p   m  v   step ms ideal ms  ratio"]
    for line in lines:
        what = f"{line['workload']:9}{line['peer']}/{line['schedule']}"
        row = f"{what:36}{line['p']:>2}{line['m']:>4}{line['v']:>3}"
        fault = line["extra"].get("refused") or line["extra"].get("failed")
        if fault:
            rows.append(f"{row}  -- {' '.join(fault.split())[:90]}")
            continue
        row += f"{line['median_s'] * 1e3:10.2f}"
        if line["ideal_s"]:
            row += f"{line['ideal_s'] * 1e3:9.1f}{line['ratio']:7.3f}"
        else:
            row += " " * 16
        rows.append(f"{row}  {remark(line)}")
    return "\n".join(rows)


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workload", choices=(*JOBS, "all"))
    parser.add_argument("--p", type=numbers, help="process counts, as 2,4")
    parser.add_argument("--m", type=numbers, help="micro-batch counts, as 4,8")
    parser.add_argument("--only", default="", help="peers whose 'peer/schedule' contains this")
    parser.add_argument("--steps", type=int, help="timed steps, after the warm-up")
    parser.add_argument("--t-f", type=float, default=0.010, help="seconds of a forward (sleep)")
    parser.add_argument("--profile", action="store_true", help="cProfile of rank 0 on stderr")
    parser.add_argument("--out", type=Path, help="append the JSON lines to this file too")
    options = parser.parse_args()

    chosen = JOBS if options.workload == "all" else [options.workload]
    jobs = [
        dataclasses.replace(job, profile=options.profile)
        for workload in chosen
        for job in JOBS[workload](options)
        if options.only in job.key
    ]
    if importlib.util.find_spec("deepspeed") is None:
        print("deepspeed is not installed: left out", file=sys.stderr)
        jobs = [job for job in jobs if job.peer != "deepspeed"]
    lines = []
    for line in run(jobs):
        lines.append(line)
        add_gpt_ideal(lines)
        text = json.dumps(line)
        print(text, flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(text + "\n")
    print(table(lines), file=sys.stderr)


if __name__ == "__main__":
    main()
