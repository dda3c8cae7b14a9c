"""Per-position rows as a Parquet file, a row group for every few thousand rows; needs the extra `parquet` (pyarrow).

The columns are those of CSV and JSON lines (`exporters.FIELDS`), typed; absent and non-finite values are null, and
`token` is the token's text. The file's metadata says what wrote it and that KL is in nats.
"""

from __future__ import annotations

import importlib
import os
from itertools import islice
from pathlib import Path
from typing import Any

from workbench import __version__
from workbench.errors import ConfigurationError, SavedSessionError
from workbench.store.exporters import FIELDS, export_rows
from workbench.store.state import SessionState

GROUP_ROWS = 16384
TYPES: dict[str, str] = {
    **dict.fromkeys(("lane", "position", "id", "turn", "rank", "top_id"), "int32"),
    **dict.fromkeys(("generated", "ties", "valid"), "uint8"),
    **dict.fromkeys(("name", "token", "role", "estimator"), "string"),
}
"""Arrow's type of each field; those not named are float32."""


def write_parquet(state: SessionState, target: Path, lane: str | None = None) -> int:
    """Write every lane's rows, or of the one of that name or id, to `target`, whole or not at all; how many rows.

    Raises ConfigurationError where pyarrow is not installed, SavedSessionError where the file cannot be written.
    """
    try:
        arrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigurationError(
            "Parquet needs the package pyarrow",
            where="export",
            next="pip install 'inference-workbench[parquet]', or use --format csv|jsonl.",
        ) from error
    schema = arrow.schema([(name, getattr(arrow, TYPES.get(name, "float32"))()) for name in FIELDS])
    schema = schema.with_metadata({"workbench": __version__, "kl": "KL(p||q) in nats, p the reference"})
    rows, count = export_rows(state, lane), 0
    part = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with parquet.ParquetWriter(part, schema, compression="zstd") as writer:
            while group := list(islice(rows, GROUP_ROWS)):
                writer.write_table(arrow.Table.from_pylist(group, schema=schema))
                count += len(group)
        part.replace(target)
    except OSError as error:
        raise SavedSessionError(f"cannot be written: {error.strerror or error}", where=str(target)) from error
    finally:
        part.unlink(missing_ok=True)
    return count
