"""Where layers are frozen, backward stops: counted by the products that it computes and sends."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset
from trainer.lit import Options, assert_equal_weights, trainer, weights
from trainer.ranks import Ranks

from lightning_pipe.report import PipelineReport
from lightning_pipe.runtime.mailbox import Mailbox
from lightning_pipe.runtime.transport import Channel

from .hugging_face import LitModel, in_float64, make_batches, make_model

# ------------------------------------------------------------- what is computed, and what is sent

LAYERS, WIDTH, ROWS, COUNT, BATCHES = 8, 6, 2, 4, 2  # two layers on each of four stages
FROZEN = {
    "nothing": (),
    "a layer and a half stage": (0, 1, 2),
    "the first stages": (0, 1, 2, 3),
    "a middle stage": (4, 5),
    "the last stage": (6, 7),
    "all but the last layer": tuple(range(7)),
    "here and there": (0, 3, 6),
}
SCHEDULES = {
    "1f1b": {"schedule": "1f1b", "num_microbatches": COUNT},
    "zero_bubble": {"schedule": "zero_bubble", "num_microbatches": COUNT},
    "pipedream": {"schedule": "pipedream", "num_microbatches": COUNT},
}


class Products(L.LightningModule):
    """A chain of matrix products, so that a backward's work can be counted."""

    def __init__(self, frozen: tuple[int, ...]) -> None:
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
        for index in frozen:
            self.net[index].requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[0].flip(1))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Shapes(TorchDispatchMode):
    """Counts matrix products by what they compute."""

    def __init__(self) -> None:
        super().__init__()
        self.of_weights = self.of_inputs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self.of_weights += result.shape == (WIDTH, WIDTH)
            self.of_inputs += result.shape == (ROWS, WIDTH)
        return result


def train_all(pipeline: Options) -> dict[str, dict[str, Any]]:
    return {name: train_counting(pipeline, frozen) for name, frozen in FROZEN.items()}


def train_counting(pipeline: Options | None, frozen: tuple[int, ...]) -> dict[str, Any]:
    L.seed_everything(5, verbose=False)
    module, shapes, sent = Products(frozen), Shapes(), []
    backward, send = torch.autograd.backward, Mailbox.send

    def counted(*args: Any, **kwargs: Any) -> None:
        with shapes:
            backward(*args, **kwargs)

    def noted(self: Mailbox, route: Any, key: Any, signature: Any, tree: Any) -> None:
        if route[0] is Channel.GRADIENT:
            sent.extend(tensor for tensor in tree if tensor is not None)
        send(self, route, key, signature, tree)

    data = TensorDataset(torch.randn(BATCHES * COUNT * ROWS, WIDTH, dtype=torch.float64))
    run = trainer(pipeline, max_epochs=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd, "backward", counted)
        patch.setattr(Mailbox, "send", noted)
        run.fit(module, DataLoader(data, COUNT * ROWS))
    counts = (shapes.of_weights, shapes.of_inputs, len(sent))
    report = getattr(run.strategy, "report", None)
    return {"counts": counts, "report": report, "weights": weights(module)}


def expected_counts(stage: int, frozen: tuple[int, ...]) -> tuple[int, int, int]:
    """A layer's weights are needed if they are trained; its input's if one before it is trained."""
    layers, microbatches = (2 * stage, 2 * stage + 1), BATCHES * COUNT
    first = min(trained(frozen))
    needed = [layer for layer in layers if first < layer]
    sends = stage > 0 and first < layers[0]
    of_weights = microbatches * len(trained(frozen) & set(layers))
    return of_weights, microbatches * len(needed), microbatches * sends


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nothing_is_computed_or_sent_that_no_weight_needs(ranks: Ranks, schedule: str) -> None:
    by_rank = ranks.run(4, train_all, SCHEDULES[schedule])

    for name, frozen in FROZEN.items():
        for stage, result in enumerate(by_rank):
            counts = result[name]["counts"]
            assert counts == expected_counts(stage, frozen), f"{name} frozen, stage {stage}"
        result = by_rank[0][name]
        check_report(result["report"], frozen, schedule)
        if schedule != "pipedream":
            assert_equal_weights(result["weights"], train_counting(None, frozen)["weights"])
        elif min(trained(frozen)) >= 6:  # updates of the last stage are never late
            assert_equal_weights(result["weights"], train_by_microbatch(frozen))


def trained(frozen: tuple[int, ...]) -> set[int]:
    return set(range(LAYERS)) - set(frozen)


