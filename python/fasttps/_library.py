"""Loads libfasttps.so, which registers `torch.ops.fasttps`.

The library uses torch's C++ interface, which changes with every release: under another torch it
would crash or, worse, compute. So the versions are compared before anything is loaded.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

PACKAGE_DIR = Path(__file__).resolve().parent
LIBRARY = PACKAGE_DIR / "lib" / "libfasttps.so"
BUILD_FACTS = PACKAGE_DIR / "lib" / "build_facts.json"
REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps ."


def load() -> None:
    """Load the library once; a second call does nothing.

    Raises:
        ImportError: it is not built, or was built for another torch or another Python.
    """
    if not (LIBRARY.exists() and BUILD_FACTS.exists()):
        raise ImportError(
            f"fasttps: {LIBRARY} is not built; in the source folder run `make build`, "
            f"or `{REBUILD}` to install"
        )
    built_for = json.loads(BUILD_FACTS.read_text())["torch"]
    running = str(torch.__version__)
    if built_for != running:
        raise ImportError(
            f"fasttps: built for torch {built_for}, but torch {running} is running; "
            f"rebuild in the source folder with `{REBUILD}`"
        )
    try:
        torch.ops.load_library(str(LIBRARY))
        from fasttps import _C  # noqa: F401
    except (ImportError, OSError) as error:
        raise ImportError(
            f"fasttps: the library does not load ({error}); "
            f"rebuild in the source folder with `{REBUILD}`"
        ) from error
