"""The paper's table beside ours, made from all records of a results folder.

    python -m experiments.table                                         of results/
    python -m experiments.table --reference --markdown=table.md         of the records that ship
    python -m experiments.table --copy_reference=experiments/reference  keeps what it shows

Three blocks: runs in the paper's own manner (its attack with its objective; `--preset=paper`),
which are judged by its figures; headlines (for each image the nearest success of all attacks),
which stand beside them; and sweeps of limited knowledge. Records of single attacks are not shown.
"""

from __future__ import annotations

import sys
from pathlib import Path

from absl import flags

from experiments import common, path_flags

_RESULTS_DIR = path_flags.define("results_dir", "results", "Folder of the records to show.")
_REFERENCE = flags.DEFINE_bool(
    "reference", False, "Show the records that ship with the code instead."
)
_MARKDOWN = path_flags.define("markdown", None, "Write the table to this file, too.")
_COPY_REFERENCE = path_flags.define(
    "copy_reference",
    None,
    "Copy the JSON of all records shown, and the images of the headlines, to this folder.",
)
REFERENCE = Path(__file__).parent / "reference"


def main() -> None:
    """Reads, prints, and writes and copies where asked to."""
    from advdet.types import InputError
    from experiments import table_blocks

    folder = REFERENCE if _REFERENCE.value else Path(_RESULTS_DIR.value)
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}; name that of the records by --results_dir")
    lines, warnings = table_blocks.read(folder)
    for warning in warnings:
        print(warning, file=sys.stderr)
    blocks = table_blocks.blocks_of(lines)
    if not blocks:
        print(f"{folder} holds no record to show; run with --attack=all or --preset=paper first")
    else:
        print(table_blocks.terminal(blocks))
    if hidden := sum(line.block is None for line in lines):
        print(f"records of single attacks, not shown: {hidden}")
    try:
        if _MARKDOWN.value:
            Path(_MARKDOWN.value).write_text(table_blocks.markdown(blocks))
            print(f"table   {_MARKDOWN.value}")
        if _COPY_REFERENCE.value:
            count = table_blocks.copy_records(lines, folder, Path(_COPY_REFERENCE.value))
            print(f"copied  {count} records to {_COPY_REFERENCE.value}")
    except OSError as error:
        raise InputError(f"{error.filename} cannot be written ({error.strerror})") from None


if __name__ == "__main__":
    common.run(main)