def check_report(report: PipelineReport, frozen: tuple[int, ...], schedule: str) -> None:
    microbatches, first = BATCHES * COUNT, min(trained(frozen))
    for index, stage in enumerate(report.stages):
        own = len(trained(frozen) & {2 * index, 2 * index + 1})
        assert stage.trained_parameters == own * WIDTH**2
        assert stage.backwards_skipped == (microbatches if first // 2 > index else 0)
        unsent = microbatches * ROWS * WIDTH * 8 if 0 < index <= first // 2 else 0
        assert stage.gradient_bytes_saved == unsent
        if schedule == "pipedream":  # a frozen weight is never copied
            assert stage.weight_bytes == 8 * WIDTH**2 * (own * stage.live_versions + 2 - own)
    assert ("frozen: " in str(report)) == (first >= 2)


def train_by_microbatch(frozen: tuple[int, ...]) -> dict[str, Tensor]:
    """On one device, with a micro-batch for a batch."""
    L.seed_everything(5, verbose=False)
    module = Products(frozen)
    data = TensorDataset(torch.randn(BATCHES * COUNT * ROWS, WIDTH, dtype=torch.float64))
    trainer(None, max_epochs=1).fit(module, DataLoader(data, ROWS))
    return weights(module)


def test_the_report_says_what_was_saved(ranks: Ranks) -> None:
    results = ranks.run(4, train_counting, SCHEDULES["1f1b"], FROZEN["the first stages"])
    assert str(results[0]["report"]).splitlines()[-1] == (
        "frozen: 144 of 288 parameters are trained; saved: 16 backwards (of stage 0, 1), "
        "1,536 bytes of gradients"
    )


# -------------------------------------------------------------------------- Hugging Face's models

# Layers of GPT-2: wte, wpe, drop, four blocks, ln_f, lm_head.
STAGES = {"partition": [4, 1, 1, 3]}
FOUR = {"schedule": "1f1b", "num_microbatches": 4} | STAGES
TWICE_TWO = {"schedule": "interleaved", "stages_per_rank": 2, "num_microbatches": 4} | STAGES
SPLIT = {"schedule": "zero_bubble", "num_microbatches": 4} | STAGES
LORA = {"r": 2, "lora_alpha": 8, "init_lora_weights": False}


class Tuned(LitModel):
    """A model of which a part is trained."""

    def __init__(self, name: str, how: str) -> None:
        # PipeDream takes no weights of samples. The last stage's updates are those of one device.
        super().__init__(in_float64(make_model(name)), weighs=how != "late lora")
        if how == "head":
            self.freeze("")
            self.model.lm_head.requires_grad_(True)
        elif "lora" in how:
            which = {"layers_to_transform": [3], "layers_pattern": "h"} if "late" in how else {}
            config = LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, **which, **LORA)
            inject_adapter_in_model(config, self.model)
        elif how == "peft model":
            projections = LoraConfig(target_modules=["q_proj", "down_proj"], **LORA)
            self.model = get_peft_model(self.model, projections)
        else:
            self.freeze(how)

    def freeze(self, prefix: str) -> None:
        for name, parameter in self.model.named_parameters():
            if name.startswith(tuple(prefix.split())) or not prefix:
                parameter.requires_grad_(False)

    def configure_pipeline(self) -> list[nn.Module]:
        model = self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model
        return model.layers()


def tune(pipeline: Options | None, name: str, how: str) -> tuple[dict[str, Tensor], Any, list[str]]:
    L.seed_everything(3, verbose=False)
    module = Tuned(name, how)
    batches = DataLoader(make_batches(name), batch_size=None)
    trainer(pipeline, max_epochs=1, gradient_clip_val=0.05).fit(module, batches)
    frozen = [n for n, parameter in module.named_parameters() if not parameter.requires_grad]
    return weights(module), trainer(pipeline).predict(module, batches), frozen


@pytest.mark.parametrize(
    ("name", "how", "size", "pipeline"),
    [
        ("gpt2", "transformer.wte transformer.wpe transformer.h.0.", 4, FOUR),
        ("gpt2", "transformer.h.1.", 4, SPLIT),
        ("gpt2", "transformer.h.1. transformer.h.2.", 2, TWICE_TWO),
        ("gpt2", "transformer.h.3. transformer.ln_f lm_head", 4, FOUR),
        ("gpt2", "head", 2, TWICE_TWO | {"activation_checkpointing": "stage"}),
        ("gpt2", "lora", 4, SPLIT),
        ("gpt2", "late lora", 2, {"schedule": "pipedream", "partition": [4, 5]}),
        ("llama", "peft model", 2, {"schedule": "1f1b", "num_microbatches": 4}),
    ],
)
def test_fine_tuning_equals_one_device(
    ranks: Ranks, name: str, how: str, size: int, pipeline: Options
) -> None:
    before = weights(Tuned(name, how))
    expected, expected_outputs, frozen = tune(None, name, how)
    assert 0 < len(frozen) < len(before)

    results = ranks.run(size, tune, pipeline, name, how)

    assert_equal_weights(results[0][0], expected)
    for _, outputs, _ in results:
        torch.testing.assert_close(outputs, expected_outputs, rtol=0, atol=1e-10)
