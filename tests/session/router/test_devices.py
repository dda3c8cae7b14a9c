from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network
from itertools import chain

import pytest

from workbench.session.router import names
from workbench.session.router.devices import generate
from workbench.session.router.state import Device, Split

LAB = tuple(chain(generate("consistency", "train", 40), generate("consistency", "test", 40)))


@pytest.fixture(params=range(len(LAB)), ids=lambda index: LAB[index].name)
def device(request: pytest.FixtureRequest) -> Device:
    return LAB[request.param]


def test_the_same_seed_gives_the_same_devices_and_another_seed_others() -> None:
    assert generate(7, "train", 3) == generate(7, "train", 3)
    assert generate(7, "train", 3) == generate(7, "train", 5)[:3]
    assert not {one.name for one in generate(7, "train", 5)} & {one.name for one in generate(8, "train", 5)}


def test_addresses_of_hosts_and_interfaces_lie_in_connected_networks(device: Device) -> None:
    networks = {one.name: one.network for one in device.interfaces if one.ip}
    for entry in device.arp:
        if entry.mac:
            assert _inside(entry.ip, networks[entry.interface])
    for adjacency in device.adjacencies:
        assert _inside(adjacency.address, networks[adjacency.interface])
    assert any(_inside(device.gateway, network) for network in networks.values())
    for route in device.routes[1:]:
        if route.via:
            assert any(_inside(route.via, network) for network in networks.values())


def test_no_address_stands_twice(device: Device) -> None:
    own = [one.ip for one in device.interfaces if one.ip]
    others = [entry.ip for entry in device.arp if entry.age is not None]
    assert len({*own, *others}) == len(own) + len(others)
    assert {entry.ip for entry in device.arp if entry.age is None} <= set(own)


def test_every_host_of_a_switch_is_learned_on_a_port_of_its_vlan(device: Device) -> None:
    if device.kind == "router":
        assert not device.learned and not device.vlans
        return
    learned = {row.mac: row for row in device.learned}
    assert len(learned) == len(device.learned)
    for entry in device.arp:
        if entry.mac and entry.age is not None:
            assert f"Vlan{learned[entry.mac].vlan}" == entry.interface
    for row in device.learned:
        port = device.interface(row.port)
        assert port is not None
        assert port.mode == "trunk" or port.vlan == row.vlan


def test_neighbours_hang_on_ports_that_are_up(device: Device) -> None:
    assert device.neighbours
    for one in device.neighbours:
        port = device.interface(one.local)
        assert port is not None
        assert port.physical and port.status == "up"


def test_what_is_asked_about_has_one_answer(device: Device) -> None:
    assert sum(not peer.state.isdigit() for peer in device.peers) == 1
    assert sum(row.kind == "link" and row.value == "down" for row in device.log) == 1
    assert sum(row.kind == "config" for row in device.log) <= 1
    assert sum(not entry.mac for entry in device.arp) <= 1
    for interface in {row.interface for row in device.adjacencies}:
        states = [row.state for row in device.adjacencies if row.interface == interface]
        assert len(set(states)) == len(states)


def test_the_log_agrees_with_the_port_that_it_names(device: Device) -> None:
    for row in device.log:
        if row.kind == "link" and row.value == "down":
            port = device.interface(row.subject)
            assert port is not None
            back = any(other.kind == "link" and other.value == "up" for other in device.log)
            assert back == (port.status == "up")
    assert [row.stamp for row in device.log] == sorted(row.stamp for row in device.log)


@pytest.mark.parametrize("table", [names.ROLES, names.SITES, names.VLANS, names.DESCRIPTIONS, names.USERS])
def test_the_splits_share_no_name(table: dict[Split, tuple[str, ...]]) -> None:
    assert not {*table["train"]} & {*table["test"]}


def test_the_splits_share_no_address_range() -> None:
    def ranges(split: Split) -> set[str]:
        return {".".join(one.ip.split(".")[:2]) for d in generate(1, split, 200) for one in d.interfaces if one.ip}

    assert not ranges("train") & ranges("test")


def _inside(address: str, network: IPv4Network) -> bool:
    return IPv4Address(address) in network
