# SPDX-License-Identifier: Apache-2.0
"""A part of a program as a script of plain JAX."""

from __future__ import annotations

import base64
import enum
import importlib
import math
import re
import zlib
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from graftax._jax.arrays import ref_types
from graftax._record.program_parts import Part, Step

_MOST_NUMBERS = 64  # that are written as numbers
_PUBLIC_MODULES = ("jax.lax", "jax.extend.core.primitives")  # where JAX has its primitives

_ARRAY = '''

def array(text, dtype, shape):
    """An array from its bytes, which are compressed."""
    return numpy.frombuffer(zlib.decompress(base64.b85decode(text)), dtype).reshape(shape)

'''
_END = """

arguments = [{arguments}]
{preamble}results = program(*arguments)
for number, result in enumerate(results):
    print(f"result {{number}}: {{result}}")
"""


class Unwritable(Exception):
    """A value that has no text."""


def script_of(part: Part, title: str, preamble: str, check: str, exported: bool) -> str:
    """The script.

    Args:
        title: what the script is, for people.
        preamble: its statements before the program runs.
        check: its statements after that.
        exported: the equations become a program of `jax.export`, and not a text.

    Raises:
        Unwritable: for an equation that has no text.
    """
    if any(isinstance(x, ref_types) for x in part.arguments()):
        raise Unwritable("a Ref has no text")
    names = {number: f"x{i}" for i, number in enumerate(part.inputs)}
    inputs = "".join(f"{names[number]} = {array_text(part.values[number])}\n" for number in part.inputs)
    body = _exported(part) if exported else _equations(part, names)
    text = inputs + "\n" + body + _END.format(arguments=", ".join(names.values()), preamble=preamble) + check
    # The helper is written only where it is used. `numpy.array(` does not count.
    if re.search(r"[ (]array\(", text):
        text = _ARRAY + "\n" + text
    if jax.config.jax_enable_x64:
        text = 'jax.config.update("jax_enable_x64", True)\n' + text
    modules = ("base64", "faulthandler", "zlib", "jax", "jax.export", "jax.extend.core.primitives", "numpy")
    imports = [f"import {name}" for name in modules if f"{name}." in text]
    # The title becomes a docstring: nothing in it may end that, or begin an escape.
    quoted = title.replace('"""', "'''").replace("\\", "/")
    return f'"""{quoted}"""\n\n' + "\n".join(imports) + "\n\n" + text


def _equations(part: Part, names: dict[int, str]) -> str:
    lines = [f"\n@jax.jit\ndef program({', '.join(names.values())}):"]
    names = dict(names)
    for step in part.steps:
        outputs = [names.setdefault(number, f"x{len(names)}") for number in step.outputs]
        target = ", ".join(outputs) + ("," if step.equation.primitive.multiple_results and len(outputs) == 1 else "")
        lines.append(f"    {target} = {_call_text(step, [names[number] for number in step.operands])}")
    results = ", ".join(names[number] for number in part.outputs)
    return "\n".join([*lines, f"    return [{results}]"]) + "\n"


def _call_text(step: Step, operands: Sequence[str]) -> str:
    primitive = step.equation.primitive
    name = f"{primitive.name}_p"
    # By identity: another primitive may have the same name.
    public = ((module, getattr(importlib.import_module(module), name, None)) for module in _PUBLIC_MODULES)
    module = next((module for module, candidate in public if candidate is primitive), None)
    if module is None:
        raise Unwritable(f"{primitive.name} has no public name in JAX")
    params = [f"{key}={_text(value)}" for key, value in step.equation.params.items()]
    return f"{module}.{name}.bind({', '.join([*operands, *params])})"


def _text(value: object) -> str:
    """A value as the text of Python."""
    if value is None or (isinstance(value, (bool, int, str)) and not isinstance(value, enum.Enum)):
        return repr(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else f"float({str(value)!r})"
    if isinstance(value, np.dtype):
        return f"numpy.dtype({cast('np.dtype[Any]', value).name!r})"
    cls: Any = type(value)
    # Parameters of classes that JAX makes public, such as `GatherDimensionNumbers`.
    if getattr(jax.lax, cls.__name__, None) is cls:
        if isinstance(value, enum.Enum):
            return f"jax.lax.{cls.__name__}.{value.name}"
        fields = getattr(cls, "_fields", None) or getattr(cls, "__dataclass_fields__", ())
        return f"jax.lax.{cls.__name__}({', '.join(f'{name}={_text(getattr(value, name))}' for name in fields)})"
    if cls in (tuple, list):
        items = [_text(item) for item in cast("list[Any]", value)]
        return f"[{', '.join(items)}]" if cls is list else f"({', '.join(items)}{',' * (len(items) == 1)})"
    raise Unwritable(f"a {cls.__qualname__} has no text")


def array_text(value: Any) -> str:
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        implementation = str(jax.random.key_impl(value))
        return f"jax.random.wrap_key_data({array_text(jax.random.key_data(value))}, impl={implementation!r})"
    # `ascontiguousarray` gives a scalar a dimension.
    host = np.ascontiguousarray(np.asarray(value)).reshape(np.shape(value))
    # NumPy knows bfloat16 and the like as types of another package, of kind "V": JAX has them by name.
    dtype = f"jax.numpy.{host.dtype.name}" if host.dtype.kind == "V" else f"numpy.{host.dtype.name}"
    dtype = {"numpy.bool": "bool"}.get(dtype, dtype)
    if host.size <= _MOST_NUMBERS and host.dtype.kind in "fiub" and np.isfinite(host).all():
        return f"numpy.array({host.tolist()!r}, {dtype})"
    text = base64.b85encode(zlib.compress(host.tobytes(), 9)).decode()
    return f"array({text!r}, {dtype}, {host.shape})"


def _exported(part: Part) -> str:
    """The part as a program of StableHLO, for equations that no public function of JAX has."""
    shapes = [jax.ShapeDtypeStruct(np.shape(x), x.dtype) for x in part.arguments()]
    try:
        targets = [step.equation.params.get("target_name") for step in part.steps]
        # jax.export refuses custom calls whose form may change with the version; this script is for the present one.
        calls = [jax.export.DisabledSafetyCheck.custom_call(name) for name in targets if isinstance(name, str)]
        exported = jax.export.export(jax.jit(part.function()), disabled_checks=calls)(*shapes).serialize()
    except Exception as error:
        raise Unwritable(str(error).partition("\n")[0]) from error
    text = base64.b85encode(zlib.compress(bytes(exported), 9)).decode()
    jaxpr = str(jax.make_jaxpr(part.function())(*part.arguments()))
    comment = "\n".join(f"# {line}" for line in jaxpr.splitlines())
    return (
        f"\n{comment}\nprogram = jax.export.deserialize(bytearray(zlib.decompress(base64.b85decode({text!r})))).call\n"
    )
