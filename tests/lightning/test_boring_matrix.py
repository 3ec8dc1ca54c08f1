"""The demo modules that Lightning ships: each works in a pipeline, or is refused and says why.

Where a module has a single layer, or code between its layers, a subclass says how to cut it.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import demos
from lightning.pytorch.demos import boring_classes as boring
from lightning.pytorch.demos import lstm, transformer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from trainer.lit import Options, numbers, trainer, weights
from trainer.ranks import Ranks

# ------------------------------------------------------------------------------ modules to be cut


class CutBoring(boring.BoringModel):
    """Says that its one layer is all there is to cut."""

    def configure_pipeline(self) -> list[nn.Module]:
        return [self.layer]


class TwoLayers(boring.BoringModel):
    """Has a second layer."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 2)
        self.second = nn.Linear(2, 2)

    def configure_pipeline(self) -> list[nn.Module]:
        return [self.layer, self.second]

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.layer(x))
        return result


class CutDemo(boring.DemoModel):
    """Its ``forward`` flattens before its only layer, and has a ReLU behind it."""

    def configure_pipeline(self) -> list[nn.Module]:
        return [self.l1]


class ChainedDemo(boring.DemoModel):
    """The same with layers for all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Flatten(), self.l1, nn.ReLU())
        del self.l1

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.model(x)
        return result

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("sum", self(batch).sum())

    test_step = validation_step


class Classifies(L.LightningModule):
    """Trains any network that takes images and gives logarithms of probabilities."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        target = torch.zeros(len(batch), dtype=torch.long)
        return F.nll_loss(self.net(batch), target)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class CutNet(Classifies):
    """`Net` has functions between its layers."""

    def __init__(self) -> None:
        super().__init__(boring.Net())

    def configure_pipeline(self) -> list[nn.Module]:
        net: Any = self.net
        return [net.conv1, net.conv2, net.dropout1, net.fc1, net.dropout2, net.fc2]


class CutTransformer(transformer.LightningTransformer):
    """Its layers are no chain: encoder and decoder both take an input."""

    def __init__(self) -> None:
        super().__init__(vocab_size=20)

    def prepare_data(self) -> None:
        """Download nothing."""

    def configure_pipeline(self) -> list[nn.Module]:
        return [self.model.embedding, self.model.transformer, self.model.decoder]


class UncutTransformer(CutTransformer):
    configure_pipeline = None  # type: ignore[assignment]


class Lstm(lstm.LightningLSTM):
    def __init__(self) -> None:
        super().__init__(vocab_size=20)

    def prepare_data(self) -> None:
        """Download nothing."""


class CutLstm(Lstm):
    """Its network also takes and returns the hidden state, and keeps it in the module."""

    def configure_pipeline(self) -> list[nn.Module]:
        net = self.model
        return [net.encoder, net.drop, net.rnn, net.decoder]


class Language(L.LightningModule):
    """A chain with the demo's positional encoding, on the demo's text."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Embedding(vocab_size, 6),
            transformer.PositionalEncoding(6, dropout=0.0),
            nn.Linear(6, vocab_size),
        )

    def loss(self, batch: Any) -> Tensor:
        inputs, target = batch
        return F.cross_entropy(self.model(inputs).flatten(0, 1), target.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.loss(batch))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        result: Tensor = self.model(batch[0])
        return result

    configure_optimizers = Classifies.configure_optimizers


class FromDicts(TwoLayers):
    """For `RandomDictDataset`."""

    def step(self, batch: Any) -> Tensor:
        loss: Tensor = self.loss(self(batch["a"]))
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        result: Tensor = self(batch["b"])
        return result


class FromLists(TwoLayers):
    """For `IterableBoringDataModule`, which combines two loaders in training."""

    def __init__(self) -> None:
        super().__init__(width=4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.step(batch[0] + batch[1])}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return super().validation_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return super().test_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self(batch)


# ----------------------------------------------------------------------------------------- the data


def batches_of(make: Callable[[], Dataset[Any]], batch_size: int = 5) -> DataLoader[Any]:
    return DataLoader(make(), batch_size)


def images() -> DataLoader[Any]:
    return DataLoader(torch.randn(4, 1, 28, 28).double(), 4)  # type: ignore[arg-type]


def tokens() -> DataLoader[Any]:
    pairs = [(row[:-1], row[1:]) for row in torch.randint(0, 20, (8, 6))]
    return DataLoader(pairs, 4)  # type: ignore[arg-type]


def text() -> transformer.WikiText2:
    """The demo's data set, over a text of our own."""
    lines = "\n".join(" ".join(f"w{i * j % 7}" for j in range(9)) for i in range(40))
    with tempfile.TemporaryDirectory() as folder:  # of this rank, which reads all of it at once
        Path(folder, "wikitext-2.txt").write_text(lines)
        return transformer.WikiText2(Path(folder), block_size=6, download=False)


