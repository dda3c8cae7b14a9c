from __future__ import annotations

import json
from pathlib import Path

import pytest

from workbench.errors import SessionError
from workbench.session.router.devices import generate
from workbench.session.router.simulator import Lab, recorded_devices
from workbench.session.router.state import Device

DEVICES = generate("simulator", "train", 12)
LAB = Lab(DEVICES)
SWITCH = next(one for one in DEVICES if one.kind == "switch" and not one.verbose)
ROUTER = next(one for one in DEVICES if one.kind == "router")


def shown(device: Device, command: str) -> str:
    answer = LAB.run(device.name, command)
    assert not answer.fault, answer
    return answer.text


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_tables_show_the_state(device: Device) -> None:
    arp = shown(device, "sh arp")
    assert all(entry.ip in arp and entry.mac in arp for entry in device.arp)
    assert shown(device, "sh ip arp") == arp
    brief = shown(device, "sh ip int br").splitlines()[1:]
    assert [line.split()[0] for line in brief] == [one.name for one in device.interfaces]
    routes = shown(device, "sh ip ro")
    assert all(route.network in routes and route.via in routes for route in device.routes)
    neighbours = shown(device, "sh cdp nei")
    assert all(one.name in neighbours and one.platform in neighbours for one in device.neighbours)
    version = shown(device, "sh ver")
    assert all(value in version for value in (device.software.version, device.software.serial, device.software.uptime))
    config = shown(device, "sh run")
    assert f"hostname {device.name}" in config
    assert all(f"interface {one.name}\n" in config for one in device.interfaces if one.status != "deleted")


def test_every_route_with_a_next_hop_is_found_by_its_address() -> None:
    for device in DEVICES:
        for route in device.routes[1:]:
            text = shown(device, f"sh ip route {route.network.partition('/')[0]}")
            assert route.network in text
            assert route.via in text
    assert shown(ROUTER, "show ip route 203.0.113.9") == "% Network not in table\n"


def test_the_mac_table_can_be_asked_for_one_row() -> None:
    row = SWITCH.learned[0]
    text = shown(SWITCH, f"sh mac add address {row.mac}")
    assert row.mac in text
    assert not any(other.mac in text for other in SWITCH.learned[1:])
    assert all(r.mac in shown(SWITCH, f"sh mac add vlan {row.vlan}") for r in SWITCH.learned if r.vlan == row.vlan)


def test_a_router_knows_no_switch_commands_and_says_where_it_stopped() -> None:
    answer = LAB.run(ROUTER.name, "show vlan brief")
    assert answer.fault == "invalid"
    assert answer.text.splitlines()[0] == " " * len(f"{ROUTER.name}#show ") + "^"


def test_an_interface_that_is_not_there_and_a_device_that_is_not_there() -> None:
    assert LAB.run(ROUTER.name, "show interfaces Te9/9/9").fault == "invalid"
    answer = LAB.run("nowhere", "show version")
    assert answer.fault == "unknown device"
    assert ROUTER.name in answer.text


def test_recorded_devices_answer_what_was_recorded_and_nothing_else() -> None:
    known = recorded_devices()
    lab = Lab.of({"recorded": list(known)})
    router = known["rtr-lab-1"]
    for command, output in router.outputs.items():
        assert lab.run("rtr-lab-1", command).text == output
    assert lab.run("rtr-lab-1", "sh ip int br").text == router.outputs["show ip interface brief"]
    assert lab.run("sw-lab-2", "sh arp").text == known["sw-lab-2"].outputs["show ip arp"]
    missing = lab.run("rtr-lab-1", "show lldp neighbors")
    assert missing.fault == "not recorded"
    assert lab.run("rtr-lab-1", "show i").fault == "ambiguous"


def test_recorded_devices_carry_their_licence() -> None:
    assert all(device.licence == "Apache-2.0" for device in recorded_devices().values())


def test_a_lab_is_built_again_from_its_description() -> None:
    again = Lab.of({"seed": "simulator", "split": "train", "count": 12})
    assert again.devices == LAB.devices


@pytest.mark.parametrize("about", [{"split": "x"}, {"count": -1}, {"count": "many"}, {"recorded": ["nobody"]}])
def test_a_description_that_cannot_be_used_is_refused(about: dict[str, object]) -> None:
    with pytest.raises(SessionError):
        Lab.of(about)


def test_a_users_own_recordings_answer_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path))
    (tmp_path / "data" / "router").mkdir(parents=True)
    own = {"device": "mine", "kind": "router", "commands": {"show boot": "BOOT path-list: none\n"}}
    (tmp_path / "data" / "router" / "mine.json").write_text(json.dumps({"devices": [own]}), encoding="utf-8")
    lab = Lab.of({"recorded": ["mine", "rtr-lab-1"]})
    assert lab.run("mine", "sh boot").text == "BOOT path-list: none\n"


def test_a_damaged_file_of_recordings_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"devices": [{"device": "x"}]}), encoding="utf-8")
    with pytest.raises(SessionError, match=r"a\.json"):
        recorded_devices(tmp_path)


def test_the_shared_recordings_hold_the_shipped_ones(shared: Path) -> None:
    path = shared / "data" / "router" / "devices.json"
    if not path.is_file():
        pytest.skip("needs the shared router data")
    known = recorded_devices()
    for row in json.loads(path.read_text(encoding="utf-8"))["devices"]:
        assert known[row["device"]].outputs == row["commands"]
