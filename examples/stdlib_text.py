"""A text that every machine has: the source code of Python's standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of a text that do not overlap, each with the same piece one byte later.

    Args:
        text: Bytes.
        length: Of a piece.
    """

    def __init__(self, text: bytes, length: int) -> None:
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._length = length

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self._length
        piece = self._text[start : start + self._length + 1].long()
        return piece[:-1], piece[1:]


class StdlibText(L.LightningDataModule):
    """The top-level modules of the standard library.

    Every tenth file is for validation, and of those every twentieth piece: enough, and quick.

    Args:
        context: Bytes in a sample.
        batch_size: Samples in a batch.
    """

    def __init__(self, context: int = 64, batch_size: int = 16) -> None:
        super().__init__()
        self.context, self.batch_size = context, batch_size

    def setup(self, stage: str) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        texts = [file.read_bytes() for file in files]
        training = b"".join(text for i, text in enumerate(texts) if i % 10)
        validation = Windows(b"".join(texts[::10]), self.context)
        self._training = Windows(training, self.context)
        self._validation = Subset(validation, range(0, len(validation), 20))

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(self._training, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(self._validation, self.batch_size)
