"""Show commands of a switch, and ARP."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.session.router.state import Device, Interface, Learned

_WIDE, _CATALYST_4500 = 1, 3
_DEFAULTS = ((1002, "fddi-default"), (1003, "token-ring-default"), (1004, "fddinet-default"), (1005, "trnet-default"))


def arp(device: Device) -> str:
    """`show arp` and `show ip arp`."""
    wide = device.dialect == _WIDE and device.kind == "switch"
    if wide:
        lines = ["Protocol  Address              Age(min)       Hardware Addr     Type      Interface"]
    else:
        lines = ["Protocol  Address          Age (min)  Hardware Addr   Type   Interface"]
    for entry in device.arp:
        age, mac = "-" if entry.age is None else str(entry.age), entry.mac or "Incomplete"
        line = (
            f"Internet  {entry.ip:<20} {age:<14} {mac:<17} ARPA      {entry.interface}"
            if wide
            else f"Internet  {entry.ip:<16}{age:>9}   {mac:<15} ARPA   {entry.interface}"
        )
        lines.append(line.rstrip())
    return "\n".join(lines)


def vlan_brief(device: Device) -> str:
    """`show vlan brief`."""
    lines = [
        "VLAN Name                             Status    Ports",
        "---- -------------------------------- --------- -------------------------------",
    ]
    for vlan in device.vlans:
        lines += _vlan_rows(vlan.number, vlan.name, device.vlan_ports(vlan.number))
    if device.verbose:
        lines += [f"{number:<4} {name:<32} act/unsup" for number, name in _DEFAULTS]
    return "\n".join(lines)


def vlan(device: Device) -> str:
    """`show vlan`."""
    lines = [
        vlan_brief(device),
        "",
        "VLAN Type  SAID       MTU   Parent RingNo BridgeNo Stp  BrdgMode Trans1 Trans2",
        "---- ----- ---------- ----- ------ ------ -------- ---- -------- ------ ------",
    ]
    lines += [
        f"{one.number:<4} enet  {100000 + one.number:<10} 1500  -      -      -        -    -        0      0"
        for one in device.vlans
    ]
    return "\n".join(lines)


def mac_table(device: Device, rows: Sequence[Learned] | None = None) -> str:
    """`show mac address-table`, or those rows of it."""
    shown = device.learned if rows is None else rows
    if device.dialect == _CATALYST_4500:
        lines = [
            "Unicast Entries",
            " vlan     mac address     type        protocols               port",
            "---------+---------------+--------+---------------------+-------------------------",
        ]
        lines += [f"{row.vlan:>4}      {row.mac}   dynamic ip,ipx,assigned,other {row.port}" for row in shown]
        return "\n".join(lines)
    lines = [
        "          Mac Address Table",
        "-------------------------------------------",
        "",
        "Vlan    Mac Address       Type        Ports",
        "----    -----------       --------    -----",
    ]
    lines += [f"{row.vlan:>4}    {row.mac}    DYNAMIC     {port_word(device, row)}" for row in shown]
    lines.append(f"Total Mac Addresses for this criterion: {len(shown)}")
    return "\n".join(lines)


def port_word(device: Device, row: Learned) -> str:
    """The port of a row as this device's MAC table prints it."""
    port = device.interface(row.port)
    return row.port if device.dialect == _CATALYST_4500 or port is None else port.short


def standby_brief(device: Device) -> str:
    """`show standby brief`."""
    lines = [
        "                     P indicates configured to preempt.",
        "                     |",
        "Interface   Grp  Pri P State   Active          Standby         Virtual IP",
    ]
    for group in device.standby:
        one = device.interface(group.interface)
        name = one.short if one else group.interface
        active, other = ("local", group.other) if group.state == "Active" else (group.other, "local")
        row = f"{name:<11} {group.group:<4} {group.priority:<3} P {group.state:<7} {active:<15} {other:<15}"
        lines.append(f"{row} {group.virtual}")
    return "\n".join(lines)


def _vlan_rows(number: int, name: str, ports: Sequence[Interface]) -> list[str]:
    words = [port.short for port in ports]
    first = f"{number:<4} {name:<32} active    {', '.join(words[:4])}".rstrip()
    return [first, *(" " * 48 + ", ".join(words[at : at + 4]) for at in range(4, len(words), 4))]
