"""Questions about ARP, MAC addresses and VLANs."""

from __future__ import annotations

from random import Random

from workbench.lab.question import Draw, QuestionKind, arp_command, listed
from workbench.session.router.shows.switching import port_word
from workbench.session.router.state import Device


def _arp_mac(device: Device, random: Random) -> Draw | None:
    rows = [row for row in device.arp if row.mac]
    row = random.choice(rows)
    return Draw(
        (row.ip,), (arp_command(device),), f"{row.ip} is at {row.mac} on {row.interface}.", (row.mac, row.interface)
    )


def _arp_ip(device: Device, random: Random) -> Draw | None:
    macs = [row.mac for row in device.arp if row.mac]
    rows = [row for row in device.arp if row.mac and macs.count(row.mac) == 1]
    if not rows:
        return None
    row = random.choice(rows)
    return Draw((row.mac,), (arp_command(device),), f"{row.mac} has the address {row.ip}.", (row.ip,))


def _arp_incomplete(device: Device, random: Random) -> Draw | None:
    del random
    found = [row.ip for row in device.arp if not row.mac]
    answer = f"{found[0]} is incomplete." if found else "No entry is incomplete."
    return Draw((), (arp_command(device),), answer, tuple(found) or ("No entry",))


def _arp_age(device: Device, random: Random) -> Draw | None:
    rows = [row for row in device.arp if row.mac and row.age is not None]
    row = random.choice(rows)
    return Draw((row.ip,), (arp_command(device),), f"{row.ip} is {row.age} minutes old.", (f" {row.age} minutes",))


def _arp_shared(device: Device, random: Random) -> Draw | None:
    macs = [row.mac for row in device.arp if row.mac]
    twins = [mac for mac in macs if macs.count(mac) == 2]
    if not twins:
        return None
    mac = random.choice(twins)
    first, second = (row.ip for row in device.arp if row.mac == mac)
    return Draw((mac,), (arp_command(device),), f"{mac} belongs to {first} and {second}.", (first, second))


def _mac_port(device: Device, random: Random) -> Draw | None:
    row = random.choice(device.learned)
    port = port_word(device, row)
    answer = f"{row.mac} is in VLAN {row.vlan} on {port}."
    return Draw((row.mac,), ("show mac address-table",), answer, (port, str(row.vlan)))


def _host_port(device: Device, random: Random) -> Draw | None:
    known = {row.mac: row for row in device.learned}
    rows = [row for row in device.arp if row.mac in known]
    if not rows:
        return None
    row = random.choice(rows)
    port = port_word(device, known[row.mac])
    commands = (arp_command(device), f"show mac address-table address {row.mac}")
    return Draw((row.ip,), commands, f"{row.ip} ({row.mac}) is on {port}.", (row.mac, port))


def _gateway_mac(device: Device, random: Random) -> Draw | None:
    """Which machine an own address's interface shows: two tables, joined by the address."""
    known = {row.ip: row for row in device.arp if row.mac and row.age is None}
    rows = [one for one in device.interfaces if one.ip in known]
    if not rows:
        return None
    one = random.choice(rows)
    commands = ("show ip interface brief", arp_command(device))
    mac = known[one.ip].mac
    return Draw((one.name,), commands, f"{one.name} has {one.ip} with the MAC {mac}.", (one.ip, mac))


def _vlan_name(device: Device, random: Random) -> Draw | None:
    vlan = random.choice(device.vlans[1:])
    return Draw((str(vlan.number),), ("show vlan brief",), f"VLAN {vlan.number} is named {vlan.name}.", (vlan.name,))


def _vlan_number(device: Device, random: Random) -> Draw | None:
    vlan = random.choice(device.vlans[1:])
    return Draw((vlan.name,), ("show vlan brief",), f"{vlan.name} is VLAN {vlan.number}.", (str(vlan.number),))


def _vlan_ports(device: Device, random: Random) -> Draw | None:
    vlan = random.choice([vlan for vlan in device.vlans if device.vlan_ports(vlan.number)])
    ports = [port.short for port in device.vlan_ports(vlan.number)]
    return Draw((str(vlan.number),), ("show vlan brief",), f"VLAN {vlan.number} has {listed(ports)}.", tuple(ports))


