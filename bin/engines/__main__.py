"""Install engines: `python -m bin.engines llamacpp gemma vllm` (any of them)."""

from __future__ import annotations

import argparse
import sys

from bin.engines.environment import EngineError
from bin.engines.llamacpp import LlamaCpp
from bin.engines.vllm import Vllm


def main(argv: list[str]) -> int:
    """Install what `argv` names; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bin.engines", description="Install engines into .cache/."
    )
    parser.add_argument(
        "engines",
        nargs="+",
        choices=["llamacpp", "gemma", "vllm"],
        help="llamacpp: llama.cpp's server and the tiny random model (0.3 GB); gemma: also a real 270M model "
        "(0.5 GB); vllm: vLLM for the CPU (3.4 GB, some minutes)",
    )
    wanted = parser.parse_args(argv).engines
    try:
        if "llamacpp" in wanted or "gemma" in wanted:
            LlamaCpp().install(gemma="gemma" in wanted)
        if "vllm" in wanted:
            Vllm().install()
    except EngineError as error:
        print(f"engines: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
