"""Load a model and its tokenizer from a HuggingFace folder or a GGUF file, offline.

A checkpoint that lacks weights is an error: transformers would fill them with random numbers.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fasttps.checkpoint.schemes import (
    BrokenCheckpoint,
    UnsupportedCheckpoint,
    quantization_config,
)
from fasttps.cli.errors import CliError, ExitCode
from fasttps.cli.progress import Report, Reporter
from fasttps.gguf.architectures import ARCHITECTURES
from fasttps.gguf.header import BrokenGguf, Header, UnsupportedGguf, is_gguf, read_header
from fasttps.gguf.load import How, load_with
from fasttps.messages import one_line
from fasttps.packed_model.manifest import is_packed_model


@dataclass(frozen=True)
class Loaded:
    """A model ready to generate, what turns its tokens into text, and the patch if it has one."""

    model: Any
    tokenizer: Any
    patch: Any = None


def load(
    path: Path,
    dtype: torch.dtype,
    reporter: Reporter,
    *,
    pack: bool = False,
    kv: str | None = None,
    int8_activation: bool = True,
) -> Loaded:
    """Load the model at `path`, a HuggingFace folder, a saved one or a GGUF file, in `dtype`.

    Args:
        pack: load a GGUF file, or a folder that is quantised, patched, its quantised weights as
            they are.
        kv, int8_activation: of `fasttps.load_gguf` and `fasttps.load_checkpoint`.

    Raises:
        CliError: BROKEN_MODEL, with what is wrong with the path or the files.
        ModuleNotFoundError: transformers or, for GGUF, gguf or accelerate is not installed.
    """
    where = source(path)
    header = None
    if "gguf_file" in where:
        importlib.import_module("gguf")
        header = _check(path, read_header)
    import transformers

    transformers.utils.logging.set_verbosity_error()
    if header is not None:
        if header.architecture in ARCHITECTURES:
            how = How(dtype, pack, kv if pack else None, int8_activation)
            return load_own_gguf(path, header, how, reporter)
        importlib.import_module("accelerate")  # transformers' own reader needs it
    if is_packed_model(path):
        return load_packed(path, dtype, reporter)
    if is_checkpoint(path):
        return load_own_checkpoint(path, dtype, pack, kv, int8_activation, reporter)
    with reporter.step("reading the tokenizer"):
        tokenizer = read(path, lambda: transformers.AutoTokenizer.from_pretrained(**where))
    with reporter.step("reading the weights") as report, _bars_report_to(report):
        model, facts = read(
            path,
            lambda: transformers.AutoModelForCausalLM.from_pretrained(
                **where, dtype=dtype, output_loading_info=True
            ),
        )
    missing = sorted(facts["missing_keys"])
    if missing:
        raise CliError(
            ExitCode.BROKEN_MODEL,
            f"{path} lacks {len(missing)} of the model's weights, such as {missing[0]}",
        )
    if "gguf_file" in where:
        forget_quantizer(model)
    return Loaded(model.eval(), tokenizer)


def load_packed(path: Path, dtype: torch.dtype, reporter: Reporter) -> Loaded:
    """Load a folder that `fasttps.save` wrote; its model is patched."""
    import transformers

    from fasttps.packed_model.reading import load
    from fasttps.packed_model.skeleton import cast

    with reporter.step("mapping the weights"):
        model = _check(path, load)
        cast(model, dtype)
    return Loaded(model, read(path, lambda: transformers.AutoTokenizer.from_pretrained(path)))


def is_checkpoint(path: Path) -> bool:
    """Whether a folder states a quantisation that transformers has no way of its own to undo."""
    stated = _check(path, quantization_config) if path.is_dir() else None
    return stated is not None and stated.get("quant_method") != "mxfp4"


def load_own_checkpoint(
    path: Path,
    dtype: torch.dtype,
    pack: bool,
    kv: str | None,
    int8_activation: bool,
    reporter: Reporter,
) -> Loaded:
    """Load a folder of AWQ, GPTQ or compressed-tensors; of any other scheme, say which it is."""
    from fasttps.checkpoint.load import load_checkpoint

    with reporter.step("reading the weights") as report:
        loaded = _check(
            path,
            lambda path: load_checkpoint(
                path,
                dtype=dtype,
                pack=pack,
                kv=kv if pack else None,
                int8_activation=int8_activation,
                progress=report,
            ),
        )
    if loaded.tokenizer is None:
        raise CliError(ExitCode.BROKEN_MODEL, f"{path} has no tokenizer")
    return Loaded(loaded.model, loaded.tokenizer, loaded.patch)


def load_own_gguf(path: Path, header: Header, how: How, reporter: Reporter) -> Loaded:
    """Load a GGUF file by our own reader, in a tenth of the time that transformers takes."""
    with reporter.step("reading the weights") as report:
        try:
            loaded = _check(path, lambda path: load_with(path, header, how, report))
        except UnsupportedGguf as error:
            raise CliError(ExitCode.UNSUPPORTED_MODEL, f"{path} {error}") from error
    return Loaded(loaded.model, loaded.tokenizer, loaded.patch)


def source(path: Path) -> dict[str, Any]:
    """The arguments of `from_pretrained` for a HuggingFace folder or a GGUF file.

    Raises:
        CliError: BROKEN_MODEL: `path` is neither.
    """
    offline = {"local_files_only": True, "trust_remote_code": False}
    if not _check(path, Path.exists):
        raise CliError(
            ExitCode.BROKEN_MODEL,
            f"no file or folder {path}; a model is given by its path and never fetched",
        )
    if path.is_dir():
        if not _check(path / "config.json", Path.is_file):
            files = sorted(found.name for found in path.glob("*.gguf"))
            hint = f"; it holds {files[0]}, which can be named itself" if files else ""
            raise CliError(ExitCode.BROKEN_MODEL, f"folder {path} has no config.json{hint}")
        _check(path / "config.json", _check_json_object)
        return {"pretrained_model_name_or_path": str(path), **offline}
    if not path.is_file():  # to open a pipe would wait for a writer
        raise CliError(
            ExitCode.BROKEN_MODEL,
            f"{path} is neither a folder nor a regular file; a model is read more than once",
        )
    if not _check(path, is_gguf):
        raise CliError(
            ExitCode.BROKEN_MODEL, f"{path} is neither a HuggingFace folder nor a GGUF file"
        )
    return {
        "pretrained_model_name_or_path": str(path.parent),
        "gguf_file": path.name,
        **offline,
    }


def forget_quantizer(model: Any) -> None:
    """Let a model that was read from GGUF, and is plain now, be cast, patched and saved as one.

    transformers leaves its quantizer on the model though the weights were dequantised.
    """
    if getattr(model, "hf_quantizer", None) is None:
        return
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def _check_json_object(path: Path) -> None:
    if not isinstance(json.loads(path.read_text(encoding="utf-8")), dict):
        raise ValueError("is not a JSON object")


def _check(path: Path, check: Callable[[Path], Any]) -> Any:
    """What `check(path)` returns; its complaint about the file as one line."""
    try:
        return check(path)
    except UnsupportedGguf:
        raise
    except UnsupportedCheckpoint as error:
        raise CliError(ExitCode.UNSUPPORTED_MODEL, f"{path} {error}") from error
    except (BrokenGguf, BrokenCheckpoint) as error:
        raise CliError(ExitCode.BROKEN_MODEL, f"{path} {error}") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise CliError(ExitCode.BROKEN_MODEL, f"cannot read {path}: {reason}") from error
    except ValueError as error:  # json.JSONDecodeError, UnicodeDecodeError
        raise CliError(ExitCode.BROKEN_MODEL, f"{path} is broken: {error}") from error


def read(path: Path, read: Callable[[], Any]) -> Any:
    """What `read` returns. A broken file makes transformers raise nearly anything."""
    try:
        return read()
    except ModuleNotFoundError:
        raise
    except MemoryError as error:
        raise CliError(ExitCode.UNEXPECTED, f"not enough memory to load {path}") from error
    except Exception as error:
        reason = one_line(str(error), 300) or "no reason given"
        raise CliError(
            ExitCode.BROKEN_MODEL, f"cannot load {path}: {type(error).__name__}: {reason}"
        ) from error


@contextmanager
def _bars_report_to(report: Report) -> Iterator[None]:
    """Within, the loops over weights that transformers shows as bars of its own report to ours."""

    def bar(items: Iterable[Any], **_: Any) -> Iterator[Any]:
        items = list(items)
        for done, item in enumerate(items):
            yield item
            report(done + 1, len(items), "")

    replaced = []
    for name in ("core_model_loading", "modeling_gguf_pytorch_utils"):
        try:
            module: Any = importlib.import_module(f"transformers.{name}")
        except ImportError:  # another version of transformers, or no gguf
            continue
        if hasattr(module, "tqdm"):
            replaced.append((module, module.tqdm))
            module.tqdm = bar
    try:
        yield
    finally:
        for module, tqdm in replaced:
            module.tqdm = tqdm
