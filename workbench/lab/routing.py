"""Questions about routes, OSPF, BGP and HSRP."""

from __future__ import annotations

from random import Random

from workbench.lab.question import Draw, QuestionKind
from workbench.session.router.state import Device

_OSPF = ("show ip ospf neighbor",)
_BGP = ("show ip bgp summary",)


def _gateway(device: Device, random: Random) -> Draw | None:
    del random
    return Draw((), ("show ip route",), f"The gateway of last resort is {device.gateway}.", (device.gateway,))


def _next_hop(device: Device, random: Random) -> Draw | None:
    rows = [route for route in device.routes[1:] if route.via]
    if not rows:
        return None
    route = random.choice(rows)
    address = route.network.partition("/")[0]
    return Draw((address,), (f"show ip route {address}",), f"{route.network} goes via {route.via}.", (route.via,))


def _connected(device: Device, random: Random) -> Draw | None:
    rows = [route for route in device.routes if route.code == "C"]
    route = random.choice(rows)
    answer = f"{route.network} is connected to {route.interface}."
    return Draw((route.network,), ("show ip route",), answer, (route.interface,))


def _learned_by(device: Device, random: Random) -> Draw | None:
    rows = [route for route in device.routes[1:] if route.via]
    if not rows:
        return None
    route = random.choice(rows)
    answer = f"{route.network} is [{route.distance}/{route.metric}] via {route.via}."
    must = (f"[{route.distance}/{route.metric}]", route.via)
    return Draw((route.network,), ("show ip route",), answer, must)


def _ospf_role(device: Device, random: Random) -> Draw | None:
    rows = [row for row in device.adjacencies if row.state in ("FULL/DR", "FULL/BDR")]
    if not rows:
        return None
    row = random.choice(rows)
    role = row.state.partition("/")[2]
    answer = f"The {role} on {row.interface} is {row.router}, address {row.address}."
    return Draw((role, row.interface), _OSPF, answer, (row.router, row.address))


def _ospf_state(device: Device, random: Random) -> Draw | None:
    routers = [row.router for row in device.adjacencies]
    rows = [row for row in device.adjacencies if routers.count(row.router) == 1]
    if not rows:
        return None
    row = random.choice(rows)
    return Draw((row.router,), _OSPF, f"{row.router} is {row.state} on {row.interface}.", (row.state, row.interface))


def _bgp_as(device: Device, random: Random) -> Draw | None:
    row = random.choice(device.peers)
    return Draw((row.address,), _BGP, f"{row.address} is in AS {row.asn}.", (str(row.asn),))


def _bgp_down(device: Device, random: Random) -> Draw | None:
    del random
    row = next(row for row in device.peers if not row.state.isdigit())
    return Draw((), _BGP, f"{row.address} in AS {row.asn} is {row.state}.", (row.address, str(row.asn), row.state))


def _bgp_prefixes(device: Device, random: Random) -> Draw | None:
    row = random.choice([row for row in device.peers if row.state.isdigit()])
    answer = f"{row.address} sent {row.state} prefixes and has been up {row.since}."
    return Draw((row.address,), _BGP, answer, (row.state, row.since))


def _standby(device: Device, random: Random) -> Draw | None:
    row = random.choice(device.standby)
    one = device.interface(row.interface)
    name = one.short if one else row.interface
    answer = f"{name} is {row.state}, virtual IP {row.virtual}."
    return Draw((name,), ("show standby brief",), answer, (row.state, row.virtual))


