"""llama.cpp's server as a process, from the `xllamacpp` wheel: takes llama-server's own flags.

usage: llama_server.py --model FILE.gguf --host 127.0.0.1 --port 8080 [any llama-server flag]

The wheel links llama.cpp's server and its argument parser into one library and ships no executable. This
program hands its command line to llama.cpp's `common_params_parse(..., LLAMA_EXAMPLE_SERVER)`, so every flag,
LLAMA_ARG_* variable, `--help` and parse error is llama-server's own, and then starts the wheel's server
object, which registers llama-server's HTTP routes.

The parser wants a `common_params&`, which `xllamacpp.CommonParams` holds right behind its object header. That
is checked before it is relied upon; the number of LLAMA_EXAMPLE_SERVER and the symbol are those of the
version pinned in llamacpp.py. llama-server's router mode (no `--model`) is not in the wheel.

Runs in the environment of llama.cpp.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys
import threading
from collections.abc import Sequence

import xllamacpp

PARSE_SYMBOL = "_Z19common_params_parseiPPcR13common_params13llama_examplePFviS0_E"
LLAMA_EXAMPLE_SERVER = 12
OBJECT_HEADER_BYTES = object.__basicsize__


def parse(argv: Sequence[str]) -> xllamacpp.CommonParams:
    """Let llama.cpp parse `argv`; ends the process with llama.cpp's message if that fails."""
    params = xllamacpp.CommonParams()
    address = id(params) + OBJECT_HEADER_BYTES
    first_fields = struct.unpack("4i", ctypes.string_at(address, 16))
    if first_fields != (params.n_predict, params.n_ctx, params.n_batch, params.n_ubatch):
        sys.exit("llama_server.py: unknown layout of xllamacpp.CommonParams; install the pinned version")
    params.port = 8080  # llama-server's default; the wheel's own is 0, any free port
    parse_arguments = getattr(ctypes.CDLL(xllamacpp.xllamacpp.__file__), PARSE_SYMBOL)
    parse_arguments.restype = ctypes.c_bool
    words = [b"llama-server", *map(os.fsencode, argv)]
    array = (ctypes.c_char_p * (len(words) + 1))(*words, None)
    if not parse_arguments(len(words), array, ctypes.c_void_p(address), LLAMA_EXAMPLE_SERVER, None):
        sys.exit(1)
    return params


def main(argv: Sequence[str]) -> None:
    """Serve until SIGINT or SIGTERM."""
    params = parse(argv)
    if not params.model.path:
        sys.exit("llama_server.py: --model is needed")
    if params.n_parallel < 0:  # as llama-server does: four slots over one cache
        params.n_parallel, params.kv_unified = 4, True

    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    servers: list[xllamacpp.Server] = []
    failures: list[str] = []

    def load() -> None:
        try:
            servers.append(xllamacpp.Server(params))
        except Exception as error:
            failures.append(str(error))
            stop.set()

    # The constructor loads the model, which takes seconds; a thread keeps signals answered meanwhile.
    threading.Thread(target=load, daemon=True).start()
    stop.wait()
    for failure in failures:
        print(f"llama_server.py: {failure}", file=sys.stderr)
    sys.stderr.flush()
    # NOTE: the server's destructor may wait for open streams, and llama-server does not; so no clean-up.
    os._exit(1 if failures else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