KINDS: tuple[QuestionKind, ...] = (
    QuestionKind(
        "arp-mac",
        (
            "What is the MAC of {0}?",
            "Look up the hardware address of {0}.",
            "Give me the MAC address and interface of {0}.",
            "Who answers for {0}?",
            "I need the hardware address behind {0}.",
            "Which MAC does {0} have, and where?",
            "MAC address for IP {0}?",
            "Resolve {0} to a MAC address.",
            "Find the MAC for the address {0}.",
            "Which hardware address and interface go with {0}?",
            "See in ARP where {0} is.",
        ),
        ("Find the MAC that belongs to {0}.", "Tell me which MAC {0} resolves to."),
        _arp_mac,
        1.6,
    ),
    QuestionKind(
        "arp-ip",
        (
            "Which IP address has the MAC {0}?",
            "What is the IP of {0}?",
            "{0}: which address does it use?",
            "Give me the IP address for the hardware address {0}.",
            "Find the IP behind {0} in ARP.",
            "Which address does ARP list for {0}?",
            "Look up the IP address of the MAC {0}.",
        ),
        ("Whose IP goes with the MAC {0}?", "Tell me the IP address that {0} holds."),
        _arp_ip,
    ),
    QuestionKind(
        "arp-incomplete",
        (
            "Are there incomplete ARP entries?",
            "Which IP has an incomplete ARP entry?",
            "Any ARP entries that did not resolve?",
            "List unresolved ARP entries.",
            "Is some ARP entry incomplete?",
            "Which ARP entry has no hardware address?",
            "Check ARP for an incomplete entry.",
            "Name the address whose ARP entry is incomplete.",
            "Did ARP fail for any address?",
        ),
        ("Does the ARP table hold incomplete entries?", "Which address failed to resolve in the ARP table?"),
        _arp_incomplete,
    ),
    QuestionKind(
        "arp-age",
        (
            "How old is the ARP entry of {0}?",
            "What is the age of the ARP entry for {0}?",
            "ARP age of {0}?",
            "Age of {0} in ARP?",
            "Since how many minutes is {0} in ARP?",
            "How many minutes ago was the ARP entry of {0} refreshed?",
            "Tell me the age of {0} in the ARP table.",
        ),
        ("For how many minutes has {0} been in the ARP table?", "How many minutes old is {0} in ARP?"),
        _arp_age,
    ),
    QuestionKind(
        "arp-shared",
        (
            "Which addresses use the MAC {0} twice over?",
            "{0} has two IP addresses: which?",
            "Name both IP addresses of {0}.",
            "Two addresses resolve to {0}. Which are they?",
            "List the IP addresses that have the hardware address {0}.",
            "Which pair of IPs is behind {0}?",
        ),
        ("What are the two addresses of the machine {0}?", "Give both IPs that sit on {0}."),
        _arp_shared,
    ),
    QuestionKind(
        "mac-port",
        (
            "On which port was {0} learned?",
            "Which port is MAC {0} on?",
            "Where is the MAC {0}?",
            "Find the switch port and VLAN of {0}.",
            "Port and VLAN of {0}?",
            "Which VLAN and port does {0} belong to?",
            "Look up {0} in the MAC table.",
            "Where was {0} learned, and in which VLAN?",
            "Which interface leads to the MAC {0}?",
            "Show me where {0} is plugged in.",
        ),
        ("Behind which port sits the MAC {0}?", "Locate {0}: port and VLAN?"),
        _mac_port,
        1.6,
        "switch",
    ),
    QuestionKind(
        "host-port",
        (
            "On which port is the host {0} connected?",
            "Trace the host {0} to its switch port.",
            "Which switch port leads to the host {0}?",
            "Find the port of the host {0}.",
            "To which port does the host {0} connect?",
            "Where is the host {0} plugged in?",
            "Which port serves the machine {0}?",
            "Find the cable of host {0}: which port?",
            "Port of the host with the address {0}?",
        ),
        ("Track down the switch port of host {0}.", "To which port is the host {0} attached?"),
        _host_port,
        2.0,
        "switch",
    ),
    QuestionKind(
        "own-mac",
        (
            "What are the address and the MAC of {0}?",
            "Give me the IP of {0} and the MAC that goes with it.",
            "Which MAC answers for the address of {0}?",
            "Find the IP address set on {0}, then its MAC.",
            "{0}: IP and hardware address?",
            "Look up the address of {0} and its entry in ARP.",
        ),
        ("Which IP and which MAC does {0} use?", "Tell me the address on {0} and the MAC it resolves to."),
        _gateway_mac,
        1.3,
    ),
    QuestionKind(
        "vlan-name",
        (
            "What is the name of VLAN {0}?",
            "How is VLAN {0} called?",
            "VLAN {0}: what is its name?",
            "Name of VLAN {0}?",
            "What do we call VLAN {0}?",
            "Give the name of VLAN {0}.",
            "Look up the name of VLAN {0}.",
        ),
        ("Tell me the name of vlan {0}.", "Which name was given to VLAN {0}?"),
        _vlan_name,
        1.0,
        "switch",
    ),
    QuestionKind(
        "vlan-number",
        (
            "Which VLAN is named {0}?",
            "What is the VLAN id of {0}?",
            "Which number has the VLAN {0}?",
            "VLAN number of {0}?",
            "Give me the number of the VLAN {0}.",
            "What number is the VLAN named {0}?",
            "Look up the VLAN {0}: which id?",
        ),
        ("Find the id of the VLAN called {0}.", "Under which VLAN number is {0} known?"),
        _vlan_number,
        1.0,
        "switch",
    ),
    QuestionKind(
        "vlan-ports",
        (
            "Which ports are in VLAN {0}?",
            "List the ports of VLAN {0}.",
            "Ports assigned to vlan {0}?",
            "Which ports does VLAN {0} have?",
            "Name the access ports of VLAN {0}.",
            "Which interfaces are members of VLAN {0}?",
            "Give me all ports in VLAN {0}.",
        ),
        ("Which access ports belong to VLAN {0}?", "What ports does VLAN {0} contain?"),
        _vlan_ports,
        1.0,
        "switch",
    ),
)
