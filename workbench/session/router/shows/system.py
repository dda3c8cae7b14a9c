"""Show commands about the device itself and its neighbours."""

from __future__ import annotations

from workbench.session.router.state import Device, Interface, split_name

_SMALL_PRINT = """This product contains cryptographic features and is subject to United
States and local country laws governing import, export, transfer and
use. Delivery of Cisco cryptographic products does not imply
third-party authority to import, export, distribute or use encryption.
"""
_LEGEND = """Capability Codes: R - Router, T - Trans Bridge, B - Source Route Bridge
                  S - Switch, H - Host, I - IGMP, r - Repeater, P - Phone,
                  D - Remote, C - CVTA, M - Two-port Mac Relay
"""
_LLDP_LEGEND = """Capability codes:
    (R) Router, (B) Bridge, (T) Telephone, (C) DOCSIS Cable Device
    (W) WLAN Access Point, (P) Repeater, (S) Station, (O) Other
"""
_NAME_COLUMN = 16


def version(device: Device) -> str:
    """`show version`."""
    soft = device.software
    lines = [
        f"Cisco IOS Software, {soft.family} Software ({soft.family}-UNIVERSALK9-M), Version {soft.version}, "
        "RELEASE SOFTWARE (fc2)",
    ]
    if device.verbose:
        lines += ["Technical Support: http://www.cisco.com/techsupport", "", "ROM: Bootstrap program is IOS"]
    lines += [
        "",
        f"{device.name} uptime is {soft.uptime}",
        f"System returned to ROM by {soft.reload}",
        f'System image file is "{soft.image}"',
        "",
    ]
    if device.verbose:
        lines += [*_SMALL_PRINT.splitlines(), ""]
    lines += [
        f"cisco {soft.platform} processor with 262144K bytes of memory.",
        f"Processor board ID {soft.serial}",
        f"{len(device.ports)} Ethernet interfaces",
        "Configuration register is 0x2102",
    ]
    return "\n".join(lines)


def inventory(device: Device) -> str:
    """`show inventory`."""
    soft = device.software
    chassis = f"{soft.platform} chassis"
    return f'NAME: "{chassis}", DESCR: "{chassis}"\nPID: {soft.platform:<18}, VID: V02, SN: {soft.serial}'


def clock(device: Device) -> str:
    """`show clock`."""
    return device.clock


def cpu(device: Device) -> str:
    """`show processes cpu`."""
    now, minute, five = device.cpu
    lines = [
        f"CPU utilization for five seconds: {now}%/0%; one minute: {minute}%; five minutes: {five}%",
        " PID Runtime(ms)     Invoked      uSecs   5Sec   1Min   5Min TTY Process",
        "   1           4         312         12  0.00%  0.00%  0.00%   0 Chunk Manager",
        f"   2       {1200 + now:>5}        {900 + minute:>5}        133  0.07%  0.05%  0.04%   0 Load Meter",
        f"   9      {52000 + five:>6}       {41000 + minute:>6}       1268  0.15%  0.11%  0.10%   0 ARP Input",
    ]
    return "\n".join(lines)


def logging(device: Device) -> str:
    """`show logging`."""
    lines = ["Syslog logging: enabled (0 messages dropped, 4 messages rate-limited, 0 flushes, 0 overruns)"]
    if device.verbose:
        lines += [
            "",
            "No Active Message Discriminator.",
            "",
            "    Console logging: level debugging, 22827 messages logged, xml disabled,",
            "                     filtering disabled",
            "    Buffer logging:  level debugging, 22860 messages logged, xml disabled,",
            "                    filtering disabled",
            "",
            "    Trap logging: level informational, 142 message lines logged",
        ]
    lines += ["", "Log Buffer (16384 bytes):"]
    for number, entry in enumerate(device.log, 22700):
        head = {0: f"{entry.stamp}:", 1: f"*{entry.stamp}:", 2: f"{number:06d}: {entry.stamp}:"}
        lines.append(f"{head.get(device.dialect, f'{entry.stamp}:')} {entry.text}")
    return "\n".join(lines)


