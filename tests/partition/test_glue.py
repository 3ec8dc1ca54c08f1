"""What stands between the layers is found; what does not is let through."""

import copy
import random
import warnings
from dataclasses import dataclass

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_pipe.partition import check_glue, find_layers, original_forward, shard, swap_class


class Block(nn.Module):
    def __init__(self, size=4):
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(size)

    def forward(self, x, mask=None):
        x = self.drop(self.norm(self.linear(x)))
        return x if mask is None else x * mask


class Net(L.LightningModule):
    """Its `forward` is what the test says; by default the plain chain."""

    def __init__(self, run=None, layers=None):
        super().__init__()
        self.blocks = nn.ModuleList(layers or [Block() for _ in range(3)])
        self.extra = nn.Linear(4, 4)
        self.run = run or chain

    def configure_pipeline(self):
        return list(self.blocks)

    def forward(self, *args, **kwargs):
        return self.run(self, *args, **kwargs)


def chain(net, x):
    for block in net.blocks:
        x = block(x)
    return x


def check(net, *args, **kwargs):
    """No test here may warn, unless it says so."""
    args = args or (torch.randn(2, 4),)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_glue(find_layers(net), args, kwargs)


def refuse(net, message, *args, **kwargs):
    with pytest.raises(MisconfigurationException, match=message):
        check(net, *args, **kwargs)


def test_a_plain_chain_passes():
    check(Net())


def residual(net, x):
    for block in net.blocks:
        x = x + block(x)
    return x


def residual_in_place(net, x):
    first = x
    for block in net.blocks:
        x = block(x)
        x += first
    return x


def last_pooled(net, x):
    return chain(net, x).mean(0)


def last_in_place(net, x):
    return chain(net, x).mul_(2)


def wrapped_output(net, x):
    return {"logits": chain(net, x)}


def scaled_input(net, x):
    return chain(net, x * 2)


def scaled_input_in_place(net, x):
    x *= 2
    return chain(net, x)


def another_module_between(net, x):
    x = net.blocks[0](x)
    return net.blocks[2](net.blocks[1](net.extra(x)))


def skip_connection(net, x):
    first = net.blocks[0](x)
    net.blocks[1](first)
    return net.blocks[2](first)


BETWEEN = r"Between layers 'blocks.0' and 'blocks.1' the forward of 'Net' computes something that a"


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (residual, BETWEEN),
        (residual_in_place, BETWEEN),
        (another_module_between, BETWEEN),
        (last_pooled, "After the last layer 'blocks.2' the forward of 'Net' computes something"),
        (last_in_place, "After the last layer 'blocks.2'"),
        (wrapped_output, "After the last layer 'blocks.2'"),
        (scaled_input, "Before layer 'blocks.0' the forward of 'Net' computes something"),
        (scaled_input_in_place, "Before layer 'blocks.0'"),
        (skip_connection, "Between layers 'blocks.1' and 'blocks.2'"),
        (lambda net, x: net.blocks[1](net.blocks[0](x)), "does not call layer 'blocks.2'"),
        (lambda net, x: chain(net, chain(net, x)), "calls layer 'blocks.0' twice"),
        (
            lambda net, x: net.blocks[2](net.blocks[0](net.blocks[1](x))),
            "calls layer 'blocks.1' where 'blocks.0' is expected",
        ),
    ],
)
def test_glue_is_found(run, message):
    x = torch.randn(2, 4)
    before = x.clone()
    refuse(Net(run), message, x)
    assert torch.equal(x, before)


def test_identity_layers_confuse_nobody():
    layers = [nn.Identity(), nn.Identity(), nn.Linear(4, 4), nn.Identity()]
    check(Net(layers=layers))
    refuse(Net(residual, layers=[nn.Identity(), nn.Identity()]), BETWEEN)
    refuse(Net(last_pooled, layers=[nn.Linear(4, 4), nn.Identity()]), "After the last layer")


def test_layers_that_work_in_place_pass():
    check(Net(layers=[nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)]))
    check(Net(layers=[nn.ReLU(inplace=True), nn.Linear(4, 4)]))


class TwoOut(nn.Module):
    def forward(self, x):
        return (x * 2, {"aux": x + 1})


class TwoIn(nn.Module):
    def forward(self, both):
        return both[0] + both[1]["aux"]


class Apart(nn.Module):
    def forward(self, x, aux):
        return x + aux["aux"]


