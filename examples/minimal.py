"""Scikit-learn's handwritten digits on two processes: plain Lightning but for one line."""

from __future__ import annotations

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

from lightning_pipe import PipelineStrategy


class DigitsClassifier(L.LightningModule):
    """A small convolutional network for images of 8 x 8 pixels."""

    def __init__(self, width: int = 32, lr: float = 3e-3) -> None:
        super().__init__()
        self.lr = lr
        self.model = nn.Sequential(
            *[nn.Conv2d(1, width, 3, padding=1), nn.ReLU()],
            *[nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()],
            *[nn.Linear(16 * width, 2 * width), nn.ReLU(), nn.Linear(2 * width, 10)],
        )
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        scores = self.model(batch[0])
        self.accuracy(scores, batch[1])
        self.log("val_loss", F.cross_entropy(scores, batch[1]))
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), self.lr)


def digits(batch_size: int = 64) -> L.LightningDataModule:
    """1797 images, a fifth of them for validation."""
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    dataset = TensorDataset(images.view(-1, 1, 8, 8).float() / 16, labels)
    parts = random_split(dataset, [0.8, 0.2], torch.Generator().manual_seed(1))
    return L.LightningDataModule.from_datasets(*parts, batch_size=batch_size)


if __name__ == "__main__":
    L.seed_everything(1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=PipelineStrategy(schedule="1f1b", num_microbatches=4),  # the one line
        max_epochs=12,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(DigitsClassifier(), digits())
    if trainer.is_global_zero:
        print(f"validation accuracy: {trainer.callback_metrics['val_accuracy']:.1%}")
