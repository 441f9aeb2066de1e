"""Certificates for tests."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True, slots=True)
class Certificate:
    """A self-signed certificate; trust it as its own authority."""

    cert: Path
    key: Path


def self_signed(directory: Path, names: str = "IP:127.0.0.1,IP:::1,DNS:localhost") -> Certificate:
    """Make a certificate for `names` with the `openssl` program; skips the test where there is none."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl program to make a certificate")
    directory.mkdir(exist_ok=True)
    made = Certificate(directory / "cert.pem", directory / "key.pem")
    names = f"subjectAltName={names}"
    curve = "ec_paramgen_curve:prime256v1"
    command = f"req -x509 -newkey ec -pkeyopt {curve} -nodes -days 2 -subj /CN=sim -addext {names}"
    subprocess.run(
        ["openssl", *command.split(), "-keyout", str(made.key), "-out", str(made.cert)],
        check=True,
        capture_output=True,
    )
    return made
