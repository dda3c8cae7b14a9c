"""What follows from a device's ports: addresses learned, neighbours, routes, adjacencies, the log."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, timedelta
from ipaddress import IPv4Network
from random import Random
from typing import Protocol

from workbench.session.router import names
from workbench.session.router.state import (
    Adjacency,
    Arp,
    Device,
    Interface,
    Kind,
    Learned,
    Log,
    Neighbour,
    Peer,
    Route,
    Software,
    Split,
    Standby,
    Vlan,
)

Interfaces = tuple[Interface, ...]
_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")


class AddressSource(Protocol):
    """What hands out addresses; see `devices.Addresses`."""

    def network(self) -> str: ...

    def host(self, network: str) -> str: ...

    def mac(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Making:
    """What every table of one device is drawn from; `scale` 2 has twice as many rows."""

    random: Random
    split: Split
    addresses: AddressSource
    scale: int


def fill(
    making: Making,
    name: str,
    kind: Kind,
    software: Software,
    interfaces: Interfaces,
    vlans: tuple[Vlan, ...],
) -> Device:
    """The device of these ports."""
    random, addresses = making.random, making.addresses
    live = tuple(one for one in interfaces if one.ip and one.prefix < 32 and one.status == "up")
    arp = _arp(making, interfaces)
    neighbours = _neighbours(making, interfaces, live)
    gateway = addresses.host(_stem(live[0]))
    asn = random.randint(64512, 65534)
    verbose = random.random() < 0.3
    return Device(
        name=name,
        kind=kind,
        verbose=verbose,
        dialect=random.randint(0, 3),
        software=software,
        interfaces=interfaces,
        vlans=vlans,
        arp=arp,
        learned=_learned(random, addresses, interfaces, arp, vlans),
        neighbours=neighbours,
        routes=_routes(random, addresses, interfaces, live, gateway, verbose),
        gateway=gateway,
        router_id=next((one.ip for one in interfaces if one.name.startswith("Loopback")), live[0].ip),
        adjacencies=_adjacencies(random, addresses, live),
        asn=asn,
        peers=_peers(making, live, asn),
        standby=_standby(random, addresses, live),
        log=_log(making, interfaces, live),
        cpu=(random.randint(1, 40), random.randint(1, 70), random.randint(1, 70)),
        clock=_clock(random),
    )


def _stem(interface: Interface) -> str:
    return interface.ip.rpartition(".")[0]


def _age(random: Random) -> str:
    return random.choice(
        (
            f"{random.randint(0, 23):02d}:{random.randint(0, 59):02d}:{random.randint(0, 59):02d}",
            f"{random.randint(1, 6)}d{random.randint(0, 23):02d}h",
            f"{random.randint(1, 40)}w{random.randint(0, 6)}d",
            f"{random.randint(1, 3)}y{random.randint(1, 51):02d}w",
        )
    )


def _arp(making: Making, interfaces: Interfaces) -> tuple[Arp, ...]:
    random, addresses = making.random, making.addresses
    homes = [one for one in interfaces if one.ip and one.prefix < 32 and one.status == "up"]
    rows = [Arp(one.ip, None, one.mac, one.name) for one in random.sample(homes, min(len(homes), 2))]
    for _ in range(making.scale * random.randint(3, 5)):
        home = random.choice(homes)
        rows.append(Arp(addresses.host(_stem(home)), random.randint(0, 240), addresses.mac(), home.name))
    if random.random() < 0.35:  # one machine with two addresses
        twin = rows[-1]
        rows.append(Arp(addresses.host(twin.ip.rpartition(".")[0]), random.randint(0, 240), twin.mac, twin.interface))
    if random.random() < 0.5:
        rows.append(Arp(addresses.host(_stem(random.choice(homes))), 0, "", ""))
    random.shuffle(rows)
    return tuple(rows)


def _learned(
    random: Random, addresses: AddressSource, interfaces: Interfaces, arp: tuple[Arp, ...], vlans: tuple[Vlan, ...]
) -> tuple[Learned, ...]:
    if not vlans:
        return ()
    access = [one for one in interfaces if one.mode == "access"]
    trunks = [one for one in interfaces if one.mode == "trunk"]

    def row(number: int, mac: str) -> Learned:
        ports = [one for one in access if one.vlan == number] or trunks
        return Learned(number, mac, random.choice(ports).name)

    seen: dict[str, Learned] = {}
    for entry in arp:
        if entry.mac and entry.age is not None and entry.mac not in seen:
            seen[entry.mac] = row(int(entry.interface.removeprefix("Vlan")), entry.mac)
    for _ in range(random.randint(1, 3)):
        mac = addresses.mac()
        seen[mac] = row(random.choice(vlans[1:]).number, mac)
    return tuple(sorted(seen.values(), key=lambda entry: entry.vlan))


def _neighbours(making: Making, interfaces: Interfaces, live: Interfaces) -> tuple[Neighbour, ...]:
    random, addresses, split = making.random, making.addresses, making.split
    ports = [one for one in interfaces if one.physical and one.status == "up"]
    rows: list[Neighbour] = []
    for port in sorted(random.sample(ports, min(len(ports), making.scale * random.randint(2, 4))), key=ports.index):
        site, number = random.choice(names.SITES[split]), random.randint(1, 99)
        host = f"{random.choice(names.ROLES[split])}{number}"
        long = random.random() < 0.35
        platform, letters = random.choice(names.NEIGHBOURS)
        if platform == "IP Phone":
            host, long, remote = f"SEP{random.getrandbits(48):012X}", False, "Port 1"
        else:
            remote = random.choice(("GigabitEthernet0/{}", "GigabitEthernet1/0/{}", "TenGigabitEthernet1/1/{}"))
            remote = remote.format(random.randint(0, 48))
        name = f"{host}.{site}.example" if long else f"{host}-{site}" if platform != "IP Phone" else host
        home = port if port.ip else random.choice(live)
        rows.append(
            Neighbour(name, port.name, random.randint(120, 179), letters, platform, remote, addresses.host(_stem(home)))
        )
    return tuple(rows)


def _routes(
    random: Random, addresses: AddressSource, interfaces: Interfaces, live: Interfaces, gateway: str, local: bool
) -> tuple[Route, ...]:
    rows = [Route("S*", "0.0.0.0/0", 1, 0, gateway, "", "")]
    for one in interfaces:
        if one.ip and one.status == "up":
            rows.append(Route("C", str(one.network), 0, 0, "", "", one.name))
            if local and one.prefix < 32:
                rows.append(Route("L", f"{one.ip}/32", 0, 0, "", "", one.name))
    for _ in range(random.randint(3, 5)):
        code, distance = random.choice((("O", 110), ("O E2", 110), ("D", 90), ("B", 20), ("S", 1)))
        metric = 0 if code in ("S", "B") else random.choice((2, 11, 20, 65, random.randint(2, 3000)))
        home = random.choice(live)
        length = random.choice((24, 24, 24, 23, 25, 26))
        network = IPv4Network(f"{addresses.network()}.0/{length}", strict=False)
        if any(network.overlaps(IPv4Network(row.network)) for row in rows[1:]):
            continue
        age = "" if code == "S" else _age(random)
        interface = "" if code in ("S", "B") else home.name
        rows.append(Route(code, str(network), distance, metric, addresses.host(_stem(home)), age, interface))
    return (rows[0], *sorted(rows[1:], key=lambda row: (row.net.network_address, row.net.prefixlen)))


def _adjacencies(random: Random, addresses: AddressSource, live: Interfaces) -> tuple[Adjacency, ...]:
    rows: list[Adjacency] = []
    routers: dict[str, str] = {}
    same = random.random() < 0.3  # the same routers on both links, as behind subinterfaces
    for home in random.sample(live, min(len(live), random.randint(1, 2))):
        states = random.sample(("FULL/DR", "FULL/BDR", "2WAY/DROTHER", "FULL/DROTHER"), random.randint(1, 2))
        for state in routers if same and routers else states:
            router = routers[state] if same and state in routers else addresses.host(addresses.network())
            routers[state] = router
            dead = f"00:00:{random.randint(30, 39)}"
            priority, address = random.choice((0, 1, 1)), addresses.host(_stem(home))
            rows.append(Adjacency(router, priority, state, dead, address, home.name))
    return tuple(rows)


def _peers(making: Making, live: Interfaces, asn: int) -> tuple[Peer, ...]:
    random, addresses = making.random, making.addresses
    count = making.scale * random.randint(2, 4)
    idle = random.randrange(count)
    rows: list[Peer] = []
    for index in range(count):
        state = random.choice(("Idle", "Active", "Idle (Admin)")) if index == idle else str(random.randint(1, 900000))
        other = asn if random.random() < 0.2 else random.randint(64512, 65534)
        address = addresses.host(_stem(random.choice(live)))
        traffic = (random.randint(100, 3000000), random.randint(100, 3000000))
        rows.append(Peer(address, other, *traffic, _age(random), state))
    return tuple(rows)


def _standby(random: Random, addresses: AddressSource, live: Interfaces) -> tuple[Standby, ...]:
    rows: list[Standby] = []
    for home in random.sample(live, min(len(live), random.randint(1, 3))):
        state, priority = random.choice((("Active", 110), ("Active", 105), ("Standby", 100), ("Standby", 90)))
        other, virtual = addresses.host(_stem(home)), addresses.host(_stem(home))
        rows.append(Standby(home.name, random.randint(1, 99), priority, state, other, virtual))
    return tuple(rows)


def _log(making: Making, interfaces: Interfaces, live: Interfaces) -> tuple[Log, ...]:
    random, addresses, split = making.random, making.addresses, making.split
    ports = [one for one in interfaces if one.physical]
    down = next((one for one in ports if one.status == "down"), None) or random.choice(ports)
    events: list[tuple[str, str, str]] = []
    flapped = down.status == "up"
    events.append(("link", down.name, "down"))
    if flapped:
        events.append(("link", down.name, "up"))
    if random.random() < 0.6:
        place = random.randint(0, len(events))
        source = addresses.host(_stem(random.choice(live)))
        events.insert(place, ("config", random.choice(names.USERS[split]), source))
    clock = random.randint(0, 20) * 3600 + random.randint(0, 3500)
    day = f"{random.choice(names.MONTHS)} {random.randint(1, 28):2d}"
    rows: list[Log] = []
    for kind, subject, value in events:
        clock += random.randint(3, 1900)
        if kind == "config":
            text = f"%SYS-5-CONFIG_I: Configured from console by {subject} on vty0 ({value})"
            rows.append(Log(_stamp(day, clock), kind, text, subject, value))
            continue
        link = f"%LINK-3-UPDOWN: Interface {subject}, changed state to {value}"
        line = f"%LINEPROTO-5-UPDOWN: Line protocol on Interface {subject}, changed state to {value}"
        pair = [("link", link), ("line", line)][: random.randint(1, 2)]
        if random.random() < 0.3:
            pair.reverse()
        for which, text in pair:
            rows.append(Log(_stamp(day, clock), which, text, subject, value))
            clock += 1
    return tuple(rows)


def _stamp(day: str, clock: int) -> str:
    return f"{day} {clock // 3600:02d}:{clock // 60 % 60:02d}:{clock % 60:02d}"


def _clock(random: Random) -> str:
    time = f"{random.randint(0, 23):02d}:{random.randint(0, 59):02d}:{random.randint(0, 59):02d}"
    day = date(2015, 1, 1) + timedelta(days=random.randrange(4000))
    star = random.choice(("", "", "*"))
    date_words = f"{_DAYS[day.weekday()]} {names.MONTHS[day.month - 1]} {day.day} {day.year}"
    return f"{star}{time}.{random.randint(0, 999):03d} UTC {date_words}"
