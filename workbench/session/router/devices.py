"""Devices from a seed: ports first, then everything that must agree with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from workbench.session.router import names, tables
from workbench.session.router.state import Device, Interface, Kind, Software, Split, Vlan

_ODD: dict[Split, int] = {"train": 0, "test": 1}
"""Second octets of addresses are even in one split and odd in the other."""
_MEDIA_SPEED = {"FastEthernet": 100, "Ethernet": 10, "TenGigabitEthernet": 10000}


_LARGE = 0.15
"""Share of devices with twice as many ports and rows."""


def generate(seed: int | str, split: Split, count: int) -> tuple[Device, ...]:
    """`count` devices of different names, the same for the same arguments on every machine."""
    devices: list[Device] = []
    attempt = 0
    while len(devices) < count:
        random = Random(f"router lab/{seed}/{split}/{attempt}")
        attempt += 1
        device = _device(random, split)
        if all(device.name != other.name for other in devices):
            devices.append(device)
    return tuple(devices)


class Addresses:
    """Hands out networks of a device's own range, each only once, and MAC addresses."""

    def __init__(self, random: Random, split: Split) -> None:
        self.random = random
        odd = _ODD[split]
        ten, private = f"10.{2 * random.randint(0, 126) + odd}", f"172.{16 + 2 * random.randint(0, 7) + odd}"
        self.base = random.choice((ten, private))
        self._thirds = random.sample(range(256), 128)
        self._used: set[str] = set()

    def network(self) -> str:
        """Three octets that were not given before."""
        return f"{self.base}.{self._thirds.pop()}"

    def host(self, network: str) -> str:
        """An address of a /24 given by its three octets, not given before."""
        while True:
            address = f"{network}.{self.random.randint(1, 254)}"
            if address not in self._used:
                self._used.add(address)
                return address

    def mac(self) -> str:
        """A MAC address as IOS writes it."""
        digits = f"{self.random.getrandbits(48) & ~(3 << 40):012x}"  # neither multicast nor locally administered
        return ".".join((digits[:4], digits[4:8], digits[8:]))


def _device(random: Random, split: Split) -> Device:
    kind: Kind = random.choice(("router", "switch"))
    name = _name(random, split)
    addresses = Addresses(random, split)
    pattern = random.choice(names.PORTS[kind])
    scale = 2 if random.random() < _LARGE else 1
    first, count = random.choice((0, 1, 1)), scale * random.randint(4, 6)
    ports = [pattern.format(first + index) for index in range(count)]
    if kind == "router":
        vlans: tuple[Vlan, ...] = ()
        interfaces = _router_interfaces(random, split, addresses, ports)
    else:
        numbers = sorted(random.sample(range(2, 900), random.randint(3, 4)))
        labels = random.sample(names.VLANS[split], len(numbers))
        vlans = (Vlan(1, "default"), *(Vlan(number, label) for number, label in zip(numbers, labels, strict=True)))
        interfaces = _switch_interfaces(random, split, addresses, ports, vlans)
    return tables.fill(
        tables.Making(random, split, addresses, scale), name, kind, _software(random, kind), tuple(interfaces), vlans
    )


def _name(random: Random, split: Split) -> str:
    role, site = random.choice(names.ROLES[split]), random.choice(names.SITES[split])
    number = random.randint(1, 99)
    return random.choice((f"{role}-{site}-{number}", f"{role}-{site}-{number}", f"{site}{role}{number}"))


def _status(random: Random) -> tuple[str, str]:
    return random.choice((("up", "up"),) * 4 + (("administratively down", "down"), ("down", "down")))


def _port(random: Random, split: Split, addresses: Addresses, name: str) -> Interface:
    status, protocol = _status(random)
    kind = name.rstrip("0123456789/")
    errors = random.choice((0, 0, random.randint(1, 9999)))
    link = {"up": "connected", "down": random.choice(("notconnect", "err-disabled"))}.get(status, "disabled")
    return Interface(
        name,
        "routed",
        status,
        protocol,
        addresses.mac(),
        link=link,
        description=random.choice(("", *random.sample(names.DESCRIPTIONS[split], 3))),
        mtu=random.choice((1500, 1500, 1500, 9216, 9000, 1998)),
        speed=_MEDIA_SPEED.get(kind, 1000),
        input_errors=errors,
        crc=random.randint(0, errors) if errors else 0,
        resets=random.randint(0, 9),
    )


