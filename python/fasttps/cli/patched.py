"""How the command patches a model: what can be told before loading, and the patch with a bar."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fasttps
from fasttps.cli.errors import CliError, ExitCode
from fasttps.cli.progress import Reporter


def check_isa() -> None:
    """Let a FASTTPS_ISA that cannot run here fail before the model is loaded.

    Raises:
        CliError: USAGE: with the instruction sets that can.
    """
    try:
        fasttps.isa.active()
    except ValueError as error:
        raise CliError(ExitCode.USAGE, str(error)) from error


def patch_model(model: Any, reporter: Reporter) -> fasttps.Patch:
    """Patch the model, its weights packed under a bar; `.undo()` of the result restores it.

    Raises:
        CliError: UNSUPPORTED_MODEL: it cannot be patched.
    """
    with reporter.step("packing the weights") as report:
        try:
            return fasttps.patch(model, progress=report)
        except fasttps.PatchError as error:
            raise CliError(ExitCode.UNSUPPORTED_MODEL, str(error)) from error


def check_supported(path: Path) -> None:
    pass


def cache_for(model: Any, max_seq_len: int) -> Any:
    return None
