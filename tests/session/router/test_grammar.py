from __future__ import annotations

import pytest

from workbench.session.router.commands import GRAMMARS, PATTERNS
from workbench.session.router.grammar import CommandError, read_argument

PROMPT = "sw1#"


def read(line: str) -> str:
    return GRAMMARS["switch"].read(line, PROMPT).text


def refused(line: str) -> CommandError:
    with pytest.raises(CommandError) as caught:
        GRAMMARS["switch"].read(line, PROMPT)
    return caught.value


@pytest.mark.parametrize(
    ("typed", "full"),
    [
        ("sh ip int br", "show ip interface brief"),
        ("SH ARP", "show arp"),
        ("sho  ver", "show version"),
        ("sh mac add", "show mac address-table"),
        ("sh mac add address AABB.CCDD.0011", "show mac address-table address aabb.ccdd.0011"),
        ("sh int gi0/1", "show interfaces GigabitEthernet0/1"),
        ("sh int Gi 0/1", "show interfaces GigabitEthernet0/1"),
        ("sh int te1/1/4", "show interfaces TenGigabitEthernet1/1/4"),
        ("sh int vlan 10", "show interfaces Vlan10"),
        ("sh int status", "show interfaces status"),
        ("sh run int fa0/24", "show running-config interface FastEthernet0/24"),
        ("sh ip ro 10.1.2.0", "show ip route 10.1.2.0"),
        ("sh proc cpu | i CPU", "show processes cpu | include CPU"),
    ],
)
def test_unambiguous_abbreviations_are_read_in_full(typed: str, full: str) -> None:
    assert read(typed) == full
    assert read(full) == full


def test_every_full_command_reads_as_itself() -> None:
    values = {"<interface>": "GigabitEthernet0/1", "<address>": "10.0.0.0", "<mac>": "0000.0c07.ac04", "<number>": "12"}
    for pattern in PATTERNS:
        line = " ".join(values.get(word, word) for word in pattern.split())
        assert read(line) == line


@pytest.mark.parametrize("line", ["sh i", "sh v", "sh c", "sh ver | x y", "sh l", "s i"])
def test_words_that_could_be_several_are_refused(line: str) -> None:
    error = refused(line)
    if "|" in line:
        assert error.fault == "invalid"
    else:
        assert error.fault == "ambiguous"
        assert error.text == f'% Ambiguous command:  "{line}"'


def test_the_marker_stands_under_the_first_wrong_word_behind_the_prompt() -> None:
    marker, message = refused("show ip interfaces brief").text.splitlines()
    assert (PROMPT + "show ip interfaces brief")[marker.index("^") :].startswith("interfaces brief")
    assert message == "% Invalid input detected at '^' marker."


@pytest.mark.parametrize("line", ["show", "show ip", "show ip bgp", "show standby", "show ver |", "show ver | include"])
def test_commands_that_lack_a_word_are_incomplete(line: str) -> None:
    error = refused(line)
    assert error.fault == ("invalid" if line == "show ver |" else "incomplete")


def test_one_unknown_word_is_taken_for_a_host_name() -> None:
    assert refused("shwo").fault == "unknown"
    assert "% Unknown command or computer name" in refused("shwo").text


@pytest.mark.parametrize(
    ("kind", "token", "following", "wanted"),
    [
        ("interface", "e0/1", "", ("Ethernet0/1", 1)),
        ("interface", "x0/1", "", ("", 0)),
        ("interface", "Gi", "", ("", 0)),
        ("interface", "Gi", "0/1", ("GigabitEthernet0/1", 2)),
        ("interface", "Gi0/0.100", "", ("GigabitEthernet0/0.100", 1)),
        ("address", "10.0.0.256", "", ("", 0)),
        ("address", "10.0.0.255", "", ("10.0.0.255", 1)),
        ("mac", "0000.0c07.ac0g", "", ("", 0)),
        ("number", "4095", "", ("4095", 1)),
        ("number", "²", "", ("", 0)),
    ],
)
def test_arguments(kind: str, token: str, following: str, wanted: tuple[str, int]) -> None:
    assert read_argument(kind, token, following) == wanted


def test_filters_pass_the_lines_that_ios_would() -> None:
    text = "interface A\n mtu 9000\n!\ninterface B\n shutdown\n!"

    def through(tail: str) -> str:
        return GRAMMARS["switch"].read(f"show run | {tail}", PROMPT).filtered(text)

    assert through("include mtu|shut") == " mtu 9000\n shutdown"
    assert through("exclude ^interface") == " mtu 9000\n!\n shutdown\n!"
    assert through("begin B$") == "interface B\n shutdown\n!"
    assert through("section interface B") == "interface B\n shutdown"


def test_a_hostile_filter_or_line_costs_nothing() -> None:
    GRAMMARS["switch"].read("show run | include " + "(a+)+" * 20 + "$", PROMPT).filtered("a" * 50_000)
    assert refused("show " + "x" * 100_000).fault == "invalid"
