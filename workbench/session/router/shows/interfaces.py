"""Show commands about interfaces."""

from __future__ import annotations

from workbench.session.router.state import Device, Interface

_MEDIA = {10: "10BaseT", 100: "10/100BaseTX", 1000: "10/100/1000BaseTX", 10000: "SFP-10GBase-SR"}


def ip_interface_brief(device: Device) -> str:
    """`show ip interface brief`."""
    lines = ["Interface                  IP-Address      OK? Method Status                Protocol"]
    for one in device.interfaces:
        address = one.ip or "unassigned"
        lines.append(f"{one.name:<26} {address:<15} YES NVRAM  {one.status:<21} {one.protocol}")
    return "\n".join(lines)


def interfaces_status(device: Device, only: str = "") -> str:
    """`show interfaces status [err-disabled]`."""
    lines = ["Port      Name               Status       Vlan       Duplex  Speed Type"]
    for port in device.ports:
        if only and port.link != only:
            continue
        vlan = {"trunk": "trunk", "routed": "routed"}.get(port.mode, str(port.vlan))
        live = port.link == "connected"
        duplex, speed = ("a-full", f"a-{port.speed}") if live else ("auto", "auto")
        media = _MEDIA.get(port.speed, "unknown")
        lines.append(
            f"{port.short:<9} {port.description[:18]:<18} {port.link:<12} {vlan:<10} {duplex:>6} {speed:>6} {media}"
        )
    return "\n".join(lines)


def interfaces_err_disabled(device: Device) -> str:
    """`show interfaces status err-disabled`."""
    return interfaces_status(device, "err-disabled")


def interfaces_description(device: Device) -> str:
    """`show interfaces description`."""
    lines = ["Interface                      Status         Protocol Description"]
    for one in device.interfaces:
        status = "admin down" if one.status.startswith("admin") else one.status
        lines.append(f"{one.short:<30} {status:<14} {one.protocol:<8} {one.description}".rstrip())
    return "\n".join(lines)


def interface(device: Device, one: Interface) -> str:
    """`show interfaces NAME`."""
    lines = [
        f"{one.name} is {one.status}, line protocol is {one.protocol}",
        f"  Hardware is {_hardware(one)}, address is {one.mac} (bia {one.mac})",
    ]
    if one.description:
        lines.append(f"  Description: {one.description}")
    if one.ip:
        lines.append(f"  Internet address is {one.ip}/{one.prefix}")
    lines.append(f"  MTU {one.mtu} bytes, BW {one.speed * 1000} Kbit/sec, DLY 10 usec,")
    if device.verbose:
        lines += [
            "     reliability 255/255, txload 1/255, rxload 1/255",
            "  Encapsulation ARPA, loopback not set",
            "  Keepalive set (10 sec)",
            "  ARP type: ARPA, ARP Timeout 04:00:00",
            '  Last clearing of "show interface" counters never',
            "  Queueing strategy: fifo",
        ]
    lines += [
        f"     {one.input_errors} input errors, {one.crc} CRC, 0 frame, 0 overrun, 0 ignored",
        f"     0 output errors, 0 collisions, {one.resets} interface resets",
    ]
    return "\n".join(lines)


def every_interface(device: Device) -> str:
    """`show interfaces`."""
    return "\n".join(interface(device, one) for one in device.interfaces)


def _hardware(one: Interface) -> str:
    if one.name.startswith("Loopback"):
        return "Loopback"
    if one.name.startswith("Vlan"):
        return "EtherSVI"
    return {10: "AmdP2", 100: "Fast Ethernet", 10000: "Ten Gigabit Ethernet"}.get(one.speed, "Gigabit Ethernet")