# ---------------------------------------------------------------------------------------- the table


@dataclass
class Case:
    """What happens to a demo.

    Attributes:
        module: Makes what is trained.
        data: Makes a loader or a datamodule; with None the module has loaders.
        sizes: Numbers of ranks that it is tried on.
        refused: What the error says, if it is refused.
        pipeline: Arguments of PipelineStrategy.
    """

    module: Callable[[], L.LightningModule]
    data: Callable[[], Any] | None = None
    sizes: tuple[int, ...] = (2,)
    refused: str | None = None
    pipeline: Options | None = None


NO_LAYERS = r"No nn.Sequential.*configure_pipeline"
CASES: dict[str, list[Case]] = {
    "BoringModel": [
        Case(boring.BoringModel, sizes=(1, 2), refused=NO_LAYERS),
        Case(CutBoring, sizes=(1,)),
        Case(CutBoring, refused="2 stages.*1 layer"),
        Case(TwoLayers, sizes=(1, 2)),
    ],
    "ManualOptimBoringModel": [
        Case(boring.ManualOptimBoringModel, refused="ManualOptimBoringModel.*manual optimization")
    ],
    "DemoModel": [
        Case(
            boring.DemoModel,
            partial(batches_of, partial(boring.RandomDataset, 32, 8)),
            refused=NO_LAYERS,
        ),
        Case(
            CutDemo,
            partial(batches_of, partial(boring.RandomDataset, 32, 8)),
            (1,),
            "'l1'.*move it into a layer",
        ),
        # Its loss is a sum over the batch, so one micro-batch: of several, the mean would count.
        Case(
            ChainedDemo,
            partial(batches_of, partial(boring.RandomDataset, 32, 8)),
            sizes=(1, 2),
            pipeline={"num_microbatches": 1},
        ),
    ],
    "Net": [
        Case(CutNet, images, refused="Between layers 'net.conv1' and 'net.conv2'.*move it into"),
    ],
    "RandomDataset": [Case(TwoLayers, partial(batches_of, partial(boring.RandomDataset, 32, 13)))],
    "RandomDictDataset": [
        Case(FromDicts, partial(batches_of, partial(boring.RandomDictDataset, 32, 13)))
    ],
    "RandomIterableDataset": [
        Case(TwoLayers, partial(batches_of, partial(boring.RandomIterableDataset, 32, 13)))
    ],
    "RandomIterableDatasetWithLen": [
        Case(TwoLayers, partial(batches_of, partial(boring.RandomIterableDatasetWithLen, 32, 13)))
    ],
    "BoringDataModule": [Case(TwoLayers, boring.BoringDataModule)],
    "BoringDataModuleNoLen": [Case(TwoLayers, boring.BoringDataModuleNoLen)],
    "IterableBoringDataModule": [Case(FromLists, boring.IterableBoringDataModule)],
    "LightningTransformer": [
        Case(UncutTransformer, tokens, refused=NO_LAYERS),
        Case(CutTransformer, tokens, refused="'model.embedding'.*"),
    ],
    "LightningLSTM": [
        Case(Lstm, tokens, refused=NO_LAYERS),
        Case(CutLstm, tokens, refused="'model.encoder'.*"),
    ],
    "WikiText2": [Case(partial(Language, 20), partial(batches_of, text))],
}
# Parts of the above; each is in one of its cases.
PARTS = {
    "Transformer": "LightningTransformer",
    "SimpleLSTM": "LightningLSTM",
    "PositionalEncoding": "WikiText2",
    "Dictionary": "WikiText2",
}
NOT_TRIED = {
    "MNISTDataModule": "downloads its data",
    "MNIST": "downloads its data",
    "SequenceSampler": "gives LightningLSTM batches, which is refused",
}


