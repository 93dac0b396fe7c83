"""The `fasttps` command; `fasttps.cli.app` has its subcommands.

The answer goes to standard output, everything else to standard error: progress, figures and, for
what goes wrong, one line. `fasttps.cli.errors.ExitCode` lists the exit codes. Nothing is ever
fetched from a hub. `FASTTPS_TRACEBACK=1` shows where an error came from.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence

from fasttps.cli.errors import CliError, ExitCode
from fasttps.messages import one_line

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; `arguments` defaults to those of the process."""
    # transformers and its hub library read these once, when they are imported.
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    os.environ["TQDM_DISABLE"] = "1"
    if arguments is None and hasattr(signal, "SIGPIPE"):
        # A reader that has seen enough, such as `head`, ends the command as it ends others.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a character the terminal cannot show is no error
            stream.reconfigure(errors="replace")
    try:
        from fasttps.cli.app import app

        code = app(arguments, prog_name="fasttps", standalone_mode=False)
        sys.stdout.flush()
        return int(code or 0)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return ExitCode.INTERRUPTED
    except ModuleNotFoundError as error:
        return _fail(error, ExitCode.NOT_INSTALLED, _how_to_install(error))
    except CliError as error:
        return _fail(error, error.exit_code, str(error))
    except Exception as error:
        if hasattr(error, "format_message"):  # a wrong option, as typer reports it
            return _fail(error, ExitCode.USAGE, error.format_message())
        return _fail(error, ExitCode.UNEXPECTED, f"unexpected {type(error).__name__}: {error}")


def _how_to_install(error: ModuleNotFoundError) -> str:
    extra = "cli" if error.name in ("typer", "rich") else "cli,hf"
    return f"{error.name} is not installed; pip install 'fasttps[{extra}]' brings it"


def _fail(error: BaseException, code: int, message: str) -> int:
    if os.environ.get("FASTTPS_TRACEBACK") == "1":
        traceback.print_exception(error)
    print(f"fasttps: {one_line(message)}", file=sys.stderr)
    return code
