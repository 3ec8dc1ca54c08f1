"""Models of Hugging Face's `transformers` as chains of layers, and LightningModules around them.

Hugging Face's modules are taken as they are, and keep their names: a state dict of each class here
is one of the class that it derives from. What is written out is only what its `forward` does
*between* the modules: masks, positions, pooling, the dict that is returned. It moves into the layer
that needs it, by giving that module a class derived from its own.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_outputs import (
    BaseModelOutput,
    CausalLMOutput,
    ImageClassifierOutput,
    SequenceClassifierOutput,
)
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from lightning_pipe import run_layers

VOCABULARY, LENGTH, CLASSES, IMAGE = 23, 7, 3, 8
IGNORED = -100  # the label of a token that does not count


class Chained:
    """A model whose `forward` is its layers, one after the other."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return run_layers(self.layers(), *args, **kwargs)

    def layers(self) -> list[nn.Module]:
        raise NotImplementedError


class Tokens(nn.Embedding):
    def forward(self, input_ids: Tensor) -> Tensor:  # so named, for calls by keyword
        return super().forward(input_ids)


def causal(config: Any, hidden_states: Tensor, attention_mask: Tensor | None) -> Any:
    """The mask of a block, as Hugging Face makes it before the first one.

    A given mask is never looked at whether it masks anything, so that GPUs need not be waited for.
    """
    skips = attention_mask is None
    return create_causal_mask(
        config, hidden_states, attention_mask, cache=None, allow_is_causal_skip=skips
    )


class LogitsHead(nn.Linear):
    def forward(self, hidden_states: Tensor) -> CausalLMOutput:
        return CausalLMOutput(logits=super().forward(hidden_states))


# ------------------------------------------------------------------------------------------- GPT-2


class AddedPositions(nn.Embedding):
    def forward(self, hidden_states: Tensor) -> Tensor:
        positions = torch.arange(hidden_states.shape[1], device=hidden_states.device)
        return hidden_states + super().forward(positions)


class CausalGPT2Block(GPT2Block):
    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = causal(self.attn.config, hidden_states, attention_mask)
        return super().forward(hidden_states, attention_mask=mask)


class DictGPT2Block(CausalGPT2Block):
    """Hands over what a whole model of Hugging Face's would return."""

    def forward(self, inputs: Any, attention_mask: Tensor | None = None) -> BaseModelOutput:
        hidden_states = inputs if isinstance(inputs, Tensor) else inputs.last_hidden_state
        return BaseModelOutput(super().forward(hidden_states, attention_mask))


class DictNorm(nn.LayerNorm):
    def forward(self, inputs: BaseModelOutput) -> Tensor:
        return super().forward(inputs.last_hidden_state)


class PipelinedGPT2(Chained, GPT2LMHeadModel):
    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        gpt = self.transformer
        gpt.wte.__class__, gpt.wpe.__class__ = Tokens, AddedPositions
        self.lm_head.__class__ = LogitsHead
        for block in gpt.h:
            block.__class__ = CausalGPT2Block

    def layers(self) -> list[nn.Module]:
        gpt = self.transformer
        return [gpt.wte, gpt.wpe, gpt.drop, *gpt.h, gpt.ln_f, self.lm_head]


# ------------------------------------------------------------------------------------------- Llama