def test_a_tuple_is_one_argument():
    check(Net(layers=[TwoOut(), TwoIn()]))
    check(Net(rebuilt_tuple, layers=[TwoOut(), TwoIn()]))
    message = "Between layers 'blocks.0' and 'blocks.1'.*one positional argument"
    refuse(Net(unpacked, layers=[TwoOut(), Apart()]), message)


def rebuilt_tuple(net, x):
    a, b = net.blocks[0](x)
    return net.blocks[1]((a, {**b}))


def unpacked(net, x):
    return net.blocks[1](*net.blocks[0](x))


def with_mask(net, x, mask=None):
    for block in net.blocks:
        x = block(x, mask=mask)
    return x


def with_mask_by_position(net, x, mask=None):
    for block in net.blocks:
        x = block(x, mask)
    return x


def with_computed_mask(net, x, mask=None):
    for block in net.blocks:
        x = block(x, mask=mask > 0)
    return x


def forgets_mask(net, x, mask=None):
    for i, block in enumerate(net.blocks):
        x = block(x) if i == 1 else block(x, mask=mask)
    return x


def changes_mask(net, x, mask=None):
    for block in net.blocks:
        x = block(x, mask=mask)
        mask += 1
    return x


def own_mask(net, x):
    return with_mask(net, x, torch.ones(4, device=x.device))


@pytest.mark.parametrize("run", [with_mask, with_mask_by_position])
def test_keyword_arguments_of_the_call_pass(run):
    check(Net(run), torch.randn(2, 4), mask=torch.ones(4))
    check(Net(run), torch.randn(2, 4))


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (with_computed_mask, "Before layer 'blocks.0'.*gives 'mask' of layer 'blocks.0'"),
        (forgets_mask, "'blocks.0' and 'blocks.1'.*gives 'mask' of layer 'blocks.1'.*call's own"),
        (changes_mask, "Between layers 'blocks.0' and 'blocks.1'.*gives 'mask'"),
    ],
)
def test_keyword_arguments_must_reach_the_layers_unchanged(run, message):
    refuse(Net(run), message, torch.randn(2, 4), mask=torch.ones(4))


def test_a_keyword_that_the_call_does_not_have():
    refuse(Net(own_mask), "gives 'mask' of layer 'blocks.0' another value.*the default")


def test_a_mask_by_position_in_the_call_reaches_layer_0_only():
    message = "Between layers 'blocks.0' and 'blocks.1'.*gives 'mask'.*as a keyword argument"
    refuse(Net(with_mask), message, torch.randn(2, 4), torch.ones(4))


class Everything(nn.Module):
    def forward(self, x, **kwargs):
        return x * kwargs.get("mask", 1)


def test_arbitrary_keywords_count_as_none():
    net = Net(with_mask, layers=[Block(), Everything()])
    message = "gives 'kwargs' of layer 'blocks.1'.*under a name that the layer's forward lists"
    refuse(net, message, torch.randn(2, 4), mask=torch.ones(4))


def test_the_first_argument_by_keyword():
    def run(net, x):
        x = net.blocks[0](x=x)
        return net.blocks[1](x=x)

    net = Net(run, layers=[Block(), Block()])
    check(net)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_glue(find_layers(net), (), {"x": torch.ones(2, 4)})


@dataclass
class Batch:
    tokens: torch.Tensor
    name: str


class ReadBatch(nn.Module):
    def forward(self, batch):
        return batch.tokens * 2


def test_arguments_in_containers():
    check(Net(layers=[ReadBatch(), nn.Linear(4, 4)]), Batch(torch.ones(2, 4), "a"))


def test_nothing_real_is_touched():
    net = Net()
    state = copy.deepcopy(net.state_dict())
    objects = [id(t) for t in [*net.parameters(), *net.buffers()]]
    seen = []
    x = torch.randn(2, 4)
    net.blocks[1].register_forward_hook(lambda *args: seen.append(args))
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()

    def noisy(net, x):
        random.random()
        np.random.rand()
        torch.rand(3, device="cpu")
        net.counter = getattr(net, "counter", 0) + 1
        return chain(net, x)

    net.run = noisy
    check(net, x)
    assert all(torch.equal(state[name], tensor) for name, tensor in net.state_dict().items())
    assert [id(t) for t in [*net.parameters(), *net.buffers()]] == objects
    assert seen == []
    assert not hasattr(net, "counter")
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()
    assert net.training
    assert not any(hook for block in net.blocks for hook in block._forward_pre_hooks)


