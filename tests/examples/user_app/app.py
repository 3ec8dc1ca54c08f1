"""A user's own Hydra app, which selects a strategy of this package."""

import hydra
import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import RandomDataset
from torch import nn

import lightning_pipe


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        return self.model(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@hydra.main(version_base=None, config_path=".", config_name="config")
def main(config):
    L.seed_everything(1)
    trainer = L.Trainer(
        strategy=hydra.utils.instantiate(config.strategy),
        accelerator="cpu",
        devices=config.devices,
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(RandomDataset(8, 64), batch_size=8))
    if trainer.is_global_zero:
        print(f"package: {lightning_pipe.__file__}")
        print(trainer.strategy.report)


if __name__ == "__main__":
    main()
