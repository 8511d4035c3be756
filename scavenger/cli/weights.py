"""The `scavenger weights` commands. Each calls one function of `scavenger.weights`.

Boundary: one subcommand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Published weight versions.")


@app.callback()
def _group() -> None:
    """A group, though it has one command yet."""


@app.command("export")
def export(
    version: Annotated[
        Path, typer.Argument(help="a spooled version: <weights.spool_dir>/<run.name>/version-N")
    ],
    out: Annotated[Path, typer.Argument(help="the new folder")],
    model: Annotated[
        Path | None, typer.Option(help="model.path of the run: its config.json and tokenizer are copied")
    ] = None,
) -> None:
    """Write a published version as a Hugging Face checkpoint, every byte checked against its manifest."""
    from scavenger.weights import export as exporting
    from scavenger.weights import spool

    manifest, blob = spool.read(version)
    exporting.write(manifest, blob, out, model)
    tensors = exporting.weights_of(manifest)
    nbytes = sum(tensor.nbytes for tensor in tensors)
    told = f"version {manifest.version}, {len(tensors)} tensors, {nbytes:,} bytes"
    print(f"wrote {out}: {told}, root {manifest.root.hex()}")
