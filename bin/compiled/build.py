"""Compile modules in place: `python -m bin.compiled.build FOLDER`, started by `bin.compiled` alone.

A process of its own, because mypyc and setuptools print, exit and remember as they like.
"""

from __future__ import annotations

import os
import sys

from mypyc.build import mypycify
from setuptools import setup

from bin.compiled.form import MODULES

# The sources are checked by `make lint`; here types only have to be known.
_MYPY = (
    "--config-file=",
    "--explicit-package-bases",
    "--namespace-packages",
    "--ignore-missing-imports",
    "--follow-imports=silent",
    f"--python-version={sys.version_info[0]}.{sys.version_info[1]}",
    "--cache-dir=build/mypy",
)


def main(folder: str) -> None:
    """Make extension modules of MODULES in `folder`, a copy of the rooms."""
    os.chdir(folder)
    os.environ["MYPYPATH"] = folder
    modules = mypycify([*_MYPY, *MODULES], opt_level="2", debug_level="0", group_name="llmgw")
    setup(
        name="llmgw-compiled",
        ext_modules=modules,
        script_args=["-q", "build_ext", "--inplace", "--build-temp", "build"],
    )


if __name__ == "__main__":
    main(sys.argv[1])
