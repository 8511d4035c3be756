"""Where the files that are not Python lie: named SQL, job templates, migrations.

Owns the two layouts (a clone, and an installed wheel, where the build put `sql/` and `scripts/` under
`scavenger/_data/`) and nothing else. Must not know what any of the files means.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from scavenger.errors import ScavengerError

_PACKAGE = Path(__file__).resolve().parent
_PACKAGES = frozenset({"scavenger", "rollout", "trainer"})


def path(relative: str) -> Path:
    """The file or folder that the repository calls `relative`, e.g. `sql/reports`, `scripts/rollout.sbatch.j2` or
    `scavenger/ledger/migrations`.

    `relative` is a POSIX path below the repository's root. Raises `ScavengerError` when it leaves that root, or when
    this installation does not hold it.
    """
    wanted = PurePosixPath(relative)
    if wanted.is_absolute() or not wanted.parts or ".." in wanted.parts:
        raise ScavengerError(
            f"resource {relative!r} is not below the repository's root", "name it as the repository does"
        )
    found = _root(wanted).joinpath(*wanted.parts)
    if not found.exists():
        raise ScavengerError(
            f"this installation of scavenger lacks {relative!r} (looked at {found})",
            "install the wheel again with `pip install --force-reinstall --no-deps`, or `git checkout` it in a clone",
        )
    return found


def text(relative: str) -> str:
    """The UTF-8 text of `path(relative)`; raises as `path` does."""
    return path(relative).read_text(encoding="utf-8")


def _root(wanted: PurePosixPath) -> Path:
    # A package's own files lie beside its modules in both layouts.
    if wanted.parts[0] in _PACKAGES:
        return _PACKAGE.parent
    data = _PACKAGE / "_data"
    # Only the wheel's build makes _data, and never inside a clone; so its presence tells the layouts apart.
    return data if data.is_dir() else _PACKAGE.parent