def test_no_memory_is_copied(monkeypatch):
    net = Net()
    net.table = torch.zeros(4)  # no buffer
    net.tables = [torch.zeros(4), {"deep": torch.zeros(4)}]
    monkeypatch.setattr(torch.Tensor, "__deepcopy__", fail)
    monkeypatch.setattr(nn.Parameter, "__deepcopy__", fail)
    check(net)


def fail(*args, **kwargs):
    raise AssertionError


def test_plain_tensors_and_factories_are_on_the_meta_device_too():
    def run(net, x):
        mask = net.table + torch.arange(4) + torch.zeros(4, device=net.device)
        assert mask.is_meta
        return chain(net, x)

    net = Net(run)
    net.table = torch.zeros(4)
    check(net)


def test_code_that_depends_on_values_is_warned_about():
    def run(net, x):
        if x.sum().item() > 0:
            return chain(net, x)
        return x

    with pytest.warns(UserWarning, match="forward of 'Net' cannot be traced without data"):
        check_glue(find_layers(Net(run)), (torch.ones(2, 4),), {})


def test_glue_before_the_trace_ends_is_an_error_all_the_same():
    def run(net, x):
        return residual(net, x).sum().item()

    refuse(Net(run), BETWEEN)


def test_a_swallowed_exception_hides_nothing():
    def run(net, x):
        try:
            return residual(net, x)
        except Exception:
            return x

    refuse(Net(run), BETWEEN)


def test_under_inference_mode():
    with torch.inference_mode():
        check(Net())
        refuse(Net(residual_in_place), BETWEEN)


def test_layers_on_other_ranks():
    for run, problem in ((chain, False), (residual, True)):
        net = Net(run)
        shard(find_layers(net), owned=[1])
        if problem:
            refuse(net, BETWEEN)
        else:
            check(net)
        assert net.blocks[0].linear.weight.is_meta


class Replaced:
    def forward(self, *args, **kwargs):
        raise AssertionError


def test_the_original_forward_counts():
    net = Net(residual)
    swap_class(net, Replaced)
    refuse(net, BETWEEN)
    net = Net()
    swap_class(net, Replaced)
    check(net)
    assert original_forward(net).__func__ is Net.forward


class OwnForward(nn.Sequential):
    def forward(self, x):
        return super().forward(x) + x


def test_a_sequential():
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    swap_class(plain, Replaced)
    check(plain)
    refuse(OwnForward(nn.Linear(4, 4), nn.Linear(4, 4)), "After the last layer '1'")

    class Part(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

        def configure_pipeline(self):
            return [self.model[0], self.model[2]]

    refuse(Part(), "Between layers 'model.0' and 'model.2'")


def test_a_module_that_stands_twice_in_a_sequential_with_its_own_forward():
    class Chain(nn.Sequential):
        def forward(self, x):
            for layer in self:
                x = layer(x)
            return x

    relu = nn.ReLU()
    check(Chain(nn.Linear(4, 4), relu, nn.Linear(4, 4), relu))


def test_without_a_forward_there_is_nothing_to_check():
    class NoForward(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def configure_pipeline(self):
            return [self.a, self.b]

    check(NoForward())


def test_the_trainer_is_not_copied(tmp_path):
    def run(net, x):
        assert net._trainer is None
        net.log("seen", 1.0)
        return chain(net, x)

    net = Net(run)
    net.trainer = L.Trainer(logger=False, accelerator="cpu", default_root_dir=tmp_path)
    net._device_mesh = NotToBeCopied()
    net.the_trainer = net.trainer
    net.data = torch.utils.data.TensorDataset(torch.ones(2))
    net.trainer.marker = NotToBeCopied()
    check(net)
    assert net.trainer is net.the_trainer


class NotToBeCopied:
    __deepcopy__ = fail


def test_compiled_layers():
    # The backend fails, so the test does if the trace compiles anything.
    layers = [torch.compile(Block(), backend=fail) for _ in range(3)]
    check(Net(with_mask, layers), torch.ones(2, 4), mask=torch.ones(4))
    refuse(Net(residual, layers), BETWEEN)


def test_weight_norm_by_hooks():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layers = [nn.utils.weight_norm(nn.Linear(4, 4)) for _ in range(2)]
    check(Net(layers=layers))
    check(Net(layers=[nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4)]))
