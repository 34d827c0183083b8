# SPDX-License-Identifier: Apache-2.0
"""`graftax.memory`: what a call needs, from XLA's analysis of the compiled program and the paths of its arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.core

from graftax._base.errors import GraftaxError
from graftax._graph.structure import Structure, place_name
from graftax._jax.tracebacks import boundary
from graftax._jit.api import jit
from graftax._jit.call_plan import RecordedCall
from graftax._jit.jitted import Jitted
from graftax._jit.leaf_names import output_names
from graftax._jit.out_of_memory import bytes_on_a_device
from graftax._jit.stage_info import flat_arguments
from graftax._jit.stages import Compiled, Staging
from graftax._memory.report import ArrayMemory, MemoryReport

NO_ANALYSIS = (
    "XLA has no memory analysis of {name} on {platform}. graftax.show(graftax.jit(f), *args) lists the bytes of the "
    "arguments and results."
)


@boundary
def memory(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> MemoryReport:
    """The memory that a call needs, in bytes: arguments, results, temporaries at the peak and the program itself.

    The function is compiled as a call would compile it; nothing runs or changes. The totals are XLA's own analysis; the
    arrays are listed by the key path of the object that holds them. With several devices, the numbers are for one.

    Args:
        function: any function, or one of `graftax.jit`, whose options (`donate=`, shardings) count.
        *args, **kwargs: the arguments of the call. `jax.ShapeDtypeStruct` may stand in place of arrays.

    Returns:
        a `MemoryReport`.

    Raises:
        GraftaxError: if the backend has no such analysis.

    Example:
        >>> def loss(model, x):
        ...     return (x @ model["w"]).sum()
        >>> report = graftax.memory(loss, {"w": jnp.ones((8, 4))}, jax.ShapeDtypeStruct((2, 8), "float32"))
        >>> report.argument_bytes, report.largest(1)[0].path
        (192, "model['w']")
    """
    jitted = cast("Jitted[..., Any]", function if isinstance(function, Jitted) else jit(function))
    compiled = jitted.lower(*args, **kwargs).compile()
    analysis = compiled.memory_analysis()
    name = compiled._staging.plan.name
    if analysis is None:
        raise GraftaxError(NO_ANALYSIS.format(name=name, platform=jax.default_backend()))
    # Whatever jit has found out about the function's reads is among the roots by now.
    arguments, repeated_bytes = _arguments(compiled, jitted._record_call(args, kwargs))
    results = _results(compiled)
    # XLA counts what lies in the memory of the host in fields of their own.
    host = [f"host_{kind}_size_in_bytes" for kind in ("argument", "output", "temp", "generated_code")]
    return MemoryReport(
        name=name,
        devices=_device_count(compiled),
        argument_bytes=analysis.argument_size_in_bytes - repeated_bytes,
        result_bytes=analysis.output_size_in_bytes,
        reused_bytes=analysis.alias_size_in_bytes,
        temporary_bytes=analysis.temp_size_in_bytes,
        code_bytes=analysis.generated_code_size_in_bytes,
        host_bytes=sum(getattr(analysis, field) for field in host) - analysis.host_alias_size_in_bytes,
        arguments=arguments,
        results=results,
        analysis=analysis,
    )


def _arguments(compiled: Compiled[..., Any], call: RecordedCall) -> tuple[tuple[ArrayMemory, ...], int]:
    """(a row for each array, the bytes that XLA counts again where one array is passed in several places)."""
    staging, stage = compiled._staging, compiled._stage
    infos = flat_arguments(staging, stage.args_info)
    shardings = flat_arguments(staging, stage.input_shardings)
    places = _leaf_places(staging)
    changes = {path for path, is_change in output_names(staging, stage) if is_change}
    rows: list[ArrayMemory] = []
    repeated_bytes = 0
    # One array in several places is one row, and XLA counts it once for each input of the program that it is. An input
    # that the program does not read has no sharding: JAX drops it, so XLA does not count it at all.
    for leaves in _leaves_by_array(call.recording.leaves):
        used = [i for i in leaves if shardings[i] is not None]
        info, sharding = infos[(used or leaves)[0]], shardings[(used or leaves)[0]]
        size = bytes_on_a_device(info, sharding)
        repeated_bytes += size * max(0, len(used) - 1)
        roots = [place for i in leaves for place in places[i]]
        paths = tuple(dict.fromkeys(path for _, path in roots))
        row = ArrayMemory(
            path=paths[0],
            kind="captured" if all(root >= call.arguments for root, _ in roots) else "argument",
            shape=tuple(info.shape),
            dtype=info.dtype,
            bytes=size,
            paths=paths,
            is_donated=any(infos[i].donated for i in leaves),
            is_written_back=not changes.isdisjoint(paths),
            is_unused=not used,
        )
        rows.append(row)
    return tuple(rows), repeated_bytes


def _leaf_places(staging: Staging) -> list[list[tuple[int, str]]]:
    """For each leaf its places, as (number of the root, path)."""
    structure = Structure(staging.graphdef)
    places: dict[int, list[tuple[int, str]]] = {}
    for row in structure.leaves:
        path = structure.root_path(row)
        places.setdefault(row.leaf, []).append((path[0], place_name(path, staging.names)))
    return [places[i] for i in range(len(places))]


def _leaves_by_array(leaves: Sequence[object]) -> list[list[int]]:
    """The numbers of the leaves, those that are one array together."""
    # A NumPy array is copied to the device for each of its places.
    groups: dict[int, list[int]] = {}
    for i, leaf in enumerate(leaves):
        is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
        groups.setdefault(id(leaf) if is_array else -1 - i, []).append(i)
    return list(groups.values())


def _results(compiled: Compiled[..., Any]) -> tuple[ArrayMemory, ...]:
    stage = compiled._stage
    rows: list[ArrayMemory] = []
    names = output_names(compiled._staging, stage)
    infos, shardings = _outputs(stage.out_info), _outputs(stage.output_shardings)
    for (path, is_change), info, sharding in zip(names, infos, shardings, strict=True):
        kind, size = "change" if is_change else "result", bytes_on_a_device(info, sharding)
        rows.append(ArrayMemory(path, kind, tuple(info.shape), info.dtype, size, (path,)))
    return tuple(rows)


def _outputs(flat: Any) -> list[Any]:
    results, written, _ = flat
    return [*results, *written]


def _device_count(compiled: Compiled[..., Any]) -> int:
    stage = compiled._stage
    shardings = [*flat_arguments(compiled._staging, stage.input_shardings), *_outputs(stage.output_shardings)]
    # Without any sharding nothing is read or returned, and one device runs it.
    return max((len(sharding.device_set) for sharding in shardings if sharding is not None), default=1)