def shipped() -> set[str]:
    """The names of all public classes of Lightning's demos."""
    names = set()
    for info in pkgutil.iter_modules(demos.__path__):
        module = importlib.import_module(f"{demos.__name__}.{info.name}")
        for name, value in inspect.getmembers(module, inspect.isclass):
            if value.__module__ == module.__name__ and not name.startswith("_"):
                names.add(name)
    return names


def test_the_table_has_all_that_lightning_ships() -> None:
    assert shipped() <= CASES.keys() | PARTS.keys() | NOT_TRIED.keys()
    assert CASES.keys() | PARTS.keys() <= shipped()
    assert set(PARTS.values()) <= CASES.keys()


WORKING = [(n, i) for n, cases in CASES.items() for i, c in enumerate(cases) if c.refused is None]
REFUSED = [(n, i) for n, cases in CASES.items() for i, c in enumerate(cases) if c.refused]


def train(pipeline: Options | None, name: str, index: int) -> dict[str, Any]:
    """Fit with validation, validate, test and predict; return all that came out."""
    case = CASES[name][index]
    L.seed_everything(5, verbose=False)
    module = case.module()
    data = case.data() if case.data is not None else None
    limits: Options = {f"limit_{what}_batches": 3 for what in ("train", "val", "test", "predict")}
    where = None if pipeline is None else {**pipeline, **(case.pipeline or {})}
    run = trainer(where, **limits)
    found: dict[str, Any] = {}
    if data is None or isinstance(data, L.LightningDataModule):
        run.fit(module, datamodule=data)
    else:
        run.fit(module, data, data)
    found["metrics"] = numbers(run.callback_metrics)
    found["weights"] = weights(module)
    if name.startswith("Random"):  # a data set: that was enough
        return found
    found["validate"] = run.validate(module, data, verbose=False)
    found["test"] = run.test(module, data, verbose=False)
    found["predict"] = run.predict(module, data)
    return found


def train_all(pipeline: Options | None, names: list[tuple[str, int]]) -> list[dict[str, Any]]:
    return [train(pipeline, name, index) for name, index in names]


@pytest.mark.parametrize("size", [1, 2])
def test_it_works_as_on_one_device(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.chdir(tmp_path)
    names = [(name, index) for name, index in WORKING if size in CASES[name][index].sizes]
    expected = train_all(None, names)

    for rank, results in enumerate(ranks.run(size, train_all, {}, names)):
        for name, actual, theirs in zip(names, results, expected, strict=True):
            for what, value in theirs.items():
                if rank == 0 or what != "weights":
                    assert_close(actual[what], value, f"{name} on rank {rank}, {what}")


def assert_close(actual: Any, expected: Any, where: str) -> None:
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=1e-10, msg=lambda text: f"{where}: {text}"
    )


def say(name: str, index: int) -> str:
    """What a rank says when it is asked to train what cannot be trained."""
    try:
        train({}, name, index)
    except Exception as error:
        return "".join(traceback.format_exception(error))
    return "nothing"


@pytest.mark.parametrize(("name", "index"), REFUSED)
def test_it_is_refused(ranks: Ranks, name: str, index: int) -> None:
    case = CASES[name][index]
    for size in case.sizes:
        for rank, message in enumerate(ranks.run(size, say, name, index)):
            expected = f"(?s)MisconfigurationException: .*{case.refused}"
            assert re.search(expected, message), f"rank {rank} of {size}: {message}"
