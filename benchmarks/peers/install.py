"""`python -m peers.install`: the virtual environments of the peers, one after the other."""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console

from peers import PEERS, peer_class
from peers.venv import Venv


def default_cache() -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "fasttps" / "peers"


def venv_of(cache: Path, name: str) -> Venv | None:
    """The environment of a peer; None: it runs in the driver's."""
    peer = peer_class(PEERS[name])
    return Venv(cache, name, peer.install) if peer.own_venv else None


def install(
    cache: Path, names: Iterable[str], console: Console, *, make: bool = True
) -> dict[str, str]:
    """Make the environments that are missing, or only say which are.

    Returns:
        For each peer that is not installed now, the reason.
    """
    reasons = {}
    for name in dict.fromkeys(names):
        venv = venv_of(cache, name)
        if venv is None or venv.is_made():
            continue
        if not make:
            reasons[name] = "not installed"
            continue
        with console.status(f"installing {name} (log: {venv.log})"):
            try:
                venv.make()
            except (OSError, subprocess.CalledProcessError) as error:
                reasons[name] = f"not installed: {error}; {venv.reason()}"
        console.print(f"{name}: {reasons.get(name, 'installed')}", markup=False)
    return reasons


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("peers", nargs="*", metavar="PEER", help=f"of {', '.join(PEERS)} (all)")
    options.add_argument("--cache", type=Path, default=default_cache(), help="(%(default)s)")
    chosen = options.parse_args()
    unknown = set(chosen.peers) - set(PEERS)
    if unknown:
        options.error(f"PEER wanted {', '.join(PEERS)}, got {', '.join(sorted(unknown))}")
    failed = install(chosen.cache.resolve(), chosen.peers or PEERS, Console())
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
