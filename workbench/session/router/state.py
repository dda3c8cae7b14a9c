"""What a simulated device is: one frozen state that every show command reads, so that outputs agree."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from typing import Literal

Split = Literal["train", "test"]
Kind = Literal["router", "switch"]

ABBREVIATIONS: dict[str, tuple[str, str]] = {
    "GigabitEthernet": ("Gi", "Gig "),
    "TenGigabitEthernet": ("Te", "Ten "),
    "FastEthernet": ("Fa", "Fas "),
    "Ethernet": ("Et", "Eth "),
    "Loopback": ("Lo", "Loo"),
    "Serial": ("Se", "Ser "),
    "Vlan": ("Vl", "Vla"),
}
"""Of an interface's type: as tables print it, and as CDP does."""


def split_name(name: str) -> tuple[str, str]:
    """An interface's name as its type and its place: `GigabitEthernet0/1` is (`GigabitEthernet`, `0/1`)."""
    match = re.fullmatch(r"([A-Za-z-]+)([0-9][0-9/.:]*)", name)
    return (match[1], match[2]) if match else (name, "")


@dataclass(frozen=True, slots=True)
class Interface:
    """A physical port, subinterface, loopback or VLAN interface."""

    name: str
    mode: Literal["routed", "access", "trunk", "virtual"]
    status: str  # up, down, administratively down, deleted
    protocol: str
    mac: str
    ip: str = ""  # "" where unassigned
    prefix: int = 24
    vlan: int = 1  # of an access port
    link: str = "connected"  # as `show interfaces status` calls it
    description: str = ""
    mtu: int = 1500
    speed: int = 1000  # Mbit/s
    input_errors: int = 0
    crc: int = 0
    resets: int = 0

    @property
    def short(self) -> str:
        """As tables print it: `Gi0/1`."""
        kind, place = split_name(self.name)
        return ABBREVIATIONS.get(kind, (kind, kind))[0] + place

    @property
    def cdp(self) -> str:
        """As CDP prints it: `Gig 0/1`."""
        kind, place = split_name(self.name)
        return ABBREVIATIONS.get(kind, (kind, kind))[1] + place

    @property
    def network(self) -> IPv4Network:
        """The connected network of an interface that has an address."""
        return IPv4Network(f"{self.ip}/{self.prefix}", strict=False)

    @property
    def physical(self) -> bool:
        """Whether it is a port with a cable."""
        return self.mode != "virtual" and "." not in self.name


@dataclass(frozen=True, slots=True)
class Vlan:
    """A VLAN; its ports are the access ports that name it."""

    number: int
    name: str


@dataclass(frozen=True, slots=True)
class Arp:
    """One ARP entry. `age` is None for the device's own address, `mac` is "" where incomplete."""

    ip: str
    age: int | None
    mac: str
    interface: str


@dataclass(frozen=True, slots=True)
class Learned:
    """One row of the MAC address table."""

    vlan: int
    mac: str
    port: str  # full name


@dataclass(frozen=True, slots=True)
class Neighbour:
    """What CDP and LLDP see at the other end of a cable."""

    name: str
    local: str  # full name
    hold: int
    capability: str
    platform: str
    remote: str  # full name
    address: str


@dataclass(frozen=True, slots=True)
class Route:
    """One route; `via` is "" where directly connected."""

    code: str
    network: str  # 10.1.2.0/24
    distance: int
    metric: int
    via: str
    age: str
    interface: str

    @property
    def net(self) -> IPv4Network:
        """The network it leads to."""
        return IPv4Network(self.network)


@dataclass(frozen=True, slots=True)
class Adjacency:
    """An OSPF neighbour."""

    router: str
    priority: int
    state: str
    dead: str
    address: str
    interface: str


@dataclass(frozen=True, slots=True)
class Peer:
    """A BGP peer; `state` is a number of prefixes where established."""

    address: str
    asn: int
    received: int
    sent: int
    since: str
    state: str


@dataclass(frozen=True, slots=True)
class Standby:
    """An HSRP group."""

    interface: str
    group: int
    priority: int
    state: str
    other: str
    virtual: str


@dataclass(frozen=True, slots=True)
class Log:
    """One line of the log buffer, and what it tells: link, line, config or other."""

    stamp: str
    kind: str
    text: str
    subject: str  # interface or user
    value: str  # up, down, or the address the user came from


@dataclass(frozen=True, slots=True)
class Software:
    """What `show version` tells."""

    platform: str
    family: str
    version: str
    image: str
    serial: str
    uptime: str
    reload: str


@dataclass(frozen=True, slots=True)
class Device:
    """One device. `verbose` ones print legends and small print as real images do; `dialect` picks table forms."""

    name: str
    kind: Kind
    verbose: bool
    dialect: int
    software: Software
    interfaces: tuple[Interface, ...]
    vlans: tuple[Vlan, ...]
    arp: tuple[Arp, ...]
    learned: tuple[Learned, ...]
    neighbours: tuple[Neighbour, ...]
    routes: tuple[Route, ...]
    gateway: str
    router_id: str
    adjacencies: tuple[Adjacency, ...]
    asn: int
    peers: tuple[Peer, ...]
    standby: tuple[Standby, ...]
    log: tuple[Log, ...]
    cpu: tuple[int, int, int]
    clock: str

    @property
    def ports(self) -> tuple[Interface, ...]:
        """Ports with a cable."""
        return tuple(interface for interface in self.interfaces if interface.physical)

    def interface(self, name: str) -> Interface | None:
        """The interface of a full name."""
        return next((interface for interface in self.interfaces if interface.name == name), None)

    def vlan_ports(self, number: int) -> tuple[Interface, ...]:
        """Access ports of a VLAN."""
        return tuple(port for port in self.ports if port.mode == "access" and port.vlan == number)

    def route_to(self, address: str) -> Route | None:
        """The longest route that leads to an address; a default route does not count, as in `show ip route A.B.C.D`."""
        target = IPv4Address(address)
        found = [route for route in self.routes if target in route.net and route.net.prefixlen]
        return max(found, key=lambda route: route.net.prefixlen, default=None)
