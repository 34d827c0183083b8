# SPDX-License-Identifier: Apache-2.0
"""What the numbers were measured with: they mean nothing without it."""

import importlib.metadata
import importlib.util
import os
import platform
from pathlib import Path

import jax

_DISTRIBUTIONS = ("graftax", "jax", "jaxlib", "numpy", "equinox", "flax", "flarejax", "optax", "optree", "jarp")


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Interpreter, machine, device and every library, as printed above each table and kept in its JSON."""
    found = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "device": f"{jax.default_backend()} ({jax.devices()[0].device_kind})",
    }
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            # Importable without metadata: built in a checkout that is on the path.
            found[name] = "absent" if importlib.util.find_spec(name) is None else "from a checkout"
    return found
