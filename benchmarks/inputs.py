# SPDX-License-Identifier: Apache-2.0
"""What is measured on: object graphs of tiny arrays, built from a list of arrays.

A `Form` says how arrays become one kind of object graph and how they come out again, in the same order.
A `Case` is a form with a number of arrays. Values are small whole numbers: sums are exact in any order.
"""

import functools
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Arrays = Sequence[Any]


@dataclass(frozen=True)
class Form:
    """One kind of object graph.

    `arrays` reads the distinct arrays in the order that `build` takes them, `probe` reads one at once,
    `assign` puts new arrays into an existing object (None where the object cannot be changed).
    """

    name: str
    build: Callable[[Arrays], Any]
    arrays: Callable[[Any], list[Any]]
    probe: Callable[[Any], Any]
    assign: Callable[[Any, Arrays], None] | None = None
    library: str | None = None
    # JAX has these in its registry, so `jax.jit` takes them as they are.
    registered: bool = True


@dataclass(frozen=True)
class Case:
    """A form of a given size. `template` gives the shapes where they are not all `float32[4]`."""

    name: str
    form: Form
    size: int
    template: Callable[[], list[np.ndarray[Any, Any]]] | None = field(default=None, repr=False)

    def values(self) -> list[np.ndarray[Any, Any]]:
        """The arrays on the host: the reference that every result is checked against."""
        if self.template is not None:
            return self.template()
        return [np.full(4, i % 7, np.float32) for i in range(self.size)]

    def arrays(self) -> list[jax.Array]:
        return jax.device_put(self.values())

    def missing(self) -> str | None:
        """The library that this form needs and that is not installed."""
        library = self.form.library
        return library if library and importlib.util.find_spec(library) is None else None


