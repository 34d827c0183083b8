# SPDX-License-Identifier: Apache-2.0
"""The key of a program on disk: what it depends on besides the values that its code reads."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from graftax._export.programs import Token
from graftax._export.read_set_data import version_of
from graftax._export.structure_digest import code_digest
from graftax._jit.jitted import Jitted
from graftax._jit.multihost_comparison import compares_hosts

# What changes how XLA compiles.
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")


def environment(caller: Jitted[..., Any]) -> dict[str, Any]:
    """What a program depends on besides what its code reads: versions, devices, the function and its options."""
    devices = jax.devices()
    return {
        "code": code_digest(caller._function.__code__),
        "options": caller._options.of_program(),
        "python": platform.python_version(),
        **{package: version_of(package) for package in ("graftax", "jax", "jaxlib")},
        "devices": f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})",
        "platform": str(devices[0].client.platform_version),
        "processor": _processor(),
        "flags": " ".join(f"{name}={os.environ[name]}" for name in _FLAGS if name in os.environ),
        "several processes": compares_hosts(),
    }


@functools.cache
def _processor() -> str:
    """The instruction set of the host's processor, which compiled code relies on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        flags = platform.processor()
    return f"{platform.machine()} {hashlib.sha256(flags.encode()).hexdigest()[:12]}"


def short_digest(*parts: object) -> str:
    """A digest for the name of a file or folder."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def call_key(
    fingerprint: str,
    context: Any,
    settings: dict[str, str],
    tokens: Sequence[Token | None],
    number_leaves: Sequence[int] | None,
) -> tuple[str, str]:
    """What a program is for, besides the function and its read set: (the structure, arrays with settings of JAX).

    Args:
        fingerprint: of the structure.
        number_leaves: the leaves that are symbolic numbers; None if there are none.
    """
    # The arrays of a call with symbolic numbers are compared when the file is read.
    arrays = tokens if number_leaves is None else ("symbolic", *number_leaves)
    return short_digest(fingerprint), short_digest(context, sorted(settings.items()), tuple(arrays))


def folder_name(caller: Jitted[..., Any], environment: dict[str, Any]) -> str:
    """The name of a function's folder: the same for all versions up to the last part."""
    function = caller._function
    name = re.sub(r"\W", "_", caller._plan.name)[:40]
    identity = short_digest(function.__module__, function.__qualname__)
    return f"{name}-{identity}-{short_digest(sorted(environment.items()))}"
