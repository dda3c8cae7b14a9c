"""Show commands about routes, OSPF and BGP."""

from __future__ import annotations

from workbench.session.router.state import Device, Route

_LEGEND = """Codes: L - local, C - connected, S - static, R - RIP, M - mobile, B - BGP
       D - EIGRP, EX - EIGRP external, O - OSPF, IA - OSPF inter area
       N1 - OSPF NSSA external type 1, N2 - OSPF NSSA external type 2
       E1 - OSPF external type 1, E2 - OSPF external type 2
       i - IS-IS, su - IS-IS summary, L1 - IS-IS level-1, L2 - IS-IS level-2
       ia - IS-IS inter area, * - candidate default, U - per-user static route
       o - ODR, P - periodic downloaded static route
"""
_PROTOCOLS = {"O": "ospf 1", "O E2": "ospf 1", "D": "eigrp 100", "B": "bgp {asn}", "S": "static"}


def ip_route(device: Device) -> str:
    """`show ip route`."""
    lines = [*_LEGEND.splitlines(), ""] if device.verbose else list[str]()
    lines += [f"Gateway of last resort is {device.gateway} to network 0.0.0.0", ""]
    lines += [_row(route) for route in device.routes]
    return "\n".join(lines)


def ip_route_to(device: Device, address: str) -> str:
    """`show ip route A.B.C.D`."""
    route = device.route_to(address)
    if route is None:
        return "% Network not in table"
    lines = [f"Routing entry for {route.network}"]
    if route.code in ("C", "L"):
        lines.append('  Known via "connected", distance 0, metric 0 (connected, via interface)')
        return "\n".join([*lines, "  Routing Descriptor Blocks:", f"  * directly connected, via {route.interface}"])
    known = _PROTOCOLS[route.code].format(asn=device.asn)
    lines.append(f'  Known via "{known}", distance {route.distance}, metric {route.metric}')
    lines.append("  Routing Descriptor Blocks:")
    source = f", from {route.via}, {route.age} ago" if route.age else ""
    via = f", via {route.interface}" if route.interface else ""
    lines.append(f"  * {route.via}{source}{via}")
    lines.append(f"      Route metric is {route.metric}, traffic share count is 1")
    return "\n".join(lines)


def ospf_neighbor(device: Device) -> str:
    """`show ip ospf neighbor`."""
    lines = ["Neighbor ID     Pri   State           Dead Time   Address         Interface"]
    lines += [
        f"{one.router:<15} {one.priority:>3}   {one.state:<15} {one.dead}    {one.address:<15} {one.interface}"
        for one in device.adjacencies
    ]
    return "\n".join(lines)


def bgp_summary(device: Device) -> str:
    """`show ip bgp summary`."""
    lines = [f"BGP router identifier {device.router_id}, local AS number {device.asn}"]
    version = 1000 + sum(int(peer.state) for peer in device.peers if peer.state.isdigit())
    if device.verbose:
        lines += [
            f"BGP table version is {version}, main routing table version {version}",
            f"{version - 17} network entries using {(version - 17) * 248} bytes of memory",
            f"{version + 41} path entries using {(version + 41) * 112} bytes of memory",
            "BGP activity 19247/18656 prefixes, 36876/36416 paths, scan interval 60 secs",
        ]
    lines += ["", "Neighbor        V           AS MsgRcvd MsgSent   TblVer  InQ OutQ Up/Down  State/PfxRcd"]
    for peer in device.peers:
        lines.append(
            f"{peer.address:<15} 4 {peer.asn:>12} {peer.received:>7} {peer.sent:>7} {version:>8}    0    0 "
            f"{peer.since:<8} {peer.state}"
        )
    return "\n".join(lines)


def _row(route: Route) -> str:
    code = f"{route.code:<9}"
    if route.code in ("C", "L"):
        return f"{code}{route.network} is directly connected, {route.interface}"
    tail = "".join(f", {part}" for part in (route.age, route.interface) if part)
    return f"{code}{route.network} [{route.distance}/{route.metric}] via {route.via}{tail}"
