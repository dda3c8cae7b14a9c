"""Questions about the device itself: software, log, load, clock."""

from __future__ import annotations

from random import Random

from workbench.lab.question import Draw, QuestionKind
from workbench.session.router.state import Device

_VERSION = ("show version",)
_LOG = ("show logging",)


def _short(uptime: str) -> str:
    """The two largest units."""
    return ", ".join(uptime.split(", ")[:2])


def _uptime(device: Device, random: Random) -> Draw | None:
    del random
    value = _short(device.software.uptime)
    return Draw((), _VERSION, f"It has been up {value}.", (value,))


def _release(device: Device, random: Random) -> Draw | None:
    del random
    value = device.software.version
    return Draw((), _VERSION, f"It runs version {value}.", (value,))


def _both(device: Device, random: Random) -> Draw | None:
    del random
    version, uptime = device.software.version, _short(device.software.uptime)
    return Draw((), _VERSION, f"It runs version {version} and has been up {uptime}.", (version, uptime))


def _serial(device: Device, random: Random) -> Draw | None:
    del random
    value = device.software.serial
    return Draw((), _VERSION, f"The serial number is {value}.", (value,))


def _image(device: Device, random: Random) -> Draw | None:
    del random
    value = device.software.image
    return Draw((), _VERSION, f"It booted {value}.", (value,))


def _model(device: Device, random: Random) -> Draw | None:
    del random
    value = device.software.platform
    return Draw((), ("show inventory",), f"The chassis is a {value}.", (value,))


def _went_down(device: Device, random: Random) -> Draw | None:
    del random
    rows = [row for row in device.log if row.kind == "link" and row.value == "down"]
    return Draw((), _LOG, f"{rows[0].subject} went down at {rows[0].stamp}.", (rows[0].subject, rows[0].stamp))


def _came_back(device: Device, random: Random) -> Draw | None:
    del random
    rows = [row for row in device.log if row.kind == "link" and row.value == "up"]
    if not rows:
        return None
    return Draw((), _LOG, f"{rows[0].subject} came up at {rows[0].stamp}.", (rows[0].subject, rows[0].stamp))


def _configured(device: Device, random: Random) -> Draw | None:
    del random
    rows = [row for row in device.log if row.kind == "config"]
    if not rows:
        return Draw((), _LOG, "The log shows no configuration.", ("no configuration",))
    answer = f"{rows[0].subject} configured it from {rows[0].value}."
    return Draw((), _LOG, answer, (rows[0].subject, rows[0].value))


def _cpu(device: Device, random: Random) -> Draw | None:
    del random
    _, minute, five = device.cpu
    answer = f"CPU: {minute}% over one minute, {five}% over five minutes."
    return Draw((), ("show processes cpu | include CPU",), answer, (f"{minute}% over one", f"{five}% over five"))


def _clock(device: Device, random: Random) -> Draw | None:
    del random
    value = device.clock.lstrip("*")
    return Draw((), ("show clock",), f"The clock reads {value}.", (value,))


KINDS: tuple[QuestionKind, ...] = (
    QuestionKind(
        "uptime",
        (
            "How long has it been up?",
            "What is the uptime?",
            "Uptime?",
            "Give me the uptime.",
            "Since when is it up? Tell me the uptime.",
            "How long is it running without a restart?",
            "Look up how long it has been running.",
        ),
        ("For how long has the box been running?", "Tell me the uptime."),
        _uptime,
    ),
    QuestionKind(
        "release",
        (
            "Which software version is running?",
            "What IOS version is installed?",
            "IOS version?",
            "Which software release is on it?",
            "Software version, please.",
            "What version of IOS does it have?",
            "Give me the IOS version.",
        ),
        ("Tell me the software release.", "Which IOS release does it run?"),
        _release,
    ),
    QuestionKind(
        "release-uptime",
        (
            "Which version does it run, and since when is it up?",
            "Give me the software version and the uptime.",
            "Version and uptime?",
            "What software is on it, and what is its uptime?",
            "Tell me the IOS version and how long it has been running.",
            "Uptime and software version, please.",
        ),
        ("What does it run and for how long has it been up?", "Report the IOS release together with the uptime."),
        _both,
    ),
    QuestionKind(
        "serial",
        (
            "What is the serial number?",
            "Give me the processor board ID.",
            "Serial number?",
            "Which serial number does it have?",
            "Look up its serial number.",
            "Processor board ID, please.",
        ),
        ("I need the serial for a support case.", "Read me the board serial."),
        _serial,
    ),
    QuestionKind(
        "image",
        (
            "Which image file did it boot?",
            "What is the system image file?",
            "System image?",
            "From which file was it booted?",
            "Give me the name of the system image.",
            "Which IOS file is in use?",
        ),
        ("Tell me the image that it started from.", "What file did it load at boot?"),
        _image,
        0.7,
    ),
    QuestionKind(
        "model",
        (
            "Which hardware model is it?",
            "What chassis is it?",
            "Inventory: which chassis?",
            "Give me the product ID of the chassis.",
            "What model does the inventory show?",
            "Chassis model?",
        ),
        ("Look into the inventory: what kind of chassis?", "What hardware do we have here?"),
        _model,
        0.8,
    ),
    QuestionKind(
        "went-down",
        (
            "Which interface went down according to the log?",
            "Which link went down and when?",
            "Did an interface go down? Which one and at what time?",
            "When did a link go down, and which?",
            "Log: which interface changed to down, and when?",
            "Is there a link failure in the log? Interface and time?",
            "Which interface lost its link, and at which time?",
            "Read the log and tell me which link failed and when.",
        ),
        ("Check the log for a link that went down.", "Look in the syslog: which port dropped, and when?"),
        _went_down,
        1.4,
    ),
    QuestionKind(
        "came-back",
        (
            "Which interface came up again, and when?",
            "When did the link come back, and which?",
            "Log: which interface changed to up, and when?",
            "At what time did a link come up?",
            "Which link recovered according to the log?",
            "Did a link recover? Which one and at what time?",
        ),
        ("According to the log, which port came back and when?", "Find the time at which the link was up again."),
        _came_back,
    ),
    QuestionKind(
        "configured",
        (
            "Who last configured the device?",
            "Which user changed the configuration?",
            "Who made the last config change, and from where?",
            "Was it configured by someone? By whom and from which address?",
            "Log: who configured it?",
            "Find the user who configured it, and his address.",
            "From where was it configured, and by whom?",
        ),
        ("Does the log show a configuration change, and by whom?", "Look up who touched the config."),
        _configured,
    ),
    QuestionKind(
        "cpu",
        (
            "How high is the CPU load?",
            "What is the CPU utilization?",
            "CPU load?",
            "CPU utilization over one and five minutes?",
            "Give me the CPU load.",
            "How much CPU is in use?",
            "Look at the CPU load.",
        ),
        ("Is the CPU busy?", "How loaded is the processor?"),
        _cpu,
        0.8,
    ),
    QuestionKind(
        "clock",
        (
            "What time is it on the device?",
            "Read the clock.",
            "What does the clock say?",
            "Time and date?",
            "Which time does the clock show?",
            "Give me the date and time.",
        ),
        ("Which time and date does it have?", "Check the device clock."),
        _clock,
        0.8,
    ),
)