def cdp_neighbors(device: Device) -> str:
    """`show cdp neighbors`; a name too long for its column takes a line of its own."""
    lines = [*_LEGEND.splitlines(), ""] if device.verbose else list[str]()
    lines.append("Device ID        Local Intrfce     Holdtme    Capability  Platform  Port ID")
    for one in device.neighbours:
        local = device.interface(one.local)
        port = local.cdp if local else one.local
        row = f"{port:<17} {one.hold:<10} {one.capability:>11} {one.platform:<9} {cdp_word(one.remote)}"
        if len(one.name) > _NAME_COLUMN:
            lines += [one.name, f"{'':<17}{row}"]
        else:
            lines.append(f"{one.name:<16} {row}")
    lines += ["", f"Total cdp entries displayed : {len(device.neighbours)}"]
    return "\n".join(lines)


def cdp_detail(device: Device) -> str:
    """`show cdp neighbors detail`."""
    blocks = [
        "\n".join(
            [
                "-------------------------",
                f"Device ID: {one.name}",
                "Entry address(es):",
                f"  IP address: {one.address}",
                f"Platform: cisco {one.platform},  Capabilities: {one.capability}",
                f"Interface: {one.local},  Port ID (outgoing port): {one.remote}",
                f"Holdtime : {one.hold} sec",
            ]
        )
        for one in device.neighbours
    ]
    return "\n\n".join([*blocks, f"Total cdp entries displayed : {len(device.neighbours)}"])


def lldp_neighbors(device: Device) -> str:
    """`show lldp neighbors`."""
    lines = [*_LLDP_LEGEND.splitlines(), ""] if device.verbose else list[str]()
    lines.append("Device ID           Local Intf     Hold-time  Capability      Port ID")
    for one in device.neighbours:
        local = device.interface(one.local)
        letters = {"H P M": "B,T"}.get(one.capability, "B,R" if "R" in one.capability else "B")
        remote = Interface(one.remote, "routed", "", "", "").short
        lines.append(f"{one.name[:20]:<20}{local.short if local else one.local:<15}120        {letters:<16}{remote}")
    lines += ["", f"Total entries displayed: {len(device.neighbours)}"]
    return "\n".join(lines)


def running_config(device: Device) -> str:
    """`show running-config`."""
    lines = ["Building configuration...", "", "!", f"hostname {device.name}", "!"]
    for vlan in device.vlans[1:]:
        lines += [f"vlan {vlan.number}", f" name {vlan.name}", "!"]
    for one in device.interfaces:
        if one.status != "deleted":
            lines += [*_interface_lines(one), "!"]
    if device.adjacencies:
        networks = sorted({str(one.network) for one in device.interfaces if one.ip and one.prefix < 32})
        lines += ["router ospf 1", f" router-id {device.router_id}"]
        lines += [f" network {network.partition('/')[0]} 0.0.0.255 area 0" for network in networks] + ["!"]
    lines += [f"router bgp {device.asn}", *(f" neighbor {peer.address} remote-as {peer.asn}" for peer in device.peers)]
    lines += [f" neighbor {peer.address} shutdown" for peer in device.peers if peer.state == "Idle (Admin)"] + ["!"]
    for route in device.routes:
        if route.code in ("S", "S*"):
            lines.append(f"ip route {route.net.network_address} {route.net.netmask} {route.via}")
    return "\n".join([*lines, "!", "end"])


def running_interface(device: Device, one: Interface) -> str:
    """`show running-config interface NAME`."""
    lines = _interface_lines(one)
    size = sum(len(line) + 1 for line in lines)
    return "\n".join(["Building configuration...", "", f"Current configuration : {size} bytes", "!", *lines, "end"])


def cdp_word(name: str) -> str:
    """A port's name as CDP prints it; `Port 1` stays."""
    return Interface(name, "routed", "", "", "").cdp if split_name(name)[1] else name


def _interface_lines(one: Interface) -> list[str]:
    lines = [f"interface {one.name}"]
    if one.description:
        lines.append(f" description {one.description}")
    if "." in one.name:
        lines.append(f" encapsulation dot1Q {one.name.rpartition('.')[2]}")
    if one.mode == "access":
        lines += [f" switchport access vlan {one.vlan}", " switchport mode access"]
    elif one.mode == "trunk":
        lines.append(" switchport mode trunk")
    elif one.ip:
        lines.append(f" ip address {one.ip} {'255.255.255.255' if one.prefix == 32 else one.network.netmask}")
    else:
        lines.append(" no ip address")
    if one.mtu != 1500 and one.physical:
        lines.append(f" mtu {one.mtu}")
    if one.status.startswith("admin"):
        lines.append(" shutdown")
    return lines