KINDS: tuple[QuestionKind, ...] = (
    QuestionKind(
        "gateway",
        (
            "Which default gateway is used?",
            "Name the gateway of last resort.",
            "Where does the default route point?",
            "Default gateway?",
            "Which router is the gateway of last resort?",
            "Give me the default gateway.",
            "Gateway of last resort?",
        ),
        ("Which next hop does the default route use?", "To where is unknown traffic sent by default?"),
        _gateway,
    ),
    QuestionKind(
        "next-hop",
        (
            "What is the next hop to {0}?",
            "Which next hop leads to {0}?",
            "How do we reach {0}?",
            "Next hop for {0}?",
            "By which router does traffic to {0} go?",
            "Which gateway is used for {0}?",
            "Look up the route to {0}: next hop?",
            "Via which next hop is {0} routed?",
        ),
        ("Through which router is {0} reached?", "Where do packets to {0} go next?"),
        _next_hop,
        2.0,
    ),
    QuestionKind(
        "connected",
        (
            "Which interface is {0} connected to?",
            "On which interface is the connected network {0}?",
            "{0} is directly connected: where?",
            "Interface of the connected network {0}?",
            "Look in the routing table: to which interface is {0} connected?",
            "Which interface has the network {0}?",
        ),
        ("Where is {0} attached directly?", "Tell me the interface for the connected network {0}."),
        _connected,
    ),
    QuestionKind(
        "route-metric",
        (
            "Distance, metric and next hop of the route {0}?",
            "What does the routing table say about {0}?",
            "Find {0} in the routing table: metric and next hop.",
            "Which distance and metric has {0}, and via what?",
            "Give me the entry for {0} in the routing table.",
            "Routing table entry of {0}?",
        ),
        ("How good is the route {0}, and where does it lead?", "Read the line of {0} in the routing table."),
        _learned_by,
    ),
    QuestionKind(
        "ospf-role",
        (
            "Who is the OSPF {0} on {1}?",
            "Which OSPF neighbour is {0} on {1}?",
            "Give me the router ID and address of the {0} on {1}.",
            "OSPF: {0} on {1}?",
            "Which router is the {0} on {1}, and what is its address?",
            "Find the {0} on {1}.",
            "On {1}, which OSPF neighbour has the role {0}?",
        ),
        ("Name the OSPF neighbor that acts as {0} on {1}.", "Which neighbor holds the {0} role in OSPF on {1}?"),
        _ospf_role,
        1.4,
    ),
    QuestionKind(
        "ospf-state",
        (
            "What is the OSPF state of {0}?",
            "In which OSPF state is neighbour {0}?",
            "OSPF state of {0}?",
            "Is the OSPF neighbour {0} full?",
            "State and interface of the OSPF neighbour {0}?",
            "Give me the OSPF state of neighbour {0} and its interface.",
            "Look up the OSPF neighbour {0}.",
        ),
        ("How far did the OSPF adjacency with {0} get?", "Check the OSPF adjacency to {0}: state?"),
        _ospf_state,
        1.2,
    ),
    QuestionKind(
        "bgp-as",
        (
            "Which AS is the BGP neighbour {0} in?",
            "What is the AS number of {0}?",
            "Remote AS of BGP peer {0}?",
            "AS number of the BGP peer {0}?",
            "Which autonomous system has the neighbour {0}?",
            "BGP: in which AS is {0}?",
            "Give me the AS of {0}.",
        ),
        ("Tell me the AS of the peer {0}.", "To which AS does peer {0} belong?"),
        _bgp_as,
        1.2,
    ),
    QuestionKind(
        "bgp-down",
        (
            "Which BGP neighbour is not established?",
            "Are all BGP sessions up?",
            "Which BGP peer is down?",
            "Find the BGP session that is not up.",
            "Which BGP neighbour is idle or active?",
            "Is a BGP neighbour down, and in which AS?",
            "Name the BGP neighbour without prefixes because it is down.",
            "BGP: which neighbour has no session?",
            "Which BGP peer was shut down or fails?",
        ),
        ("Is any BGP peer in trouble?", "Which BGP session failed to come up?"),
        _bgp_down,
        1.3,
    ),
    QuestionKind(
        "bgp-prefixes",
        (
            "How many prefixes come from the BGP neighbour {0}?",
            "Prefixes received from {0}, and since when is it up?",
            "How many routes does {0} send in BGP?",
            "BGP: prefixes and uptime of {0}?",
            "Give me the number of prefixes from {0}.",
            "Since when is the BGP session with {0} up, and with how many prefixes?",
        ),
        ("Count the prefixes that {0} announces to us.", "How much does the BGP peer {0} send?"),
        _bgp_prefixes,
    ),
    QuestionKind(
        "standby",
        (
            "What is the HSRP virtual IP on {0}?",
            "Which HSRP state and virtual address has {0}?",
            "HSRP state of {0}?",
            "HSRP on {0}: state and virtual IP?",
            "Give me the virtual IP of {0}.",
            "Is {0} the active HSRP router? Which virtual IP?",
            "Standby group on {0}: state and virtual address?",
        ),
        ("Is {0} active or standby in HSRP?", "For {0}, what are the HSRP role and virtual IP?"),
        _standby,
        1.2,
    ),
)
