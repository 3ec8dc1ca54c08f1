"""Which interface gloo is told to use."""

from __future__ import annotations

import ipaddress
import os

import pytest

from lightning_pipe.runtime import network
from lightning_pipe.runtime.network import gloo_interface, interface_to

VARIABLE = "GLOO_SOCKET_IFNAME"


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def chosen(num_nodes: int, main_address: str) -> str | None:
    with gloo_interface(num_nodes, main_address):
        return os.environ.get(VARIABLE)


def test_one_node_stays_on_the_loopback_interface() -> None:
    assert chosen(1, "no.such.host.invalid") == "lo"
    assert VARIABLE not in os.environ


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_nodes_that_are_one_machine_stay_there_too(address: str) -> None:
    assert chosen(2, address) == "lo"


def test_the_users_choice_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "ib0")
    assert chosen(1, "127.0.0.1") == chosen(2, "127.0.0.1") == "ib0"
    assert os.environ[VARIABLE] == "ib0"


def test_what_cannot_be_found_out_is_left_to_gloo() -> None:
    assert chosen(2, "no.such.host.invalid") is None


@pytest.mark.parametrize("outside", ["10.1.2.3", "fd12::3", None])
def test_a_host_whose_name_is_a_loopback_address_is_reached_from_outside(
    monkeypatch: pytest.MonkeyPatch, outside: str | None
) -> None:
    """As Debian has it: 127.0.1.1 in /etc/hosts, while other nodes have the real address."""
    sources = {"node0": ipaddress.ip_address("127.0.0.1")}
    if outside is not None:
        sources[network._ELSEWHERE] = ipaddress.ip_address(outside)
    monkeypatch.setattr(network, "_source_address", sources.get)
    monkeypatch.setattr(network, "_interface_of", lambda address: f"with {address}")
    assert interface_to("node0") == (f"with {outside}" if outside else "lo")


def test_an_address_has_an_interface() -> None:
    assert network._interface_of(ipaddress.ip_address("127.0.0.1")) == "lo"
    assert network._interface_of(ipaddress.ip_address("203.0.113.77")) is None
    assert network._interface_of(ipaddress.ip_address("fd00::cafe:77")) is None


def test_a_failure_to_connect_names_the_interface() -> None:
    with pytest.raises(RuntimeError) as caught, gloo_interface(2, "127.0.0.1"):
        raise RuntimeError("Gloo connectFullMesh failed with ...")
    assert "interface 'lo'" in caught.value.__notes__[0]
    assert VARIABLE in caught.value.__notes__[0]
    assert VARIABLE not in os.environ
