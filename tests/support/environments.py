"""Clean virtual environments that things are installed in, and commands that must succeed."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def tools_path() -> str:
    """PATH with the commands of the environment that the tests run in, such as cmake."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Standard output of a command that must succeed, without what the tests were started with."""
    ours = ("PYTHON", "FASTTPS_", "CMAKE_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@dataclass
class Environment:
    """A virtual environment with all that the tests' own has, except fasttps."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.folder / "lib" / version / "site-packages"

    @classmethod
    def make(cls, folder: Path) -> Environment:
        venv.create(folder, with_pip=False, symlinks=True)
        environment = cls(folder)
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            if not entry.name.startswith(("fasttps", "__editable__", "__pycache__")):
                (environment.site_packages / entry.name).symlink_to(entry)
        return environment

    def pip_install(self, *arguments: str | Path) -> None:
        command = (self.python, "-m", "pip", "install", "--no-deps", "--no-build-isolation")
        run(*command, *arguments, cwd=self.folder, PATH=tools_path())

    def run_python(self, code: str, **environment: str) -> str:
        return run(self.python, "-c", code, cwd=self.folder, **environment).strip()
