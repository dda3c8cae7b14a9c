"""Questions about interfaces."""

from __future__ import annotations

from random import Random

from workbench.lab.question import Draw, QuestionKind, listed
from workbench.session.router.state import Device

_BRIEF = ("show ip interface brief",)


def _interface_ip(device: Device, random: Random) -> Draw | None:
    one = random.choice([one for one in device.interfaces if one.ip])
    return Draw((one.name,), _BRIEF, f"{one.name} has {one.ip}.", (one.ip,))


def _ip_interface(device: Device, random: Random) -> Draw | None:
    one = random.choice([one for one in device.interfaces if one.ip])
    return Draw((one.ip,), _BRIEF, f"{one.ip} is on {one.name}.", (one.name,))


def _admin_down(device: Device, random: Random) -> Draw | None:
    del random
    found = [one.name for one in device.interfaces if one.status.startswith("admin")]
    if len(found) > 3:
        return None
    answer = f"Administratively down: {listed(found)}." if found else "No interface is administratively down."
    return Draw((), _BRIEF, answer, tuple(found) or ("No interface",))


def _deleted(device: Device, random: Random) -> Draw | None:
    del random
    found = [one.name for one in device.interfaces if one.status == "deleted"]
    if not any("." in one.name for one in device.interfaces):
        return None
    return Draw((), _BRIEF, f"Deleted: {listed(found)}." if found else "None is deleted.", tuple(found) or ("None",))


def _state(device: Device, random: Random) -> Draw | None:
    one = random.choice(device.interfaces)
    answer = f"{one.name} is {one.status}, protocol {one.protocol}."
    return Draw((one.name,), _BRIEF, answer, (f"is {one.status}", f"protocol {one.protocol}"))


def _err_disabled(device: Device, random: Random) -> Draw | None:
    del random
    found = [port.short for port in device.ports if port.link == "err-disabled"]
    answer = f"Err-disabled: {listed(found)}." if found else "No port is err-disabled."
    return Draw((), ("show interfaces status",), answer, tuple(found) or ("No port",))


def _port_status(device: Device, random: Random) -> Draw | None:
    port = random.choice(device.ports)
    vlan = "trunk" if port.mode == "trunk" else str(port.vlan)
    return Draw(
        (port.short,), ("show interfaces status",), f"{port.short} is {port.link}, VLAN {vlan}.", (port.link, vlan)
    )


def _errors(device: Device, random: Random) -> Draw | None:
    port = random.choice(device.ports)
    answer = f"{port.name} has {port.input_errors} input errors and {port.crc} CRC."
    must = (f" {port.input_errors} input", f" {port.crc} CRC")
    return Draw((port.name,), (f"show interfaces {port.name}",), answer, must)


def _mtu(device: Device, random: Random) -> Draw | None:
    port = random.choice(device.ports)
    return Draw((port.name,), (f"show interfaces {port.name}",), f"{port.name} has MTU {port.mtu}.", (str(port.mtu),))


def _description(device: Device, random: Random) -> Draw | None:
    ports = [port for port in device.ports if port.description]
    if not ports:
        return None
    port = random.choice(ports)
    answer = f'{port.name} is described as "{port.description}".'
    return Draw((port.name,), (f"show running-config interface {port.name}",), answer, (port.description,))


def _ip_description(device: Device, random: Random) -> Draw | None:
    ports = [one for one in device.interfaces if one.ip and one.mac and one.status != "deleted"]
    if not ports:
        return None
    port = random.choice(ports)
    commands = (*_BRIEF, f"show interfaces {port.name}")
    answer = f"{port.ip} is on {port.name}, MTU {port.mtu}."
    return Draw((port.ip,), commands, answer, (port.name, str(port.mtu)))


