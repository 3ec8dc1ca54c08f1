"""What cannot work ends in an error on every rank, at setup or at the first batch: no hang.

It names what was given, what is expected and what to change.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_pipe import PipelineStrategy

from .lit import CLASSES, FEATURES, Classifier, Options, loader, trainer
from .ranks import Ranks


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"schedule": "1f1p"}, "'1f1p'.*'1f1b'"),
        ({"weight_stashing": False}, "weight_stashing=False.*'1f1b'.*defaults"),
        ({"vertical_sync": True}, "vertical_sync=True.*'1f1b'.*defaults"),
        ({"num_microbatches": 0}, "num_microbatches=0.*from 1"),
        ({"stages_per_rank": 0}, "stages_per_rank=0.*from 1"),
        ({"activation_checkpointing": "all"}, "'all'.*'none', 'stage', 'layer'"),
        ({"evaluation_outputs": "first"}, "'first'.*'all', 'last'"),
        ({"data_parallel_size": "many"}, "data_parallel_size='many'.*a number from 1"),
        ({"process_group_backend": "nccl"}, "'nccl'.*'gloo'"),
    ],
    ids=str,
)
def test_arguments(arguments: Options, says: str) -> None:
    with pytest.raises(MisconfigurationException, match=f"(?s){says}"):
        PipelineStrategy(**arguments)


def test_trainer_of_the_other_package() -> None:
    import pytorch_lightning

    with pytest.raises(Exception, match=r"import Trainer .* from `lightning\.pytorch`"):
        pytorch_lightning.Trainer(accelerator="cpu", devices=2, strategy=PipelineStrategy())


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class SeveralOptimizers(Classifier):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.model.parameters(), lr=0.1) for _ in range(2)]


class OwnBackward(Classifier):
    def backward(self, loss: Tensor) -> None:
        loss.backward()


class Iterating(Classifier):
    def training_step(self, dataloader_iter: Any) -> Tensor:
        return self.loss(next(dataloader_iter)[0])


class CallsTwice(Classifier):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + self.model(batch[0]).sum()


class NeverCalls(Classifier):
    def loss(self, batch: Any) -> Tensor:
        return self.log_temperature * 2


class CallsOneLayer(Classifier):
    """Uses the first layer by itself, which only the first rank has."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + self.model[0](batch[0]).sum()


class Penalty(Classifier):
    """Sums over all weights, most of which no rank has."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + sum(p.sum() for p in self.model.parameters())


class ReturnsNothing(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)


class WithExample(Classifier):
    example_input_array = torch.zeros(2, FEATURES)


class NoSequential(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(FEATURES, CLASSES)


class SeveralSequentials(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(self.model)


class SecondOrder(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Residual(Classifier):
    """Adds something between its layers, which a pipeline would skip."""

    def __init__(self) -> None:
        super().__init__()
        del self.model
        self.first, self.second = nn.Linear(FEATURES, CLASSES), nn.Linear(CLASSES, CLASSES)

    def configure_pipeline(self) -> list[nn.Module]:
        return [self.first, self.second]

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.second(hidden + 1)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])


class Tied(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.model[6].weight = self.model[4].weight


class Unsendable(Classifier):
    """A layer returns a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(ReturnsGenerator(), TakesGenerator())


class ReturnsGenerator(nn.Linear):
    def __init__(self) -> None:
        super().__init__(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return (row for row in super().forward(x))


class TakesGenerator(nn.Linear):
    def __init__(self) -> None:
        super().__init__(CLASSES, CLASSES)

    def forward(self, rows: Any) -> Tensor:
        return super().forward(torch.stack(list(rows)))


Case = tuple[Callable[[], L.LightningModule], Options, Callable[[], Options], str]

CASES: dict[str, Case] = {
    "more stages than layers": (
        Classifier,
        {"schedule": "interleaved", "stages_per_rank": 5},
        dict,
        "10 stages.*8 layers",
    ),
    "partition that does not add up": (Classifier, {"partition": [3, 3]}, dict, r"\[3, 3\].*8"),
    "partition of another length": (Classifier, {"partition": [3, 3, 2]}, dict, "3.*2 stages"),
    "no candidate": (NoSequential, {}, dict, "No nn.Sequential.*module=.*configure_pipeline"),
    "several candidates": (
        SeveralSequentials,
        {},
        dict,
        "'model'.*'model.0'.*module=.*configure_pipeline",
    ),
    "module that is none": (Classifier, {"module": "modle"}, dict, "'modle'.*'model'"),
    "world of another size": (
        Classifier,
        {"pipeline_parallel_size": 3},
        dict,
        "pipeline_parallel_size=3.*2 processes",
    ),
    "micro-batches that do not fit": (
        Classifier,
        {"schedule": "interleaved", "stages_per_rank": 2, "num_microbatches": 3},
        dict,
        "3.*(2|4)",
    ),
    "more micro-batches than samples": (
        Classifier,
        {"num_microbatches": 17},
        dict,
        "num_microbatches=17.*16 samples.*<= 16",
    ),
    "manual optimization": (Manual, {}, dict, "Manual.*manual optimization.*automatic"),
    "several optimizers": (SeveralOptimizers, {}, dict, "several optimizers.*groups"),
    "second-order optimizer": (SecondOrder, {}, dict, "LBFGS.*another optimizer"),
    "own backward": (OwnBackward, {}, dict, "OwnBackward overrides `backward`"),
    "dataloader_iter": (Iterating, {}, dict, "Iterating.*dataloader_iter.*batch"),
    "example input": (WithExample, {}, dict, "WithExample.example_input_array.*None"),
    "shared parameter": (
        Tied,
        {"partition": [5, 3], "schedule": "pipedream"},
        dict,
        "'model.4.weight'.*'model.6.weight'",
    ),
    "called twice": (CallsTwice, {}, dict, "pipelined module twice.*one call"),
    "never called": (NeverCalls, {}, dict, "did not call the pipelined module"),
    "layer of another rank": (CallsOneLayer, {}, dict, "'model.0' lives on another rank"),
    "loss on meta": (Penalty, {}, dict, "meta device.*weight_decay"),
    "no loss": (ReturnsNothing, {}, dict, "returned NoneType.*loss"),
    "glue": (Residual, {}, dict, "Between layers 'first' and 'second'.*move it into a layer"),
    "output that cannot be sent": (Unsendable, {}, dict, "type builtins.generator.*cannot be sent"),
}


def fail(name: str) -> tuple[str, int]:
    """What a rank says to a bad case, and how many steps it has made."""
    module, pipeline, options, _ = CASES[name]
    run = trainer(pipeline, **options())
    try:
        run.fit(module(), loader())
    except Exception as error:
        return "".join(traceback.format_exception(error)), run.global_step
    return "nothing failed", run.global_step


@pytest.mark.parametrize("name", CASES)
def test_every_rank_says_what_is_wrong(ranks: Ranks, name: str) -> None:
    *_, says = CASES[name]
    for rank, (message, steps) in enumerate(ranks.run(2, fail, name)):
        assert re.search(f"(?s)MisconfigurationException: .*{says}", message), (rank, message)
        assert steps == 0


def summarize() -> list[str]:
    module = Classifier()
    run = trainer({}, max_epochs=1, enable_model_summary=True)
    run.fit(module, loader())
    return [type(callback).__name__ for callback in run.callbacks]


def test_the_summary_needs_no_example(ranks: Ranks) -> None:
    """It would count parameters, and with an example run the layers, that a rank does not have."""
    for callbacks in ranks.run(2, summarize):
        assert {"ModelSummary", "RichModelSummary"} & set(callbacks)
