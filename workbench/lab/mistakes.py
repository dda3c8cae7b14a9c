"""Commands that a newcomer would try and IOS refuses: put before the right one, they teach recovery."""

from __future__ import annotations

from random import Random

TRIED: dict[str, tuple[str, ...]] = {
    "show arp": ("show arp table", "show arps", "display arp", "show mac arp", "arp -a"),
    "show ip arp": ("show ip arp table", "show arptable", "arp -a", "show ip neighbors"),
    "show ip interface brief": ("show interface brief", "show ip brief", "show ip int all", "show interfaces ip"),
    "show vlan": ("show vlan table", "show vlans list", "list vlans", "show vlan names"),
    "show mac": ("show mac table", "show mac-table", "show address-table", "show macs"),
    "show cdp": ("show neighbors", "show cdp table", "show cdp", "show cdp peers"),
    "show lldp": ("show lldp", "show lldp table", "show neighbors lldp"),
    "show version": ("show uptime", "version", "show software", "show ios version"),
    "show inventory": ("show chassis", "show hardware model", "show model"),
    "show logging": ("show log buffer", "show syslog", "show messages", "show events"),
    "show ip ospf": ("show ospf", "show ospf peers", "show ip ospf peers"),
    "show ip bgp": ("show bgp peers", "show bgp neighbor summary", "show ip bgp peers"),
    "show ip route": ("show route", "show routes", "route print", "show routing-table"),
    "show interfaces status": ("show port status", "show ports", "show interfaces state"),
    "show interfaces": ("show port", "ifconfig", "show if"),
    "show running-config": ("show config interface", "show configuration", "running-config"),
    "show standby": ("show hsrp", "show hsrp brief", "show redundancy hsrp"),
    "show processes": ("show cpu", "top", "show load"),
    "show clock": ("show time", "date", "show date"),
}


def mistaken(command: str, random: Random) -> str:
    """A wrong command tried in place of `command`."""
    key = max((start for start in TRIED if command.startswith(start)), key=len)
    return random.choice(TRIED[key])
