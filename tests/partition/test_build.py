"""Layers that live on another rank: no memory, and nothing else is different."""

import copy
import pickle
import warnings
import weakref

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_summary import ModelSummary
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from lightning_pipe.partition import (
    find_layers,
    is_absent,
    outside_parameters,
    present,
    shard,
    shared_between_stages,
    stage_slices,
)


class Block(nn.Module):
    def __init__(self, size=4):
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.norm = nn.BatchNorm1d(size)
        self.register_buffer("table", torch.ones(size), persistent=False)

    def forward(self, x):
        return self.norm(self.linear(x)) * self.table


class Net(L.LightningModule):
    def __init__(self, num_layers=4):
        super().__init__()
        self.model = nn.Sequential(*[Block() for _ in range(num_layers)])
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.model(x) * self.scale


def sharded(owned=(1, 2)):
    net = Net()
    shard(find_layers(net), owned)
    return net


def absent_tensors(module):
    for part in module.modules():
        if is_absent(part):
            yield from part.parameters(recurse=False)
            yield from part.buffers(recurse=False)


def test_stage_slices():
    assert stage_slices([2, 1, 3]) == [range(2), range(2, 3), range(3, 6)]


def test_owned_layers_stay_and_others_have_no_memory():
    whole = Net()
    net = copy.deepcopy(whole)
    storages = {}
    for name, tensor in [*net.named_parameters(), *net.named_buffers()]:
        storages[name] = weakref.ref(tensor.untyped_storage())
    shard(find_layers(net), owned=[1, 2])
    assert [is_absent(layer) for layer in net.model] == [True, False, False, True]
    for name, tensor in [*net.named_parameters(), *net.named_buffers()]:
        gone = name.startswith(("model.0.", "model.3."))
        assert tensor.is_meta == gone
        if not gone:
            original = dict([*whole.named_parameters(), *whole.named_buffers()])[name]
            assert torch.equal(tensor, original)
        del tensor
    freed = {name for name, storage in storages.items() if storage() is None}
    assert freed >= {n for n in storages if n.startswith(("model.0.", "model.3."))}


def test_names_order_and_text_are_those_of_the_whole_model():
    whole, net = Net(), sharded()
    assert [n for n, _ in net.named_parameters()] == [n for n, _ in whole.named_parameters()]
    assert list(net.state_dict()) == list(whole.state_dict())
    assert repr(net) == repr(whole)
    assert str(ModelSummary(net, max_depth=-1)) == str(ModelSummary(whole, max_depth=-1))
    assert all(isinstance(layer, Block) for layer in net.model)


def test_attributes_of_parameters_survive():
    net = Net()
    weight = net.model[0].linear.weight
    net.model[0].linear.weight = nn.Parameter(weight.data.t().half(), requires_grad=False)
    net.model[0].linear.weight.no_decay = True
    stride = net.model[0].linear.weight.stride()
    shard(find_layers(net), owned=[1])
    weight = net.model[0].linear.weight
    assert type(weight) is nn.Parameter
    assert weight.no_decay
    assert not weight.requires_grad
    assert weight.dtype is torch.half
    assert weight.stride() == stride
    assert not net.model[0].table.requires_grad


def test_a_subclass_of_parameter_survives():
    class Scale(nn.Parameter):
        def __new__(cls, size, gain):
            made = super().__new__(cls, torch.full((size,), gain))
            made.gain = gain
            return made

    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[0].weight = Scale(3, gain=2.0)
    shard(find_layers(net), owned=[1])
    assert isinstance(net[0].weight, Scale)
    assert net[0].weight.gain == 2.0


def test_calling_an_absent_layer_names_it():
    net = sharded()
    message = r"layer 'model\.[03]' lives on another rank"
    for call in (net.model[3], net.model[3].forward, net.model[3].linear, net.model):
        with pytest.raises(MisconfigurationException, match=message):
            call(torch.ones(2, 4))
    net.model[1](torch.ones(2, 4))


@pytest.mark.parametrize(
    "move",
    [
        lambda m: m.to("cpu"),
        lambda m: m.cpu(),
        lambda m: m.double(),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.half().float().double(),
        lambda m: m.to_empty(device="cpu"),
        lambda m: m.share_memory(),
    ],
)
def test_moving_keeps_the_meta_device_and_follows_the_dtype(move):
    net, whole = sharded(), Net()
    before = {name: id(p) for name, p in net.named_parameters()}
    assert move(net) is net
    move(whole)
    assert {name: id(p) for name, p in net.named_parameters()} == before
    assert all(tensor.is_meta for tensor in absent_tensors(net))
    assert not any(tensor.is_meta for tensor in net.model[1].parameters())
    dtypes = [tensor.dtype for tensor in net.state_dict().values()]
    assert dtypes == [tensor.dtype for tensor in whole.state_dict().values()]


