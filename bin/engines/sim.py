"""Our simulated engine, `bin/llmgw-sim`: nothing to install."""

from __future__ import annotations

import sys

from bin.engines.environment import ROOT


def sim_command(port: int, model: str, *flags: str) -> list[str]:
    """Return the command line of a simulated engine on 127.0.0.1.

    Args:
        flags: any of llmgw-sim's.
    """
    program = str(ROOT / "bin" / "boot.py")
    return [sys.executable, program, "sim", "--port", str(port), "--model", model, *flags]