def _router_interfaces(random: Random, split: Split, addresses: Addresses, ports: Sequence[str]) -> list[Interface]:
    out: list[Interface] = []
    parent = random.choice(ports) if random.random() < 0.5 else ""
    for index, name in enumerate(ports):
        port = _port(random, split, addresses, name)
        if index < 2:  # so that there is always somewhere for routes and neighbours
            port = replace(port, status="up", protocol="up", link="connected")
        if index < 2 or random.random() < 0.6:
            port = replace(port, ip=addresses.host(addresses.network()), prefix=24)
        out.append(port)
        if name == parent:
            for number in sorted(random.sample(range(2, 400), 2)):
                state = ("up", "up") if random.random() < 0.6 else ("deleted", "down")
                address = "" if state[0] == "deleted" else addresses.host(addresses.network())
                out.append(replace(port, name=f"{name}.{number}", ip=address, status=state[0], protocol=state[1]))
    loopback = f"Loopback{random.randint(0, 9)}"
    address = addresses.host(addresses.network())
    out.append(Interface(loopback, "virtual", "up", "up", addresses.mac(), address, 32, mtu=1514))
    return out


def _switch_interfaces(
    random: Random, split: Split, addresses: Addresses, ports: Sequence[str], vlans: tuple[Vlan, ...]
) -> list[Interface]:
    out: list[Interface] = []
    for vlan in vlans[1:]:
        status, protocol = ("up", "up") if vlan is vlans[1] else _status(random)
        address = addresses.host(addresses.network())
        out.append(Interface(f"Vlan{vlan.number}", "virtual", status, protocol, addresses.mac(), address))
    for index, name in enumerate(ports):
        port = _port(random, split, addresses, name)
        if index == 0 or (index > len(vlans) - 1 and random.random() < 0.4):
            out.append(replace(port, mode="trunk", status="up", protocol="up", link="connected"))
            continue
        # The first access ports serve one VLAN each, so that every host has a port.
        vlan = vlans[index] if index < len(vlans) else random.choice(vlans[1:])
        if index == 1:  # a second cable for neighbours
            port = replace(port, status="up", protocol="up", link="connected")
        out.append(replace(port, mode="access", vlan=vlan.number))
    return out


def _software(random: Random, kind: Kind) -> Software:
    platform, family, image, _ = random.choice([entry for entry in names.PLATFORMS if entry[3] == kind])
    train = random.choice(("SE", "M", "T", "E", "S", "SG", "SY"))
    release = (
        f"{random.choice((12, 15, 15))}.{random.randint(0, 9)}({random.randint(1, 54)}){train}{random.randint(1, 12)}"
    )
    years, weeks, days = random.randint(2, 9), random.randint(2, 51), random.randint(2, 6)
    hours, minutes = random.randint(2, 23), random.randint(2, 59)
    uptime = random.choice(
        (
            f"{years} years, {weeks} weeks, {days} days, {hours} hours, {minutes} minutes",
            f"{weeks} weeks, {days} days, {hours} hours, {minutes} minutes",
            f"{days} days, {hours} hours, {minutes} minutes",
        )
    )
    letters = "".join(random.choice("ABCDEFGHJKLMNPQRSTUVWXYZ0123456789") for _ in range(4))
    serial = f"{random.choice(('FTX', 'FOC', 'FDO', 'CAT', 'FHK'))}{random.randint(1000, 2299)}{letters}"
    where = random.choice(("flash:", "bootflash:", "flash0:/"))
    reason = random.choice(("power-on", "reload", "Reload Command", "crash"))
    file = f"{where}{image}.{release.replace('(', '-').replace(')', '.')}.bin"
    return Software(platform, family, release, file, serial, uptime, reason)
