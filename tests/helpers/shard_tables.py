"""Reads and replaces the table of shards in an output, as dictionaries."""

import json
from pathlib import Path
from typing import Any

from bert_jax.data.manifest import SHARD_TABLE, ShardTable, read_shard_table


def entries(folder: Path, part: str = "") -> list[dict[str, Any]]:
    """The shards of an output, or of one part: name, rows, bytes, sha256."""
    table = read_shard_table(folder, json.loads((folder / "manifest.json").read_text()))
    columns = zip(table.names.tolist(), table.rows.tolist(), table.bytes.tolist(), strict=True)
    named = [
        {"name": name, "rows": rows, "bytes": size, "sha256": table.sha256(index)}
        for index, (name, rows, size) in enumerate(columns)
    ]
    return [entry for entry in named if entry["name"].startswith(part)]


def replace(folder: Path, shards: list[dict[str, Any]], manifest: dict[str, Any] | None = None) -> None:
    """Writes a table of these shards, and the manifest (by default the present one) with its hash."""
    manifest = manifest or json.loads((folder / "manifest.json").read_text())
    table = ShardTable.of_entries(shards)
    content = table.encode()
    (folder / SHARD_TABLE).write_bytes(content)
    (folder / "manifest.json").write_text(json.dumps(manifest | {"shards": table.summary(content)}))
