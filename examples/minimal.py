"""Scikit-learn's handwritten digits on two processes: plain Lightning but for one line."""

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

from lightning_pipe import PipelineStrategy


class DigitsClassifier(L.LightningModule):
    def __init__(self, width=128, lr=3e-3):
        super().__init__()
        self.lr = lr
        first, second, last = nn.Linear(64, width), nn.Linear(width, width), nn.Linear(width, 10)
        self.model = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last)
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        scores = self.model(batch[0])
        self.accuracy(scores, batch[1])
        self.log("val_loss", F.cross_entropy(scores, batch[1]))
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.lr)


def digits(batch_size=64):
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    dataset = TensorDataset(images.float() / 16, labels)
    parts = random_split(dataset, [0.8, 0.2], torch.Generator().manual_seed(1))
    return L.LightningDataModule.from_datasets(*parts, batch_size=batch_size)


if __name__ == "__main__":
    L.seed_everything(1)
    strategy = PipelineStrategy(schedule="1f1b", num_microbatches=4)  # the one line
    trainer = L.Trainer(max_epochs=12, accelerator="cpu", devices=2, strategy=strategy)
    trainer.fit(DigitsClassifier(), digits())
    if trainer.is_global_zero:
        print(f"validation accuracy: {trainer.callback_metrics['val_accuracy']:.1%}")
