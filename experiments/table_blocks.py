"""The table of all records of a folder: read, laid out in blocks, written, copied."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import NamedTuple

from advdet import results
from advdet.results import SCHEMA
from advdet.types import InputError
from experiments.table_lines import (
    HEADER,
    NUMBERS,
    TRANSFER_HEADER,
    Line,
    line_of,
    transfer_line_of,
)

_TITLES = {
    "paper": "In the paper's manner (C&W with its objective)",
    "headline": "Headlines (nearest success of all attacks; the paper's figures for orientation)",
    "radius": "Within a fixed radius (`best`: any of the attacks; an L2 says little here)",
    "transfer": "Limited knowledge: the cheapest attack on a copy that transfers so often, the one "
    "of which most transfer, and how many do within a mean L2 (k: confidence/margin asked of the "
    "copy; chosen on half of the images, told of the other)",
}

_MAKERS = {"record": line_of, "transfer": transfer_line_of}


class Block(NamedTuple):
    """A part of the table: its title, rows of cells (the header first) and notes."""

    title: str
    rows: list[tuple[str, ...]]
    notes: list[str]


def read(folder: Path) -> tuple[list[Line], list[str]]:
    """The records below a folder, in the table's order.

    Args:
      folder: of all results.

    Returns:
      Lines, and a warning for each JSON file that is no whole record.
    """
    lines, warnings = [], []
    for path in sorted(folder.rglob("*.json")):
        try:
            record = json.loads(path.read_text())
            if not isinstance(record, dict) or "schema" not in record:
                raise ValueError("it is not a record")
            if record["schema"] != SCHEMA:
                raise ValueError(f"its schema is {record['schema']}, this version reads {SCHEMA}")
            kind = record.get("kind", "record")
            if kind in _MAKERS:  # others are figures of other experiments
                lines.append(_MAKERS[kind](path, record))
        except KeyError as error:
            warnings.append(f"warning: {path} is left out (it lacks {error})")
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            warnings.append(f"warning: {path} is left out ({' '.join(str(error).split())})")
    return sorted(lines, key=lambda line: line.order), warnings


def blocks_of(lines: list[Line]) -> list[Block]:
    """The blocks of the table.

    Args:
      lines: in order.

    Returns:
      Blocks with the paper's regimes as numbered notes; those without a line are left out.
    """
    blocks = []
    for name, title in _TITLES.items():
        chosen = [line for line in lines if line.block == name]
        regimes = list(dict.fromkeys(line.regime for line in chosen if line.regime))
        rows = [TRANSFER_HEADER if name == "transfer" else HEADER]
        for line in chosen:
            *cells, figure, verdict = line.cells
            mark = f" [{regimes.index(line.regime) + 1}]" if line.regime else ""
            rows.append((*cells, figure + mark, verdict))
        notes = [f"[{number}] {regime}" for number, regime in enumerate(regimes, 1)]
        if name == "paper":
            count = lambda band, chosen=chosen: sum(line.in_band is band for line in chosen)
            notes.append(
                f"{count(True)} in band, {count(False)} OUTSIDE, {count(None)} not compared"
            )
        if chosen:
            blocks.append(Block(title, rows, notes))
    return blocks


def terminal(blocks: list[Block]) -> str:
    """The table in aligned columns."""
    parts = []
    for block in blocks:
        widths = [max(map(len, column)) for column in zip(*block.rows)]
        align = lambda row, widths=widths: "  ".join(
            cell.rjust(width) if k in NUMBERS else cell.ljust(width)
            for k, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        parts += ["", block.title, "", *map(align, block.rows), "", *block.notes]
    return "\n".join([*parts, ""])


def markdown(blocks: list[Block]) -> str:
    """The table in Markdown."""
    parts = ["# Ours beside the paper's"]
    for block in blocks:
        cells = lambda row: "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
        header, *rows = block.rows
        rule = ["---:" if k in NUMBERS else "---" for k in range(len(header))]
        parts += ["", f"## {block.title}", "", cells(header), cells(rule), *map(cells, rows), ""]
        parts += [f"- {note}" for note in block.notes]
    return "\n".join([*parts, ""])


def copy_records(lines: list[Line], folder: Path, target: Path) -> int:
    """Copies the JSON of the lines that are shown, in the same layout, and the headlines' images.

    Of other records the JSON alone is kept, with the digest of their arrays that it holds.

    Args:
      lines: from `read`.
      folder: that they were read from.
      target: the folder to copy to; made if it is not there.

    Returns:
      How many.

    Raises:
      InputError: it is the same folder.
    """
    if target.resolve() == folder.resolve():
        raise InputError(f"--copy_reference={target} is the folder that is read; name another")
    shown = [line for line in lines if line.block is not None]
    for line in shown:
        place = target / line.path.relative_to(folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        images = line.path.with_suffix(".npz")
        if line.block == "headline" and images.exists():
            results.copy_compressed(images, place.with_suffix(".npz"))
        shutil.copyfile(line.path, place)
    return len(shown)