def test_moving_a_part_of_an_absent_layer():
    net = sharded()
    net.model[0].linear.cpu().double()
    assert net.model[0].linear.weight.is_meta
    assert net.model[0].linear.weight.dtype is torch.double


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_duplicates_are_absent_too(duplicate):
    net = duplicate(sharded())
    assert [is_absent(layer) for layer in net.model] == [True, False, False, True]
    assert all(tensor.is_meta for tensor in absent_tensors(net))
    net.double().cpu()
    with pytest.raises(MisconfigurationException, match=r"'model\.0' lives on another"):
        net.model[0](torch.ones(2, 4))


@pytest.mark.parametrize("assign", [True, False])
def test_a_full_state_dict_loads_strictly(assign):
    whole, net = Net(), sharded()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net.load_state_dict(whole.state_dict(), assign=assign)
    assert torch.equal(net.model[1].linear.weight, whole.model[1].linear.weight)
    assert all(tensor.is_meta for tensor in absent_tensors(net))
    with pytest.raises(RuntimeError, match=r"Missing key.*model\.0\.linear\.weight"):
        net.load_state_dict({})
    wrong = {**whole.state_dict(), "model.0.linear.weight": torch.ones(1)}
    with pytest.raises(RuntimeError, match=r"size mismatch for model\.0\.linear\.weight"):
        net.load_state_dict(wrong)


@pytest.mark.parametrize("foreach", [False, True])
def test_an_optimizer_steps_over_absent_layers(foreach):
    net = sharded()
    optimizer = torch.optim.AdamW(net.parameters(), foreach=foreach)
    before = net.model[1].linear.weight.clone()
    net.model[1](torch.randn(3, 4)).pow(3).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert not torch.equal(net.model[1].linear.weight, before)
    indices = optimizer.state_dict()["state"].keys()
    names = [name for name, _ in net.named_parameters()]
    assert {names[i].rsplit(".", 2)[0] for i in indices} == {"model.1"}


def test_objects_held_elsewhere_follow():
    net = Net()
    held = list(net.model[0].parameters())
    net.kept = held
    shard(find_layers(net), owned=[1])
    assert all(p.is_meta for p in held)
    assert [id(p) for p in held] == [id(p) for p in net.model[0].parameters()]


def test_ties_between_absent_layers_survive():
    net = Net()
    net.model[3].linear.weight = net.model[0].linear.weight
    net.model[3].table = net.model[0].table
    shard(find_layers(net), owned=[1, 2])
    assert net.model[0].linear.weight is net.model[3].linear.weight
    assert net.model[0].table is net.model[3].table
    net.double()
    assert net.model[0].linear.weight is net.model[3].linear.weight
    assert net.model[0].linear.weight.dtype is torch.double


def test_ties_between_absent_layers_survive_where_storage_cannot_be_exchanged():
    net = Net()
    net.model[3].linear.weight = net.model[0].linear.weight
    reference = weakref.ref(net.model[0].linear.weight)  # torch.utils.swap_tensors refuses
    shard(find_layers(net), owned=[1, 2])
    assert reference() is None
    assert net.model[0].linear.weight is net.model[3].linear.weight
    assert net.model[0].linear.weight.is_meta


def test_a_tie_to_an_owned_layer_stays_real():
    net, whole = Net(), Net()
    for n in (net, whole):
        n.model[3].linear.weight = n.model[1].linear.weight
        n.model[3].norm = n.model[1].norm
    shard(find_layers(net), owned=[1])
    assert net.model[3].linear.weight is net.model[1].linear.weight
    assert not net.model[1].linear.weight.is_meta
    assert [n for n, _ in net.named_parameters()] == [n for n, _ in whole.named_parameters()]
    net.model[1](torch.ones(2, 4))  # the shared norm can be called
    net.double()
    assert net.model[3].linear.weight is net.model[1].linear.weight
    assert net.model[1].linear.weight.dtype is torch.double


def test_a_module_that_stands_twice_is_owned_if_one_place_is():
    relu = nn.ReLU()
    net = nn.Sequential(nn.Linear(2, 2), relu, nn.Linear(2, 2), relu)
    shard(find_layers(net), owned=[0, 1])
    net[1](net[0](torch.ones(2)))
    assert is_absent(net[2])


def test_lstm():
    net = nn.Sequential(nn.LSTM(3, 3), nn.LSTM(3, 3))
    shard(find_layers(net), owned=[1])
    assert all(weight.is_meta for weight in net[0]._flat_weights)
    net.double()
    net = copy.deepcopy(net)
    present(net[0], "cpu")
    assert net[0]._flat_weights[0] is net[0].weight_ih_l0
    net[0](torch.ones(1, 1, 3).double())