KINDS: tuple[QuestionKind, ...] = (
    QuestionKind(
        "interface-ip",
        (
            "What is the IP address of {0}?",
            "Which address is set on {0}?",
            "Give me the IP of {0}.",
            "{0}: which IP does it have?",
            "IP address on {0}?",
            "Which IP does {0} use?",
            "Look up the address of {0}.",
            "Tell me the IP address that {0} has.",
        ),
        ("Read me the IP address on {0}.", "What address does {0} carry?"),
        _interface_ip,
        1.3,
    ),
    QuestionKind(
        "ip-interface",
        (
            "Which interface has the address {0}?",
            "Which interface owns {0}?",
            "On which interface is {0} configured?",
            "Interface with the IP {0}?",
            "Which of the interfaces uses {0}?",
            "To which interface was {0} given?",
            "Look up the interface that has {0}.",
        ),
        ("Where is the address {0} set?", "Find the interface that carries {0}."),
        _ip_interface,
        1.3,
    ),
    QuestionKind(
        "admin-down",
        (
            "Which interfaces are admin down?",
            "Which ports have been shut down by an admin?",
            "List the interfaces that are shut.",
            "Are any interfaces administratively down?",
            "Is an interface shut down on purpose?",
            "Interfaces in shutdown?",
            "List interfaces with the status administratively down.",
            "Which interfaces have been disabled by an administrator?",
        ),
        ("Name all admin-down interfaces.", "Which interfaces did someone shut down?"),
        _admin_down,
        1.2,
    ),
    QuestionKind(
        "deleted",
        (
            "Was a subinterface deleted?",
            "Which subinterfaces are deleted?",
            "List deleted subinterfaces.",
            "Is there a deleted interface?",
            "Find interfaces with the status deleted.",
            "Deleted interfaces?",
            "Name the interface that was deleted.",
        ),
        ("Did someone delete a subinterface? Which?", "What interfaces are shown as deleted?"),
        _deleted,
        1.0,
        "router",
    ),
    QuestionKind(
        "interface-state",
        (
            "What is the state of {0}?",
            "Is {0} up?",
            "Status and protocol of {0}?",
            "Is the interface {0} up or down?",
            "State of interface {0}?",
            "Give me the status and protocol state of {0}.",
            "Check whether {0} is up.",
        ),
        ("Does {0} work: status and protocol?", "Tell me if {0} is up."),
        _state,
    ),
    QuestionKind(
        "err-disabled",
        (
            "Which ports are err-disabled?",
            "Is any port err-disabled?",
            "List the err-disabled ports.",
            "Are there err-disabled ports?",
            "Which ports did the switch err-disable?",
            "Find ports with the status err-disabled.",
            "Err-disabled ports?",
        ),
        ("Any ports in err-disable state?", "Show me the ports that were error-disabled."),
        _err_disabled,
        0.8,
        "switch",
    ),
    QuestionKind(
        "port-status",
        (
            "What is the status of port {0}?",
            "Which VLAN and status has port {0}?",
            "Is port {0} connected?",
            "Status and VLAN of port {0}?",
            "Is something connected to port {0}?",
            "Port {0}: status and VLAN?",
            "Look up port {0}: is it connected, and in which VLAN?",
        ),
        ("Check the link status of port {0}.", "How does port {0} look: status, VLAN?"),
        _port_status,
        1.0,
        "switch",
    ),
    QuestionKind(
        "errors",
        (
            "How many input errors does {0} have?",
            "Input errors and CRC on {0}?",
            "Does {0} show input errors?",
            "Error counters of {0}?",
            "Are there CRC errors on {0}?",
            "Give me the input errors and CRC errors of {0}.",
            "Look at the error counters of {0}.",
            "Is {0} clean, or does it have errors?",
        ),
        ("Check {0} for CRC errors.", "Has {0} seen any errors on input?"),
        _errors,
        1.2,
    ),
    QuestionKind(
        "mtu",
        (
            "What MTU is set on {0}?",
            "MTU of {0}?",
            "Which MTU does {0} have?",
            "Give me the MTU of {0}.",
            "How large is the MTU of {0}?",
            "Look up the MTU on {0}.",
            "Does {0} take jumbo frames? What is its MTU?",
        ),
        ("Tell me the MTU of {0}.", "Read the MTU from {0}."),
        _mtu,
        1.2,
    ),
    QuestionKind(
        "description",
        (
            "How is {0} described in the configuration?",
            "What description is configured on {0}?",
            "Description of {0} in the running configuration?",
            "Give me the description set for {0}.",
            "Look into the configuration of {0}: which description?",
            "Which description does the config of {0} have?",
        ),
        ("What does the configuration say that {0} is for?", "Read the configured description of {0}."),
        _description,
        1.2,
    ),
    QuestionKind(
        "address-mtu",
        (
            "What MTU has the interface with the address {0}?",
            "MTU of the interface that has {0}?",
            "Find the interface of {0} and its MTU.",
            "Which interface has {0}, and what is its MTU?",
            "Look up the interface that owns {0}, then its MTU.",
            "{0}: on which interface is it, and with which MTU?",
            "Give me the MTU of the interface where {0} is set.",
        ),
        ("The interface holding {0}: what is its MTU?", "Tell me which MTU is used where {0} is configured."),
        _ip_description,
        1.8,
    ),
)