def _tree_sum(arrays: list[Any]) -> Any:
    # A balanced tree: a chain of 2000 additions compiles ten times longer and runs no faster.
    while len(arrays) > 1:
        odd = arrays[len(arrays) // 2 * 2 :]
        arrays = [a + b for a, b in zip(arrays[::2], arrays[1::2], strict=False)] + odd
    return arrays[0]


def total(arrays: Arrays) -> Any:
    """The sum of every element as one scalar. Arrays of one shape are added first, for a small program."""
    groups: dict[Any, list[Any]] = {}
    for x in arrays:
        groups.setdefault((x.shape, str(x.dtype)), []).append(x)
    sums = [_tree_sum(g).sum().astype(jnp.float32) for g in groups.values()]
    return _tree_sum(sums)


def bumped(arrays: Arrays) -> list[Any]:
    """Every array plus one."""
    return [x + 1 for x in arrays]


# ---- one array ----

ONE = Form("array", build=lambda a: a[0], arrays=lambda o: [o], probe=lambda o: o)

# ---- wide: list, dict, modules ----


def _assign_list(obj: list[Any], new: Arrays) -> None:
    obj[:] = new


# Sorted by name they keep their order, which is how JAX visits a dict.
_NAMES = tuple(f"x{i:05}" for i in range(100_000))


def _build_dict(arrays: Arrays) -> dict[str, Any]:
    return dict(zip(_NAMES, arrays, strict=False))


def _dict_arrays(obj: dict[str, Any]) -> list[Any]:
    return [obj[name] for name in _NAMES[: len(obj)]]


def _assign_dict(obj: dict[str, Any], new: Arrays) -> None:
    obj.update(zip(_NAMES, new, strict=False))


LIST = Form("list", build=list, arrays=list, probe=lambda o: o[-1], assign=_assign_list)
DICT = Form(
    "dict",
    build=_build_dict,
    arrays=_dict_arrays,
    probe=lambda o: o[_NAMES[0]],
    assign=_assign_dict,
)


# Modules hold their arrays in layers of one `weight`, one `bias` and one static `name`;
# an odd array is a layer without bias.


def _pairs(arrays: Arrays) -> list[tuple[Any, Any]]:
    return [(arrays[i], arrays[i + 1] if i + 1 < len(arrays) else None) for i in range(0, len(arrays), 2)]


def _layer_arrays(obj: Any) -> list[Any]:
    flat = [x for layer in obj.layers for x in (layer.weight, layer.bias)]
    return flat if flat[-1] is not None else flat[:-1]


def _assign_layers(obj: Any, new: Arrays) -> None:
    for layer, (weight, bias) in zip(obj.layers, _pairs(new), strict=True):
        layer.weight = weight
        layer.bias = bias


def _first_weight(obj: Any) -> Any:
    return obj.layers[0].weight


class Layer:
    """A plain class that no registry knows."""

    def __init__(self, weight: Any, bias: Any) -> None:
        self.weight = weight
        self.bias = bias
        self.name = "layer"


class Model:
    """A plain class over a list of layers."""

    def __init__(self, layers: list[Layer]) -> None:
        self.layers = layers


OBJECT = Form(
    "object",
    build=lambda a: Model([Layer(w, b) for w, b in _pairs(a)]),
    arrays=_layer_arrays,
    probe=_first_weight,
    assign=_assign_layers,
    registered=False,
)


@functools.cache
def _equinox_classes() -> tuple[Any, Any]:
    import equinox as eqx

    global EquinoxLayer, EquinoxModel  # in their module, as a program's own classes are

    class EquinoxLayer(eqx.Module):
        weight: Any
        bias: Any
        name: str = eqx.field(static=True)

    class EquinoxModel(eqx.Module):
        layers: list[Any]

    return EquinoxModel, EquinoxLayer


def _build_equinox(arrays: Arrays) -> Any:
    model, layer = _equinox_classes()
    return model([layer(w, b, "layer") for w, b in _pairs(arrays)])


def _first_weight_of_equinox(obj: Any) -> Any:
    # Without Equinox's own __getattribute__, which is Python: a call of a small module would be measured by it.
    read = object.__getattribute__
    return read(read(obj, "layers")[0], "weight")


EQUINOX = Form(
    "eqx.Module", build=_build_equinox, arrays=_layer_arrays, probe=_first_weight_of_equinox, library="equinox"
)


@functools.cache
def _nnx_classes() -> tuple[Any, Any]:
    from flax import nnx

    global NnxLayer, NnxModel

    class NnxLayer(nnx.Module):
        def __init__(self, weight: Any, bias: Any) -> None:
            self.weight = nnx.Param(weight)
            if bias is not None:
                self.bias = nnx.Param(bias)
            self.name = "layer"

    class NnxModel(nnx.Module):
        def __init__(self, layers: list[Any]) -> None:
            self.layers = nnx.List(layers)

    return NnxModel, NnxLayer


def _build_nnx(arrays: Arrays) -> Any:
    model, layer = _nnx_classes()
    return model([layer(w, b) for w, b in _pairs(arrays)])


def _variables(obj: Any) -> list[Any]:
    return [v for layer in obj.layers for v in (layer.weight, getattr(layer, "bias", None)) if v is not None]


def _assign_nnx(obj: Any, new: Arrays) -> None:
    for variable, x in zip(_variables(obj), new, strict=True):
        variable.set_value(x)


NNX = Form(
    "nnx.Module",
    build=_build_nnx,
    arrays=lambda o: [v.get_value() for v in _variables(o)],
    probe=lambda o: o.layers[0].weight.get_value(),
    assign=_assign_nnx,
    library="flax",
)


@functools.cache
def _brainstate_classes() -> tuple[Any, Any]:
    import brainstate as bst

    global BrainLayer, BrainModel

    class BrainLayer(bst.nn.Module):
        def __init__(self, weight: Any, bias: Any) -> None:
            super().__init__(name="layer")
            self.weight = bst.ParamState(weight)
            if bias is not None:
                self.bias = bst.ParamState(bias)

    class BrainModel(bst.nn.Module):
        def __init__(self, layers: list[Any]) -> None:
            super().__init__()
            self.layers = layers

    return BrainModel, BrainLayer


def _build_brainstate(arrays: Arrays) -> Any:
    model, layer = _brainstate_classes()
    return model([layer(w, b) for w, b in _pairs(arrays)])


def _assign_states(obj: Any, new: Arrays) -> None:
    for state, x in zip(_variables(obj), new, strict=True):
        state.value = x


BRAINSTATE = Form(
    "brainstate.nn.Module",
    build=_build_brainstate,
    arrays=lambda o: [state.value for state in _variables(o)],
    probe=lambda o: o.layers[0].weight.value,
    assign=_assign_states,
    library="brainstate",
    registered=False,
)


@functools.cache
def _flarejax_classes() -> tuple[Any, Any]:
    import flarejax as flr

    global FlareLayer, FlareModel

    class FlareLayer(flr.Module):
        def __init__(self, weight: Any, bias: Any) -> None:
            self.weight = weight
            self.bias = bias
            self.name = "layer"

    class FlareModel(flr.Module):
        def __init__(self, layers: list[Any]) -> None:
            self.layers = layers

    return FlareModel, FlareLayer


def _build_flarejax(arrays: Arrays) -> Any:
    model, layer = _flarejax_classes()
    return model([layer(w, b) for w, b in _pairs(arrays)])


FLAREJAX = Form(
    "flarejax.Module",
    build=_build_flarejax,
    arrays=_layer_arrays,
    probe=_first_weight,
    assign=_assign_layers,
    library="flarejax",
)

# ---- deep: every dict holds one array and the next dict ----


def _build_deep(arrays: Arrays) -> dict[str, Any]:
    obj: dict[str, Any] = {}
    for x in reversed(arrays):
        obj = {"next": obj, "x": x}
    return obj


def _deep_nodes(obj: dict[str, Any]) -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = []
    while obj:
        nodes.append(obj)
        obj = obj["next"]
    return nodes


def _assign_deep(obj: dict[str, Any], new: Arrays) -> None:
    for node, x in zip(_deep_nodes(obj), new, strict=True):
        node["x"] = x


DEEP = Form(
    "deep dict",
    build=_build_deep,
    arrays=lambda o: [node["x"] for node in _deep_nodes(o)],
    probe=lambda o: o["x"],
    assign=_assign_deep,
)

# ---- shared: ten dicts, each met ten times ----

_BLOCKS = 10


def _build_shared(arrays: Arrays) -> list[dict[str, Any]]:
    step = len(arrays) // _BLOCKS
    blocks = [_build_dict(arrays[i * step : (i + 1) * step]) for i in range(_BLOCKS)]
    return blocks * 10


SHARED = Form(
    "shared dicts",
    build=_build_shared,
    arrays=lambda o: [x for block in o[:_BLOCKS] for x in _dict_arrays(block)],
    probe=lambda o: o[0][_NAMES[0]],
)

# ---- tied: one layer in a hundred places ----

_PLACES = 100


def _assign_tied(obj: list[dict[str, Any]], new: Arrays) -> None:
    _assign_dict(obj[0], new)


TIED = Form(
    "tied layer",
    build=lambda a: [_build_dict(a)] * _PLACES,
    arrays=lambda o: _dict_arrays(o[0]),
    probe=lambda o: o[0][_NAMES[0]],
    assign=_assign_tied,
)

# ---- many small leaves: blocks of forty ----

_BLOCK_SIZE = 40


def _build_blocks(arrays: Arrays) -> dict[str, dict[str, Any]]:
    starts = range(0, len(arrays), _BLOCK_SIZE)
    return {f"b{n:04}": _build_dict(arrays[i : i + _BLOCK_SIZE]) for n, i in enumerate(starts)}


def _assign_blocks(obj: dict[str, dict[str, Any]], new: Arrays) -> None:
    for name, i in zip(sorted(obj), range(0, len(new), _BLOCK_SIZE), strict=True):
        _assign_dict(obj[name], new[i : i + _BLOCK_SIZE])


BLOCKS = Form(
    "dict of dicts",
    build=_build_blocks,
    arrays=lambda o: [x for name in sorted(o) for x in _dict_arrays(o[name])],
    probe=lambda o: o["b0000"][_NAMES[0]],
    assign=_assign_blocks,
)
