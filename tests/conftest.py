"""Fixtures that several folders share."""

from __future__ import annotations

import os
import sys
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


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The embedded model's folder, fetched and converted once; where it cannot be had, tests skip by name."""
    from workbench.engines.models import find_model
    from workbench.errors import ModelError
    from workbench.run.convert import converter

    try:
        return find_model("smollm2-135m", converter(lambda: sys.executable)).folder
    except ModelError as error:
        if os.environ.get("WORKBENCH_MODEL") == "required":
            raise
        pytest.skip(f"needs the embedded model: {error}")
