"""A notebook that trains a pipeline, executed as Jupyter does."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

DEFINE = """
import lightning as L, torch
from torch import nn
from torch.utils.data import DataLoader
from lightning_pipe import PipelineStrategy

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))

    def training_step(self, batch, batch_idx):
        return self.model(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

data = DataLoader(torch.randn(1536, 256, generator=torch.Generator().manual_seed(1)), 512)

def train(devices, **options):
    module = Model()
    strategy = PipelineStrategy(num_microbatches=2, **options) if devices > 1 else "auto"
    trainer = L.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, precision="64-true",
    )
    trainer.fit(module, data)
    return module, trainer
"""
# Large enough for torch to compute with several threads, before the fork and after it.
ONE_DEVICE = """
assert torch.get_num_threads() > 1
expected, _ = train(1)
"""
PIPELINE = """
module, trainer = train(2, start_method="fork")
torch.testing.assert_close(module.state_dict(), expected.state_dict(), rtol=0, atol=1e-10)
assert not torch.equal(module.model[0].weight, Model().double().model[0].weight)
print(trainer.strategy.report)
trainer.save_checkpoint("after.ckpt")
saved = torch.load("after.ckpt", weights_only=True)["state_dict"]
torch.testing.assert_close(saved, expected.state_dict(), rtol=0, atol=1e-10)
"""


REFUSED = """
try:
    train(2)
except Exception as error:
    print(error)
"""


def execute(directory: Path, *cells: str) -> list[str]:
    """What the cells print."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(directory)}})
    client.execute()
    return [
        "".join(output.text for output in cell.outputs if output.get("name") == "stdout")
        for cell in notebook.cells
    ]


def test_trained_weights_are_in_the_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # as on a machine with several processors
    for name in ("LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)

    *_, refused, report = execute(tmp_path, DEFINE, ONE_DEVICE, REFUSED, PIPELINE)

    assert "Use start_method='fork'" in refused
    assert "Pipeline: 1f1b; stages: 2; micro-batches: 2; batches: 3" in report
