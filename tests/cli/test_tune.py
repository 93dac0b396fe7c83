"""The choice of the bf16 product: forced, tuned and shown; the same in every process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import fasttps
from fasttps import _C
from fasttps.cli import tune
from fasttps.cli.errors import ExitCode
from tests.support.command import Ran, process_environment, run_process

needs_both = pytest.mark.skipif(
    len(fasttps.isa.bf16_products()) < 2, reason="this CPU lacks avx512_bf16"
)


def line_of(ran: Ran) -> str:
    assert ran.code == ExitCode.OK, ran.err
    (line,) = [line for line in ran.out.splitlines() if line.startswith("bf16 products: ")]
    return line.removeprefix("bf16 products: ")


@pytest.fixture
def choice() -> Iterator[None]:
    before = fasttps.isa.bf16_product()
    yield
    fasttps.isa.use_bf16_product(before)


def test_info_says_how_bf16_is_multiplied_and_who_chose_it() -> None:
    """In a process of its own, and the same in every one: here a test may have chosen."""
    code = "from fasttps import _C; print('{} ({})'.format(*_C.bf16_product()))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=process_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert line_of(run_process("info")) == done.stdout.strip()


@pytest.mark.parametrize("product", fasttps.isa.bf16_products())
def test_the_environment_forces_a_product(product: str) -> None:
    ran = run_process("info", FASTTPS_BF16_GEMM=product, FASTTPS_ISA=fasttps.isa.available()[0])
    assert line_of(ran) == f"{product} (FASTTPS_BF16_GEMM)"


def test_what_cannot_run_is_an_error_that_lists_what_can(llama_folder: Path) -> None:
    what = f"FASTTPS_BF16_GEMM: this CPU runs {', '.join(fasttps.isa.bf16_products())}; got 'amx'"
    ran = run_process("info", FASTTPS_BF16_GEMM="amx")
    assert line_of(ran) == f"nothing runs until this is changed: {what}"
    ran = run_process("generate", "--model", llama_folder, "Hello", FASTTPS_BF16_GEMM="amx")
    assert (ran.code, ran.error_line) == (ExitCode.USAGE, f"fasttps: {what}")


@needs_both
def test_an_isa_without_the_instruction_refuses_it_where_it_is_forced(llama_folder: Path) -> None:
    ran = run_process(
        *("generate", "--model", llama_folder, "Hello"),
        FASTTPS_BF16_GEMM="dpbf16",
        FASTTPS_ISA="avx2",
    )
    assert ran.code == ExitCode.USAGE
    assert ran.error_line == "fasttps: FASTTPS_BF16_GEMM: isa avx2 runs fma; got 'dpbf16'"


def test_a_process_can_choose_and_go_back(choice: None) -> None:
    before = fasttps.isa.bf16_product()
    with fasttps.isa.bf16_product_forced("fma"):
        assert fasttps.isa.bf16_product() == "fma"
        assert fasttps.isa.bf16_product_origin() == "this process"
    assert fasttps.isa.bf16_product() == before
    with pytest.raises(ValueError, match=r"this CPU runs .*fma; got 'amx'"):
        fasttps.isa.use_bf16_product("amx")
    assert fasttps.isa.bf16_product() == before


@needs_both
def test_tune_stores_what_every_later_process_reads(tmp_path: Path) -> None:
    environment = {"XDG_CONFIG_HOME": str(tmp_path), "FASTTPS_BF16_GEMM": ""}
    file = tmp_path / "fasttps" / "bf16_product"
    ran = run_process("tune", "--force", **environment)
    assert ran.code == ExitCode.OK, ran.err
    product = file.read_text().split()[-1]
    assert product in fasttps.isa.bf16_products()
    assert f"{product}, stored in {file}" in ran.out
    ran = run_process("tune", **environment)
    assert ran.out == f"known already: {product} ({file}); --force measures again\n"
    other = {"dpbf16": "fma", "fma": "dpbf16"}[product]
    for stored in (product, other):
        file.write_text(file.read_text().replace(product, stored))
        assert line_of(run_process("info", **environment)) == f"{stored} ({file})"


@needs_both
def test_a_broken_file_is_told_and_written_anew(
    run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment = {"XDG_CONFIG_HOME": str(tmp_path)}
    file = tmp_path / "fasttps" / "bf16_product"
    file.parent.mkdir()
    file.write_text("GenuineIntel 6 1 fma\nnonsense\n")
    assert f"{file}, line 2: wanted" in line_of(run_process("info", **environment))
    ran = run_process("tune", **environment)
    assert ran.code == ExitCode.USAGE and f"{file}, line 2: wanted" in ran.error_line
    monkeypatch.setenv("FASTTPS_BF16_GEMM", "")  # the command takes it away: put it back after
    monkeypatch.setattr(_C, "tuned_path", lambda: str(file))
    monkeypatch.setattr("fasttps.cli.tune.ROUNDS", 1)
    assert run("tune", "--force").code == ExitCode.OK
    assert f"({file})" in line_of(run_process("info", **environment))
    assert "GenuineIntel 6 1 fma" in file.read_text()
    assert "nonsense" not in file.read_text()


def test_a_wrong_choice_fails_the_first_op() -> None:
    code = (
        "import torch, fasttps\n"
        "try: fasttps.ops.merge_attention([torch.ones(1, 1, 1, 2)], [torch.zeros(1, 1, 1)])\n"
        "except ValueError as error: print(error)\n"
    )
    environment = {**process_environment(), "FASTTPS_BF16_GEMM": "amx"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("FASTTPS_BF16_GEMM: this CPU runs ")


def test_the_line_of_another_cpu_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "deep" / "bf16_product"
    monkeypatch.setattr(_C, "cpu_model", lambda: ("A", 1, 2))
    tune.store(file, "fma")
    monkeypatch.setattr(_C, "cpu_model", lambda: ("A", 1, 3))
    tune.store(file, "dpbf16")
    tune.store(file, "fma")
    assert file.read_text().splitlines()[1:] == ["A 1 2 fma", "A 1 3 fma"]
    assert [item.name for item in file.parent.iterdir()] == ["bf16_product"]


def test_a_cpu_without_a_choice_is_told(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTTPS_BF16_GEMM", "")  # the command takes it away: put it back after
    monkeypatch.setattr("fasttps.isa.bf16_products", lambda: ["fma"])
    ran = run("tune", "--force")
    assert ran.out == "nothing to choose: this CPU multiplies bf16 by fma alone\n"


@needs_both
def test_a_folder_that_cannot_be_made_is_told(
    run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FASTTPS_BF16_GEMM", "")  # the command takes it away: put it back after
    (tmp_path / "fasttps").write_text("a file where a folder should be")
    monkeypatch.setattr(_C, "tuned_path", lambda: str(tmp_path / "fasttps" / "bf16_product"))
    monkeypatch.setattr("fasttps.cli.tune.ROUNDS", 1)
    ran = run("tune", "--force")
    assert ran.code == ExitCode.USAGE
    assert f"cannot write {tmp_path}" in ran.error_line
