"""Installs each coding agent into a folder of its own, `.agents/NAME`, unless it is there already.

python -m tests.compat.agents.install
"""

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.compat.agents.agents import AGENTS

FOLDER = Path(__file__).parents[3] / ".agents"
_QUIETLY = ("--prefer-offline", "--no-audit", "--no-fund", "--loglevel=error")


def is_installed(name: str) -> bool:
    done = FOLDER / name / ".done"
    return done.is_file() and done.read_text() == AGENTS[name].package


def install(name: str) -> None:
    folder, package = FOLDER / name, AGENTS[name].package
    if is_installed(name):
        return
    shutil.rmtree(folder, ignore_errors=True)
    if "==" in package:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        subprocess.run([*pip, *package.split()], check=True)
    else:
        folder.mkdir(parents=True)
        subprocess.run(["npm", "install", "--prefix", folder, *_QUIETLY, package], check=True)
    (folder / ".done").write_text(package)


if __name__ == "__main__":
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(install, AGENTS))