class CausalLlamaLayer(LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        config = self.self_attn.config
        mask = causal(config, hidden_states, attention_mask)
        positions = torch.arange(hidden_states.shape[1], device=hidden_states.device)[None]
        with torch.device(hidden_states.device):
            rotary = LlamaRotaryEmbedding(config)  # no parameters, and quickly made
        embeddings = rotary(hidden_states, positions)
        return super().forward(hidden_states, mask, positions, position_embeddings=embeddings)


class PipelinedLlama(Chained, LlamaForCausalLM):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model.embed_tokens.__class__, self.lm_head.__class__ = Tokens, LogitsHead
        for layer in self.model.layers:
            layer.__class__ = CausalLlamaLayer

    def layers(self) -> list[nn.Module]:
        return [self.model.embed_tokens, *self.model.layers, self.model.norm, self.lm_head]


# -------------------------------------------------------------------------------------------- BERT


class MaskedBertLayer(BertLayer):
    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        config = self.attention.self.config
        skips = attention_mask is None  # see `causal`
        mask = create_bidirectional_mask(
            config, hidden_states, attention_mask, allow_is_bidirectional_skip=skips
        )
        return super().forward(hidden_states, mask)


class SequenceHead(nn.Linear):
    def forward(self, pooled: Tensor) -> SequenceClassifierOutput:
        return SequenceClassifierOutput(logits=super().forward(pooled))


class PipelinedBert(Chained, BertForSequenceClassification):
    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.classifier.__class__ = SequenceHead
        for layer in self.bert.encoder.layer:
            layer.__class__ = MaskedBertLayer

    def layers(self) -> list[nn.Module]:
        bert = self.bert
        tail = [bert.pooler, self.dropout, self.classifier]
        return [bert.embeddings, *bert.encoder.layer, *tail]


# --------------------------------------------------------------------------------------------- ViT


class FirstTokenHead(nn.Linear):
    def forward(self, hidden_states: Tensor) -> ImageClassifierOutput:
        return ImageClassifierOutput(logits=super().forward(hidden_states[:, 0]))


class PipelinedViT(Chained, ViTForImageClassification):
    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.classifier.__class__ = FirstTokenHead

    def layers(self) -> list[nn.Module]:
        return [self.vit.embeddings, *self.vit.layers, self.vit.layernorm, self.classifier]


# ------------------------------------------------------------------------------------------ to fit


def make_model(name: str, dropout: float = 0.0, tied: bool = False) -> Any:
    """One of the above, small, with random weights; `tied`: GPT-2's head is its embedding."""
    words = {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "pad_token_id": None}
    words |= {"bos_token_id": None, "eos_token_id": None}
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 4}
    sizes["num_attention_heads"] = 2
    drops = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    if name.startswith("gpt2"):
        ends = {"bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": tied}
        drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
        shape = {"n_positions": LENGTH, "n_embd": 8, "n_layer": 4, "n_head": 2}
        model = PipelinedGPT2(GPT2Config(vocab_size=VOCABULARY, **shape, **drops, **ends))
        if "dicts" in name:
            model.transformer.ln_f.__class__ = DictNorm
            for block in model.transformer.h:
                block.__class__ = DictGPT2Block
        return model
    if name == "llama":
        llama = {"num_key_value_heads": 1, "attention_dropout": dropout}
        return PipelinedLlama(LlamaConfig(**words, **sizes, **llama))
    if name == "bert":
        words |= {"pad_token_id": 0}
        return PipelinedBert(BertConfig(**words, **sizes, **drops, num_labels=CLASSES))
    image = {"image_size": IMAGE, "patch_size": IMAGE // 2, "num_channels": 1}
    return PipelinedViT(ViTConfig(**image, **sizes, **drops, num_labels=CLASSES))


class Float64RMSNorm(LlamaRMSNorm):
    """Theirs computes in float32 whatever comes in, which would hide differences below 1e-8."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        scale = torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * hidden_states * scale


def in_float64(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):
            module.__class__ = Float64RMSNorm
    return model


class LitModel(L.LightningModule):
    """Any of the models; the loss is the user's, and so are the labels."""

    def __init__(self, model: nn.Module | None = None, weighs: bool = True) -> None:
        super().__init__()
        self.weighs = weighs
        self.outputs: list[Tensor] = []
        if model is not None:
            self.model = model

    def configure_pipeline(self) -> list[nn.Module]:
        return self.model.layers()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        labels = batch["labels"]
        logits = self._logits(batch)
        loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED)
        if self.weighs:  # the mean over the tokens that count
            return {"loss": loss, "weight": (labels != IGNORED).sum()}
        return loss

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self._logits(batch)

    def _logits(self, batch: dict[str, Tensor]) -> Tensor:
        if "pixel_values" in batch:
            return self.model(batch["pixel_values"]).logits
        return self.model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-2)


def make_batches(name: str, sizes: tuple[int, ...] = (8, 8, 5)) -> list[dict[str, Tensor]]:
    """Batches of images, or of texts in which tokens are masked, in each row at other places."""
    draw = torch.Generator().manual_seed(5)
    batches = []
    for size in sizes:
        classes = torch.randint(CLASSES, (size,), generator=draw)
        if name == "vit":
            images = torch.randn(size, 1, IMAGE, IMAGE, generator=draw, dtype=torch.float64)
            batches.append({"pixel_values": images, "labels": classes})
            continue
        tokens = torch.randint(VOCABULARY, (size, LENGTH + 1), generator=draw)
        mask = (torch.rand(size, LENGTH, generator=draw) < 0.7).long()
        mask[:, 0] = 1  # a causal block's first token would see nothing
        following = tokens[:, 1:].masked_fill(mask == 0, IGNORED)
        labels = classes if name == "bert" else following
        batches.append({"input_ids": tokens[:, :-1], "attention_mask": mask, "labels": labels})
    return batches
