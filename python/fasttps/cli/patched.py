"""How the command patches a model: what can be told before loading, and the patch with a bar."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import fasttps
from fasttps.cli.errors import CliError, ExitCode
from fasttps.cli.load import Loaded, read, source
from fasttps.cli.progress import Reporter
from fasttps.models import FAMILIES


def check_isa() -> None:
    """Let a FASTTPS_ISA or FASTTPS_BF16_GEMM that cannot run fail before the model is loaded.

    Raises:
        CliError: USAGE: with those that can.
    """
    try:
        fasttps.isa.active()
        fasttps.isa.bf16_product()
    except ValueError as error:
        raise CliError(ExitCode.USAGE, str(error)) from error


def patch_model(loaded: Loaded, reporter: Reporter) -> fasttps.Patch:
    """Patch the model, its weights packed under a bar; `.undo()` of the result restores it.

    One that was loaded patched stays as it is. What could not be fused is told: those modules run
    as they did.

    Raises:
        CliError: UNSUPPORTED_MODEL: it cannot be patched.
    """
    if loaded.patch is not None:
        return loaded.patch
    with reporter.step("packing the weights") as report:
        try:
            patch = fasttps.patch(loaded.model, progress=report)
        except fasttps.PatchError as error:
            raise CliError(ExitCode.UNSUPPORTED_MODEL, str(error)) from error
    if patch.report().skipped:
        reporter.line(str(patch.report()))
    return patch


def check_supported(path: Path) -> None:
    """Tell a model that cannot be patched by its config, before its weights are read.

    A GGUF file is not looked at: what it cannot be is told when it is loaded.

    Raises:
        CliError: UNSUPPORTED_MODEL, or BROKEN_MODEL where the config makes no model.
    """
    if not path.is_dir():
        return
    import transformers

    def skeleton() -> Any:
        config = transformers.AutoConfig.from_pretrained(**source(path))
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config)

    model = read(path, skeleton)
    bases = (base for module in model.modules() for base in type(module).__mro__)
    if not any(base.__module__ in FAMILIES for base in bases):
        raise CliError(
            ExitCode.UNSUPPORTED_MODEL,
            f"{path} is a {type(model).__name__}, which FastTPS does not patch; "
            "--no-patch runs it as it is",
        )
