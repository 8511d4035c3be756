"""Arguments that lay other files and single keys over run.toml: the same for ranks, their launcher and what reads checkpoints."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def add_layers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--over",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="another TOML file, laid over run.toml; repeatable",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a key laid over all files, such as algorithm.name=gspo; repeatable",
    )


def layers_among(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """The files and keys among the ranks' arguments, which the launcher passes on."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_layers(parser)
    found, _ = parser.parse_known_args(list(arguments))
    return found.over, found.set
