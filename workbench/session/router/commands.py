"""The show commands that a simulated device knows, and what runs each."""

from __future__ import annotations

from collections.abc import Callable

from workbench.session.router.grammar import CommandError, Grammar
from workbench.session.router.shows import interfaces, routing, switching, system
from workbench.session.router.state import Device, Interface, Kind

Show = Callable[[Device, tuple[str, ...]], str]
"""A device and the command's arguments become text."""


def _plain(render: Callable[[Device], str]) -> Show:
    return lambda device, _: render(device)


def _of_interface(render: Callable[[Device, Interface], str]) -> Show:
    def show(device: Device, arguments: tuple[str, ...]) -> str:
        one = device.interface(arguments[0])
        if one is None or one.status == "deleted":
            raise CommandError("invalid", f"% Invalid interface {arguments[0]}")
        return render(device, one)

    return show


def _route(device: Device, arguments: tuple[str, ...]) -> str:
    return routing.ip_route_to(device, arguments[0])


def _mac_by(field: str) -> Show:
    def show(device: Device, arguments: tuple[str, ...]) -> str:
        return switching.mac_table(device, [row for row in device.learned if str(getattr(row, field)) == arguments[0]])

    return show


def _running(device: Device, one: Interface) -> str:
    return system.running_interface(device, one)


_COMMON: tuple[tuple[str, Show], ...] = (
    ("show arp", _plain(switching.arp)),
    ("show ip arp", _plain(switching.arp)),
    ("show ip interface brief", _plain(interfaces.ip_interface_brief)),
    ("show interfaces", _plain(interfaces.every_interface)),
    ("show interfaces description", _plain(interfaces.interfaces_description)),
    ("show interfaces <interface>", _of_interface(interfaces.interface)),
    ("show ip route", _plain(routing.ip_route)),
    ("show ip route <address>", _route),
    ("show ip ospf neighbor", _plain(routing.ospf_neighbor)),
    ("show ip bgp summary", _plain(routing.bgp_summary)),
    ("show standby brief", _plain(switching.standby_brief)),
    ("show cdp neighbors", _plain(system.cdp_neighbors)),
    ("show cdp neighbors detail", _plain(system.cdp_detail)),
    ("show lldp neighbors", _plain(system.lldp_neighbors)),
    ("show version", _plain(system.version)),
    ("show inventory", _plain(system.inventory)),
    ("show logging", _plain(system.logging)),
    ("show clock", _plain(system.clock)),
    ("show processes cpu", _plain(system.cpu)),
    ("show running-config", _plain(system.running_config)),
    ("show running-config interface <interface>", _of_interface(_running)),
    ("show startup-config", _plain(system.running_config)),
)
_SWITCH: tuple[tuple[str, Show], ...] = (
    ("show interfaces status", _plain(interfaces.interfaces_status)),
    ("show interfaces status err-disabled", _plain(interfaces.interfaces_err_disabled)),
    ("show vlan", _plain(switching.vlan)),
    ("show vlan brief", _plain(switching.vlan_brief)),
    ("show mac address-table", _plain(switching.mac_table)),
    ("show mac address-table address <mac>", _mac_by("mac")),
    ("show mac address-table vlan <number>", _mac_by("vlan")),
    ("show mac address-table interface <interface>", _mac_by("port")),
)
GRAMMARS: dict[Kind, Grammar[Show]] = {"router": Grammar(_COMMON), "switch": Grammar(_COMMON + _SWITCH)}
PATTERNS: tuple[str, ...] = tuple(pattern for pattern, _ in _COMMON + _SWITCH)
