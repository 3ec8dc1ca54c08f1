"""The three ways to find the layers, and what each refuses."""

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_pipe.partition import find_layers, keyword_names, parameter_counts, shard


class Net(L.LightningModule):
    def __init__(self, layers=None):
        super().__init__()
        self.model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)])
        self.scale = nn.Parameter(torch.ones(1))
        self.pick = layers

    def forward(self, x):
        return self.model(x)


class Listed(Net):
    def configure_pipeline(self):
        return self.pick(self)


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_the_only_large_sequential():
    net = Net()
    found = find_layers(net)
    assert found.module is net.model
    assert found.name == "model"
    assert found.layers == tuple(net.model)
    assert found.names == tuple(f"model.{i}" for i in range(6))
    assert found.root is net
    assert not found.keywords


def test_elements_count_and_shared_ones_once():
    net = L.LightningModule()
    net.body = nn.Sequential(nn.Linear(30, 30))  # one large tensor against many small ones
    net.small = nn.ModuleList([nn.Linear(1, 1) for _ in range(40)])
    assert find_layers(net).name == "body"
    net.tied = nn.ModuleList([nn.Linear(30, 30) for _ in range(9)])
    for module in net.tied:
        module.weight = net.body[0].weight
        module.bias = None
    assert find_layers(net).name == "body"
    net.tied[0].weight = nn.Parameter(torch.zeros(30, 30))
    with pytest.raises(MisconfigurationException, match="No nn.Sequential"):
        find_layers(net)


def test_a_sequential_is_its_own_pipelined_module():
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    found = find_layers(net)
    assert (found.name, found.names) == ("", ("0", "1"))


def test_a_module_that_stands_twice_keeps_both_places():
    relu = nn.ReLU()
    net = nn.Sequential(nn.Linear(2, 2), relu, nn.Linear(2, 2), relu)
    assert find_layers(net).layers == (net[0], relu, net[2], relu)


def test_nested_sequentials_are_ambiguous():
    net = L.LightningModule()
    net.model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    message = (
        r"Several nn.Sequential .*'model' \(100.0%\), 'model.0' \(100.0%\)"
        r".*PipelineStrategy\(module=...\).*`configure_pipeline\(self\)` in LightningModule"
    )
    with pytest.raises(MisconfigurationException, match=message):
        find_layers(net)
    assert find_layers(net, "model.0").names == ("model.0.0", "model.0.1")


def test_no_sequential_is_large_enough():
    net = L.LightningModule()
    net.head = nn.Sequential(nn.Linear(4, 4, bias=False))
    net.tower = nn.Linear(4, 12, bias=False)
    message = r"No nn.Sequential .*'head' \(25.0%\).*module=...\).*configure_pipeline"
    with pytest.raises(MisconfigurationException, match=message):
        find_layers(net)
    with pytest.raises(MisconfigurationException, match="no nn.Sequential at all.*configure"):
        find_layers(Tower())


def test_path():
    net = Net()
    net.other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert find_layers(net, "other").layers == tuple(net.other)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("modle", "'modle'` names no submodule of Net: did you mean 'model'"),
        ("zzz", "'zzz'` names no submodule of Net: it has 'model', 'model.0'"),
        ("model.0", r"'model.0'` names a Linear, expected an nn.Sequential; it has 'model' \("),
        ("empty", "'empty'` names an empty nn.Sequential"),
    ],
)
def test_path_errors(path, message):
    net = Net()
    net.empty = nn.Sequential()
    with pytest.raises(MisconfigurationException, match=message):
        find_layers(net, path)


def test_a_path_that_would_be_ignored_is_refused():
    with pytest.raises(MisconfigurationException, match="'model'` was given.*remove one"):
        find_layers(Listed(lambda net: list(net.model)), "model")


def test_hook_finds_the_lowest_callable_container():
    net = Listed(lambda net: list(net.tower.blocks))
    net.tower = Tower()
    found = find_layers(net)
    # The nn.ModuleList holds them all as well, but nobody can call it.
    assert (found.module, found.name) == (net.tower, "tower")
    assert found.names == ("tower.blocks.0", "tower.blocks.1", "tower.blocks.2")
    assert found.keywords


def test_hook_over_several_children_takes_the_root():
    net = Listed(lambda net: [net.embed, *net.model])
    net.embed = nn.Linear(4, 4)
    found = find_layers(net)
    assert (found.module, found.name) == (net, "")
    assert found.names[:2] == ("embed", "model.0")


def test_hook_may_return_any_iterable():
    for pick in (lambda net: net.model, lambda net: iter(net.model)):
        net = Listed(pick)
        assert find_layers(net).layers == tuple(net.model)


@pytest.mark.parametrize(
    ("pick", "message"),
    [
        (lambda net: [], "returned no layers"),
        (lambda net: 3, r"returned a int; expected a list of modules"),
        (lambda net: ["model"], "as entry 0 a str; return modules only"),
        (lambda net: [net], "as entry 0 the module itself"),
        (lambda net: [net.model, nn.Linear(4, 4)], "as entry 1 a Linear that is not a submodule"),
        (
            lambda net: [net.model[1], net.model[0], net.model[1]],
            "as entry 2 'model.1', the same object as entry 0",
        ),
        (lambda net: [net.model, net.model[0]], "'model' and also 'model.0', which is a part"),
    ],
)
def test_hook_errors(pick, message):
    with pytest.raises(MisconfigurationException, match=rf"Listed.configure_pipeline.*{message}"):
        find_layers(Listed(pick))


def test_lazy_parameters_are_refused():
    with pytest.raises(MisconfigurationException, match="'0.weight' of Sequential has no shape"):
        find_layers(nn.Sequential(nn.LazyLinear(4)))


@pytest.mark.parametrize("in_place", [True, False])
def test_compiling_all_layers_into_one_graph_is_refused(in_place):
    net = L.LightningModule()
    net.model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if in_place:
        net.model.compile(backend="eager")
    else:
        net.model = torch.compile(net.model, backend="eager")
    with pytest.raises(MisconfigurationException, match="'model', which runs all.*Compile each"):
        find_layers(net)


def test_compiled_layers_are_fine():
    net = nn.Sequential(*[torch.compile(nn.Linear(2, 2), backend="eager") for _ in range(2)])
    assert len(find_layers(net).layers) == 2


class Signatures:
    class Many(nn.Module):
        def forward(self, x, mask=None, *, rate=0.0, **anything):
            return x

    class KeywordOnly(nn.Module):
        def forward(self, x, /, *rest, mask):
            return x


def test_keyword_names():
    assert keyword_names(Signatures.Many()) == {"mask", "rate"}
    assert keyword_names(Signatures.Many(), num_positional=0) == {"x", "mask", "rate"}
    assert keyword_names(Signatures.Many(), num_positional=2) == {"rate"}
    assert keyword_names(Signatures.KeywordOnly(), num_positional=0) == {"mask"}
    assert keyword_names(nn.Linear(1, 1)) == frozenset()


def test_keyword_names_of_wrapped_layers():
    compiled = torch.compile(Signatures.Many(), backend="eager")
    assert keyword_names(compiled) == {"mask", "rate"}
    net = nn.Sequential(Signatures.Many(), nn.Linear(1, 1))
    shard(find_layers(net), owned=[1])
    assert keyword_names(net[0]) == {"mask", "rate"}


def test_parameter_counts_count_a_shared_parameter_once():
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(2, 3))
    net[2].weight = net[0].weight
    assert parameter_counts(find_layers(net)) == [9, 0, 3]
