"""Packages that this Python may lack: that of a bare wheel or of the Debian package has the daemon's alone.

Owns which they are, and what a command says that needs them. Imports none of them.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable

from scavenger.errors import ConfigError

TRAINS = ("torch", "transformers")
#: What makes an environment that has them.
INSTALL = (
    "pip install -c constraints.txt 'WHEEL[trainer,math]', of a clone '.[trainer,math]' (docs/install.md)"
)

#: What answers agents over HTTP: the extra `gateway`.
GATEWAY = ("starlette", "uvicorn")
#: What passes a service's requests on: the extra `guest`.
PROXY = (*GATEWAY, "httpx2")


def extra(name: str) -> str:
    """How one of this package's extras is added to a Python that has the package, whether of a wheel or of a clone."""
    return f"pip install -c constraints.txt 'WHEEL[{name}]', of a clone '.[{name}]' (docs/install.md)"


def require_gateway(what: str) -> None:
    """Raises `ConfigError` where this Python cannot run a gateway. `what`: calls one, such as "agents call a gateway"."""
    _require(what, GATEWAY, "gateway")


def require_proxy(what: str) -> None:
    """Raises `ConfigError` where this Python cannot run a proxy. `what`: needs one."""
    _require(what, PROXY, "guest")


def _require(what: str, packages: Iterable[str], of_extra: str) -> None:
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise ConfigError(
            f"{what}, and this Python ({sys.executable}) has no {' and no '.join(missing)}",
            f"add the extra {of_extra} to it: {extra(of_extra)}",
        )


def lacking() -> list[str]:
    """What training and engines import, and this Python has not."""
    return [name for name in TRAINS if importlib.util.find_spec(name) is None]


def require_training(what: str) -> None:
    """Raises `ConfigError` where one is missing. `what`: trains, such as "the demo trains a model"."""
    if missing := lacking():
        raise ConfigError(
            f"{what}, and this Python ({sys.executable}) has no {' and no '.join(missing)}", INSTALL
        )
