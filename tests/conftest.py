"""Fixtures that several folders share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared data beside the checkout; tests that need it skip by name where it is absent."""
    if not SHARED.is_dir():
        if os.environ.get("CI") == "true" and os.environ.get("WORKBENCH_SHARED") == "required":
            pytest.fail("the shared data folder is required here and absent")
        pytest.skip("needs the shared data folder beside the checkout")
    return SHARED