@pytest.fixture
def mesh():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_tensor_parallel_layers(mesh):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in net:
        parallelize_module(layer, mesh, ColwiseParallel())
    shard(find_layers(net), owned=[1])
    weight = net[0].weight
    assert isinstance(weight, DTensor)
    assert weight.to_local().is_meta
    net.double().cpu()
    assert net[0].weight is weight
    assert weight.to_local().is_meta
    assert weight.to_local().dtype is torch.double
    present(net[0], "cpu")
    assert net[0].weight is weight
    assert net(torch.ones(2, 4).double()).dtype is torch.double


def test_scripted_layers_are_refused():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net[0] = torch.jit.script(net[0])
    with pytest.raises(MisconfigurationException, match="Layer '0' holds a .*pass the Python"):
        shard(find_layers(net), owned=[1])


def test_present_undoes_absent():
    whole, net = Net(), sharded()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for layer in net.model:
        present(layer, "cpu")
    assert not any(is_absent(module) for module in net.modules())
    assert not any(p.is_meta for p in [*net.parameters(), *net.buffers()])
    net.load_state_dict(whole.state_dict())
    for ours, theirs in zip(net.model, whole.model, strict=True):
        ours.table.copy_(theirs.table)
        assert vars(ours).keys() == vars(theirs).keys()
    x = torch.randn(3, 4)
    assert torch.equal(net(x), whole(x))
    before = net.model[0].linear.bias.clone()
    net(x).pow(3).sum().backward()
    optimizer.step()  # it holds the same objects, now with memory
    assert not torch.equal(net.model[0].linear.weight, whole.model[0].linear.weight)
    assert not torch.equal(net.model[3].norm.bias, whole.model[3].norm.bias)
    assert before.shape == net.model[0].linear.bias.shape


def test_present_keeps_ties_where_storage_cannot_be_exchanged():
    net = Net()
    net.model[3].linear.weight = net.model[0].linear.weight
    shard(find_layers(net), owned=[1, 2])
    reference = weakref.ref(net.model[0].linear.weight)
    memo = {}
    present(net.model[0], "cpu", memo)
    present(net.model[3], "cpu", memo)
    assert reference() is None
    assert net.model[0].linear.weight is net.model[3].linear.weight
    assert not net.model[0].linear.weight.is_meta


def test_training_then_gathering():
    net = Net()
    net(torch.randn(3, 4)).sum().backward()  # autograd has seen the parameters
    shard(find_layers(net), owned=[1])
    for layer in net.model:
        present(layer, "cpu")
    net.load_state_dict(Net().state_dict())
    net(torch.randn(3, 4)).sum().backward()
    assert net.model[0].linear.weight.grad is not None


def test_sharding_twice():
    net = sharded(owned=(1, 2))
    shard(find_layers(net), owned=[1])
    assert is_absent(net.model[2])
    with pytest.raises(RuntimeError, match=r"\['model.2'\] were freed"):
        shard(find_layers(net), owned=[1, 2])


def test_outside_parameters():
    net = Net()
    assert outside_parameters(net, find_layers(net)) == [("scale", net.scale)]
    net.embed = nn.Linear(4, 4)
    net.model[3].linear.weight = net.embed.weight
    names = [name for name, _ in outside_parameters(net, find_layers(net))]
    assert names == ["scale", "embed.weight", "embed.bias"]


def test_shared_between_stages():
    net = Net()
    found = find_layers(net)
    assert shared_between_stages(found, [2, 2]) == []
    net.model[1].linear.weight = net.model[0].linear.weight
    assert shared_between_stages(found, [2, 2]) == []
    net.model[3].linear.weight = net.model[0].linear.weight
    pair = ("model.0.linear.weight", "model.3.linear.weight")
    assert shared_between_stages(found, [2, 2]) == [pair]
    assert shared_between_stages(found, [1, 1, 2]) == [
        ("model.0.linear.weight", "model.1.linear.weight"),
        pair,
    ]
    shard(found, owned=[2])
    assert shared_between_stages(found, [2, 2]) == [pair]


def test_shared_with_the_outside():
    net = Net()
    net.embed = nn.Linear(4, 4)
    net.model[3].linear.weight = net.embed.weight
    found = find_layers(net, "model")
    assert shared_between_stages(found, [2, 2]) == [("embed.weight", "model.3.linear.weight")]
    shard(found, owned=[0])
    assert net.model[3].linear.weight is net.embed.weight
    assert not net.embed.weight.is_meta
