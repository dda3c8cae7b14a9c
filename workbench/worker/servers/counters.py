"""Counters of a `/metrics` page in Prometheus's text form."""

from __future__ import annotations

import math
import re

_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{([^}]*)\})?\s+(\S+)")


def counter(page: str, name: str) -> float | None:
    """The sum of a metric over its labels (`name` with or without `_total`), or None where the page has none."""
    values: list[float] = []
    for line in page.splitlines():
        found = _LINE.match(line)
        if found is None or found.group(1).removesuffix("_total") != name.removesuffix("_total"):
            continue
        try:
            value = float(found.group(3))
        except ValueError:
            continue
        if math.isfinite(value):
            values.append(value)
    return sum(values) if values else None


def has(page: str, name: str) -> bool:
    """Whether the page has the metric."""
    return counter(page, name) is not None
