"""The twins import torch alone: they serve where the library cannot be built."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from fasttps import ops, reference

LOAD = """
import importlib.util, sys
folder = sys.argv[1]
spec = importlib.util.spec_from_file_location(
    "twins", f"{folder}/__init__.py", submodule_search_locations=[folder])
twins = sys.modules["twins"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(twins)
assert not [name for name in sys.modules if name.split(".")[0] == "fasttps"]
import torch
print(*twins.merge_attention([torch.ones(1, 1, 1, 1)], [torch.zeros(1, 1, 1)])[0].shape)
"""


def test_twins_load_without_the_library():
    folder = Path(reference.__file__).parent
    result = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder)],
        env={"PATH": "/usr/bin:/bin"},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.stdout == "1 1 1 1\n", result.stderr


def test_every_function_has_a_twin():
    functions = set(ops.__all__) - {"DecodeStep", "PackedFormat"}  # classes
    assert functions == set(reference.__all__)
