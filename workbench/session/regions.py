"""What a token position is: one role for each, and whether the model would write it."""

from __future__ import annotations

from enum import IntEnum


class Role(IntEnum):
    """The role of a position; the numbers are stored in saved sessions and never change."""

    SYSTEM = 0
    USER = 1
    TOOL_RESULT = 2
    THINKING = 3
    CONTENT = 4
    CALL_NAME = 5
    ARGUMENT_KEY = 6
    ARGUMENT_VALUE = 7
    STRUCTURE = 8


ROLE_NAMES: tuple[str, ...] = tuple(role.name.lower() for role in Role)
