"""Hugging Face's models train in a pipeline as on one device, attention masks and all."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from trainer.lit import Options, assert_equal_weights, trainer, weights
from trainer.ranks import Ranks
from transformers import (
    BertForSequenceClassification,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    ViTForImageClassification,
)

from .hugging_face import LitModel, in_float64, make_batches, make_model

THEIRS = {
    "gpt2": GPT2LMHeadModel,
    "llama": LlamaForCausalLM,
    "bert": BertForSequenceClassification,
    "vit": ViTForImageClassification,
}
ONE_F_ONE_B = {"schedule": "1f1b", "num_microbatches": 4}
INTERLEAVED = {"schedule": "interleaved", "stages_per_rank": 2, "num_microbatches": 4}
ZERO_BUBBLE = {"schedule": "zero_bubble", "num_microbatches": 4}


def call(model: Any, batch: dict[str, Tensor]) -> Tensor:
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return model(**inputs).logits


@pytest.mark.parametrize("name", THEIRS)
def test_the_chain_computes_what_hugging_face_computes(name: str) -> None:
    ours = make_model(name).double().eval()
    theirs = THEIRS[name](ours.config).double().eval()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    (batch,) = make_batches(name, (8,))

    outputs = call(ours, batch), call(theirs, batch)
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-12)
    if "attention_mask" in batch:
        unmasked = {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}
        assert (call(ours, unmasked) - outputs[0]).abs().max() > 1e-6


def fit(
    pipeline: Options | None, name: str, dropout: float = 0.0, tied: bool = False
) -> tuple[dict[str, Tensor], Any]:
    """Train for three steps of AdamW with clipping; the weights, and all outputs afterwards."""
    L.seed_everything(3, verbose=False)
    module = LitModel(in_float64(make_model(name, dropout, tied)))
    batches = DataLoader(make_batches(name), batch_size=None)
    trainer(pipeline, max_epochs=1, gradient_clip_val=0.05).fit(module, batches)
    after = weights(module)
    return after, trainer(pipeline).predict(module, batches)


@pytest.mark.parametrize(
    ("name", "size", "pipeline"),
    [
        ("gpt2", 2, ONE_F_ONE_B),
        ("gpt2 with dicts between its layers", 2, ONE_F_ONE_B),
        ("gpt2", 2, ZERO_BUBBLE | {"stages_per_rank": 2}),
        ("llama", 4, ONE_F_ONE_B | {"activation_checkpointing": "layer"}),
        ("bert", 2, INTERLEAVED | {"activation_checkpointing": "stage"}),
        ("bert", 4, ZERO_BUBBLE),
        ("vit", 4, ONE_F_ONE_B | {"partition": "uniform"}),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "get", str)("schedule"),
)
def test_training_equals_one_device(ranks: Ranks, name: str, size: int, pipeline: Options) -> None:
    expected, expected_outputs = fit(None, name)

    results = ranks.run(size, fit, pipeline, name)

    assert_equal_weights(results[0][0], expected)
    for _, outputs in results:
        torch.testing.assert_close(outputs, expected_outputs, rtol=0, atol=1e-10)


def test_dropout_draws_the_same_wherever_the_layers_are(ranks: Ranks) -> None:
    """By layer and micro-batch; one device draws once for a batch, so it is no oracle here."""
    layerwise = {"activation_checkpointing": "layer"}
    two, _ = ranks.run(2, fit, ONE_F_ONE_B, "bert", 0.5)[0]
    four, _ = ranks.run(4, fit, ONE_F_ONE_B | layerwise, "bert", 0.5)[0]
    assert_equal_weights(four, two)
    name = "model.bert.encoder.layer.3.output.dense.weight"
    assert (two[name] - fit(None, "bert")[0][name]).abs().max() > 1e-4


@pytest.mark.parametrize("pipeline", [ONE_F_ONE_B, INTERLEAVED], ids=["1f1b", "interleaved"])
def test_a_tied_head_trains_as_on_one_device(ranks: Ranks, pipeline: Options) -> None:
    expected, expected_outputs = fit(None, "gpt2", tied=True)
    assert "model.lm_head.weight" not in expected  # one parameter, listed once

    results = ranks.run(2, fit, pipeline, "gpt2", 0.0, True)

    assert_equal_weights(results[0][0], expected)
    for _, outputs in results:
        torch.testing.assert_close(outputs, expected_outputs, rtol=0, atol=1e-10)
