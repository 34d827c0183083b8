# SPDX-License-Identifier: Apache-2.0
"""Private names of JAX that several packages need, and what differs between its versions.

The other modules of this package have those that one task alone needs: direct calls, tracers, tracebacks, messages.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import importlib
import inspect
import logging
import operator
import re
import sys
import threading
import traceback
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import jax
import jax.core
import jax.extend.core
import jax.monitoring
import numpy as np
from jax._src import config as _config
from jax._src import core as _jax_core
from jax._src import dtypes as _dtypes
from jax._src import pjit as _pjit
from jax._src import source_info_util as _source_info_util
from jax._src import traceback_util as _traceback_util
from jax._src import tree_util as _tree_util
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import partial_eval as _pe
from jax._src.lax import lax as _lax
from jax.tree_util import FlattenedIndexKey, PyTreeDef, default_registry

from graftax import _core

_FOLDER = str(Path(jax.__file__).parent)
ClosedOver: type[Exception] = getattr(
    _ad, "CustomVJPException", Exception
)  # raised for values that a custom_vjp captures

own_jit = jax.jit  # whatever a program or a test puts in its place later

lacking: dict[str, str] = {}  # feature that is off: the missing private name of JAX; shown by the doctor

try:
    from jax._src.array import ArrayImpl
except ImportError:  # asks JAX for an array, which starts its backend
    ArrayImpl: type = type(jax.numpy.zeros(()))  # pyright: ignore[reportUnknownMemberType, reportConstantRedefinition]
    lacking["import without a device"] = "jax._src.array.ArrayImpl"


def array_class() -> type:
    """The concrete class behind `jax.Array`: its instances are recognised by one pointer comparison."""
    return ArrayImpl


@functools.cache
def key_class() -> type:
    """The class of arrays of typed PRNG keys. JAX 0.10 moved it; the old place goes with JAX 0.9."""
    for module in ("jax._src.random.prng", "jax._src.prng"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(module).PRNGKeyArray
    raise ImportError("this JAX has no PRNGKeyArray where it is known")


def register_symbols(classes: dict[type, type], scalars: tuple[type, ...], array: Any) -> None:
    """Registers classes of symbolic numbers with JAX, as Python numbers (`classes`) or NumPy scalars (`scalars`).

    `array(symbol)` gives the array of one. `jax.export` registers symbolic dimensions so; there is no public way.
    """
    needed = ("canonicalize_value_handlers", "python_scalar_types", "python_scalar_types_to_dtypes")
    names_needed = [
        (_jax_core, "pytype_aval_mappings"),
        *((_dtypes, n) for n in (*needed, "register_weak_scalar_type")),
    ]
    if missing := [f"{module.__name__}.{name}" for module, name in names_needed if not hasattr(module, name)]:
        lacking["symbolic numbers"] = ", ".join(missing)
        return
    for cls, number_type in classes.items():
        _jax_core.pytype_aval_mappings[cls] = functools.partial(_aval_of_number, number_type)
        _dtypes.canonicalize_value_handlers[cls] = array
        _dtypes.python_scalar_types.add(cls)
        _dtypes.python_scalar_types_to_dtypes[cls] = _dtypes.python_scalar_types_to_dtypes[number_type]
        _dtypes.register_weak_scalar_type(cls)
    for cls in scalars:
        _jax_core.pytype_aval_mappings[cls] = lambda symbol: jax.typeof(symbol.dtype.type())
        _dtypes.canonicalize_value_handlers[cls] = array


def lacks_symbols() -> bool:
    """Does this JAX lack a private name that `register_symbols` needs?"""
    return "symbolic numbers" in lacking


def _aval_of_number(number_type: type, symbol: Any) -> Any:
    return _jax_core.pytype_aval_mappings[number_type](number_type())


def reads_exponent(frame: types.FrameType) -> bool:
    """Does this frame of JAX read the value of an exponent? Each integer exponent is another program."""
    return frame.f_code.co_name in ("power", "_operator_pow") and _is_of_jax(frame)


def only_checks_dtype(frame: types.FrameType | None) -> bool:
    """Does this frame of JAX convert a Python number only to check whether it fits a dtype?"""
    for name in ("coerce_to_array", "array"):
        if frame is None or frame.f_code.co_name != name or not _is_of_jax(frame):
            return False
        frame = frame.f_back
    return True


def wanted_dtype(frame: types.FrameType) -> tuple[Any, bool] | None:
    """(the dtype, whether an integer has to fit it) where this frame of JAX makes an array of a number."""
    in_list = frame.f_code.co_name == "<listcomp>" and frame.f_back is not None
    frame = frame.f_back if in_list and frame.f_back is not None else frame
    name = {"_convert_element_type": "new_dtype", "array": "dtype"}.get(frame.f_code.co_name)
    dtype: Any = frame.f_locals.get(name) if name is not None and _is_of_jax(frame) else None
    return (dtype, name == "dtype") if isinstance(dtype, np.dtype) else None


def makes_seed(frame: types.FrameType) -> bool:
    """Does this frame of JAX make the seed of a PRNG key?"""
    return frame.f_code.co_name == "random_seed" and _is_of_jax(frame)


def tries_static_slice(frame: types.FrameType) -> bool:
    """Does this frame of JAX read an index only to see whether it is static? It also supports indices that are not."""
    of_slice = frame.f_back is not None and frame.f_back.f_code.co_name == "to_static_slice"
    return of_slice and frame.f_code.co_name == "validate_static_indices" and _is_of_jax(frame)


def _is_of_jax(frame: types.FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_FOLDER)


def weak_scalar(vector: Any, index: int) -> Any:
    """One element, with the weak type of a Python number. There is no public function for that."""
    return _lax._convert_element_type(jax.lax.index_in_dim(vector, index, keepdims=False), weak_type=True)


def in_same_trace(x: Any, tracer: Any) -> bool:
    """Do both belong to one trace? Equinox omits the tangents of other values. There is no public way to ask."""
    trace = getattr(tracer, "_trace", None)
    return trace is not None and getattr(x, "_trace", None) is trace


def is_registered_static(cls: type) -> bool:
    """Was the class given to `jax.tree_util.register_static`? Nothing public tells without a call of its flatten."""
    entry = getattr(_tree_util, "_registry", {}).get(cls)
    name = getattr(getattr(entry, "from_iter", None), "__qualname__", "")
    return "register_static.<locals>" in name


def varying_axes(x: Any) -> frozenset[Any]:
    """The mesh axes along which a value inside `jax.shard_map` differs. JAX 0.10 moved it: `vma` goes with 0.9."""
    aval: Any = jax.typeof(x)
    return frozenset(aval.vma if hasattr(aval, "vma") else aval.mat.varying)


def is_dimension(cls: type) -> bool:
    """The class of what `jax.export.symbolic_shape` makes, and of expressions of that? It is private."""
    return cls.__module__.endswith("export.shape_poly")


# NumPy arrays that know their JAX type, as which JAX 0.9 and later return derivatives by integers.
typed_array_types: tuple[type, ...] = ()
with contextlib.suppress(ImportError, AttributeError):
    typed_array_types = (importlib.import_module("jax._src.literals").TypedNdArray,)

# `jax.shard_map` infers specs where it is given this; its repr says jax.sharding.Infer, where no version has it yet.
inferred_specs: Any = inspect.signature(jax.shard_map).parameters["in_specs"].default


# The mutable array, under the name that this version has (`jax.Ref` is public from JAX 0.9 on).
def new_ref(content: Any) -> Any:
    """A jax.Ref with this content; itself where it is one, or stands for an array."""
    return jax.new_ref(content) if isinstance(content, jax.Array) else content


ref_types: tuple[type, ...] = tuple(t for t in (getattr(jax, "Ref", None),) if isinstance(t, type))

# JAX 0.12 shortened the name; the old one goes with JAX 0.11.
treedef_of_node: Any = getattr(PyTreeDef, "from_node_data_and_children", None) or getattr(
    PyTreeDef, "make_from_node_data_and_children", None
)


def tree_registry() -> Any:
    """JAX's dict from registered types to their functions: its size tells when another type was registered."""
    registry = getattr(_tree_util, "_registry", None)
    return registry if isinstance(registry, dict) else None


def is_tree_node(cls: type) -> bool:
    """Does JAX open values of this type? `jax.tree_util.is_tree_node` goes in front from JAX 0.10 on."""
    query: Any = getattr(_tree_util, "is_tree_node", None)
    if query is not None:
        return query(cls)
    registry = tree_registry()
    builtin = (type(None), list, tuple, dict, OrderedDict, defaultdict)
    return cls in (registry or builtin) or cls in builtin or (issubclass(cls, tuple) and hasattr(cls, "_fields"))


def tree_functions(cls: type) -> tuple[Any, Any] | None:
    """(flatten, unflatten) as registered with JAX; None for its own containers, or where they cannot be read."""
    entry = (tree_registry() or {}).get(cls)
    flatten, unflatten = getattr(entry, "to_iter", None), getattr(entry, "from_iter", None)
    return None if flatten is None or unflatten is None else (flatten, unflatten)


def data_fields(flatten: Any) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """(data fields, meta fields) of a class given to `jax.tree_util.register_dataclass`, by its flatten function."""
    if "register_dataclass.<locals>" not in getattr(flatten, "__qualname__", ""):
        return None
    cells = dict(zip(flatten.__code__.co_freevars, flatten.__closure__ or (), strict=True))
    if set(cells) != {"data_fields", "meta_fields"}:
        return None
    return tuple(cells["data_fields"].cell_contents), tuple(cells["meta_fields"].cell_contents)


# (pairs (key path entry, child), aux data) of a registered node. Public from JAX 0.11 on.
one_level_with_keys: Any = getattr(default_registry, "flatten_one_level_with_keys", None)


def names_function(flatten: Any) -> Any:
    """The function that `jax.tree_util.register_pytree_with_keys` was given, where it made `flatten` of it; or None."""
    if not getattr(flatten, "__qualname__", "").endswith("register_pytree_with_keys.<locals>.flatten_func_impl"):
        return None
    cells = dict(zip(flatten.__code__.co_freevars, flatten.__closure__ or (), strict=True))
    return cells["flatten_with_keys"].cell_contents if set(cells) == {"flatten_with_keys"} else None


def open_first(flatten: Any, tree: Any) -> tuple[Any, Any]:
    """What `one_level_with_keys` says of a node, and who names the children of its class.

    What else was registered with `flatten` cannot be read. So it is seen here what JAX calls: where that is `flatten`,
    nobody names them and JAX numbers them (False); where it is the method that `register_pytree_with_keys_class` takes,
    that one. Otherwise JAX has to be asked for each object (True). None: this one tells nothing.
    """
    entered: list[types.CodeType] = []

    def note(frame: types.FrameType, event: str, arg: Any) -> None:  # unmeasured: in an event
        if event == "call":
            sys.setprofile(None)
            entered.append(frame.f_code)

    if sys.getprofile() is not None:  # a profiler of the user's runs
        return one_level_with_keys(tree), None
    sys.setprofile(note)
    try:
        opened = one_level_with_keys(tree)
    finally:
        sys.setprofile(None)
    method = operator.methodcaller("tree_flatten_with_keys")
    if type(flatten) is operator.methodcaller and entered == [_code_of(method, type(tree))]:
        return opened, method
    if entered != [_code_of(flatten, type(tree))]:
        return opened, True
    pairs = tuple(opened[0])
    numbered = [type(key) is FlattenedIndexKey and key.key == i for i, (key, _) in enumerate(pairs)]
    return (pairs, opened[1]), not all(numbered) if numbered else None


def _code_of(function: Any, cls: type) -> types.CodeType | None:
    """Which code runs first when `function` is called with an instance of `cls`; None where that is not known."""
    if type(function) is operator.methodcaller:
        arguments = function.__reduce__()[1]
        function = inspect.getattr_static(cls, arguments[0], None) if len(arguments) == 1 else None
    return function.__code__ if isinstance(function, types.FunctionType) else None


def flatten_one_level(tree: Any) -> tuple[Any, Any]:
    """(children, aux data) of a node, as JAX has them. Public in `jax.tree_util` from JAX 0.11 on.

    Raises:
        ValueError: if `tree` is a leaf.
    """
    return _one_level("flatten_one_level", tree)


def flatten_one_level_with_keys(tree: Any) -> tuple[Any, Any]:
    """(pairs (key path entry, child), aux data) of a node. Public in `jax.tree_util` from JAX 0.11 on.

    Raises:
        ValueError: if `tree` is a leaf.
    """
    return _one_level("flatten_one_level_with_keys", tree)


def _one_level(name: str, tree: Any) -> tuple[Any, Any]:
    opened = getattr(default_registry, name)(tree)
    if opened is None:
        raise ValueError(f"a leaf has no children: {type(tree).__qualname__}")
    return opened


def equations() -> list[Any]:
    """The equations of the current trace so far. There is no public way to ask.

    JAX holds equations without effects weakly; 0.8 has the others behind a function of no arguments.
    """
    trace: Any = current_trace()
    while trace is not None and not hasattr(trace, "frame"):
        trace = getattr(trace, "parent_trace", None)
    return getattr(getattr(trace, "frame", None), "tracing_eqns", [])


def is_jaxpr(value: Any) -> bool:
    """Is it a Jaxpr, closed or not? JAX 0.12 has one class for both."""
    return isinstance(value, (jax.extend.core.Jaxpr, jax.extend.core.ClosedJaxpr))  # pyright: ignore[reportPrivateImportUsage]


def without_constants(jaxpr: Any) -> Any:
    """A closed Jaxpr without its constants: until JAX 0.11 what it is made of."""
    return jaxpr.with_consts(()) if hasattr(jaxpr, "with_consts") else jaxpr.jaxpr


def with_constants(cls: Any, bare: Any, constants: tuple[Any, ...]) -> Any:
    """A Jaxpr of this class, of what `without_constants` returned and these constants."""
    return bare.with_consts(constants) if hasattr(bare, "with_consts") else cls(bare, constants)


def holds_tracers(jaxpr: Any) -> bool:
    """Does a Jaxpr inside of this one have a tracer among its constants?"""
    todo = list(jaxpr.eqns)
    while todo:
        for value in todo.pop().params.values():
            for part in value if isinstance(value, list | tuple) else (value,):
                if is_jaxpr(part):
                    if any(isinstance(x, jax.core.Tracer) for x in getattr(part, "consts", ())):
                        return True
                    todo += part.eqns
    return False


def outside_of_traces() -> bool:
    """Is no trace running in this thread? There is no public way to ask."""
    clean = getattr(_jax_core, "trace_state_clean", None)
    if clean is None:
        lacking["transforms that keep their trace"] = "jax._src.core.trace_state_clean"
    return clean is not None and bool(clean())


def as_weak(leaf: Any) -> Any:
    """The array with a weak type. There is no public conversion."""
    return leaf if leaf.weak_type else _lax._convert_element_type(leaf, leaf.dtype, weak_type=True)


def current_trace() -> Any:
    """The trace that new tracers in this thread belong to."""
    return getattr(getattr(_jax_core, "trace_ctx", None), "trace", None)


def is_trace(value: Any) -> bool:
    """Is it a trace of JAX? What it holds is JAX's own, also where a library keeps it in an object of the user's."""
    return isinstance(value, jax.core.Trace)


def trace_context() -> Any:
    """The settings, meshes and named axes that a trace depends on. There is no public way to ask."""
    return _config.trace_context()


# ---- a trace that is given further arguments while it runs


def can_grow(trace: Any) -> bool:
    """Can `add_argument` and `jaxpr_of` be used with this trace?"""
    parts = getattr(trace, "new_arg", None), getattr(getattr(trace, "frame", None), "to_jaxpr", None)
    return all(map(callable, parts)) and hasattr(_jax_core, "set_current_trace")


def add_argument(trace: Any, like: Any) -> Any:
    """A tracer of one more argument of a running trace, with the type of `like`. There is no public way."""
    return trace.new_arg(jax.typeof(like), source_info=_source_info_util.current())


def within_trace(trace: Any) -> contextlib.AbstractContextManager[Any]:
    """While entered, what is computed is part of this trace."""
    return _jax_core.set_current_trace(trace)


def jaxpr_of(trace: Any, outputs: list[Any]) -> Any:
    """The closed Jaxpr of a running trace with these tracers of it as outputs."""
    info, here = trace.frame.debug_info, _source_info_util.current()
    jaxpr, constants = trace.frame.to_jaxpr(trace, outputs, info and info.with_unknown_names(), here)
    if hasattr(jaxpr, "with_consts"):  # JAX 0.12 has one class for both
        return jaxpr.with_consts(constants)
    return jax.extend.core.ClosedJaxpr(jaxpr, constants)  # pyright: ignore[reportPrivateImportUsage]


def is_of_trace(value: Any, trace: Any) -> bool:
    """Is it a tracer of this very trace?"""
    return isinstance(value, jax.core.Tracer) and getattr(value, "_trace", None) is trace


# ---- frames of JAX that run no code of users


@functools.cache
def _own_primitives() -> set[Any]:
    """JAX's primitives whose rules are JAX's own: those of its folder of operations, sums of cotangents, and `jit`."""
    folders = "jax._src.lax.", "jax._src.ad_util", "jax._src.pjit"
    modules = [vars(module) for name, module in sys.modules.items() if name.startswith(folders)]
    return {p for names in modules for p in names.values() if isinstance(p, jax.extend.core.Primitive)}


def _subclasses(base: type) -> list[type]:
    return [cls for c in base.__subclasses__() for cls in (c, *_subclasses(c))]


@functools.cache
def _inner_frames() -> _core.InnerFrames | None:
    bind = getattr(jax.extend.core.Primitive.bind, "__code__", None)
    if bind is None or bind.co_varnames[:3] != ("self", "args", "params"):
        return None
    makes_calls: Any = getattr(getattr(_pjit, "_cpp_pjit", None), "__code__", None)
    inner = [code for code in getattr(makes_calls, "co_consts", ()) if getattr(code, "co_name", None) == "cache_miss"]
    apply = next((c for c in inner if c.co_varnames[:2] == ("args", "kwargs") and "fun" in c.co_freevars), None)
    plain = bool, int, float, complex, str, type(None)
    return _core.InnerFrames(
        bind,
        apply,
        apply.co_freevars.index("fun") if apply is not None else 0,
        tuple(f.__code__ for f in (getattr(_ad, "backward_pass3", None), getattr(_pe, "dce_jaxpr", None)) if f),
        "jax.",
        modules=tuple(f"jax._src.{name}" for name in ("numpy.", "lax.", "nn.", "scipy.", "random", "core")),
        jaxprs=(jax.extend.core.Jaxpr, jax.extend.core.ClosedJaxpr),  # pyright: ignore[reportPrivateImportUsage]
        inert=(jax.sharding.Mesh, jax.sharding.AbstractMesh),
        leaves=(ArrayImpl, np.ndarray, jax.core.ShapedArray, *plain, *_subclasses(jax.core.Tracer)),
        owns=lambda p: not _own_primitives().isdisjoint({p, getattr(p, "prim", None)}),  # a stand-in from 0.12 on
    )


def inner_frames() -> _core.InnerFrames | None:
    """JAX's frames that run no code of users. None if another library has classes of traces or avals of its own."""
    theirs = (*_subclasses(jax.core.Trace), *_subclasses(jax.core.AbstractValue))
    return _inner_frames() if all(c.__module__.startswith(("jax.", "flax.")) for c in theirs) else None


# ---- jitted functions inside of a trace


def enclosing_jits() -> list[Any]:
    """The functions that JAX is tracing now in this thread, as its caches know them, innermost first."""
    code = getattr(getattr(_pjit, "_infer_params", None), "__code__", None)
    frames = [frame for frame, _ in traceback.walk_stack(sys._getframe()) if frame.f_code is code]
    return [frame.f_locals["fun"] for frame in frames if "fun" in frame.f_locals]


def forget_traces(function: Any) -> None:
    """Removes the traces of a function from JAX's caches. Its compiled programs stay."""
    for cache in (getattr(_pe, "trace_to_jaxpr", None), getattr(_pjit, "_infer_params_cached", None)):
        getattr(cache, "evict_weakref", id)(function)


# ---- functions on the host


def _is_not_equinox_error(record: logging.LogRecord) -> bool:
    """A log filter that drops Equinox's runtime errors, because the call raises them anyway."""
    raised: Any = record.exc_info[1] if record.exc_info else None
    return type(raised).__name__ != "_EquinoxRuntimeError"


def silence_callback_logging() -> None:
    logging.getLogger("jax._src.callback").addFilter(_is_not_equinox_error)


def user_callback(callback: Any) -> Any:
    """The user's function inside the flat one of a callback's equation."""
    cells = getattr(callback, "__closure__", None) or ()
    names: tuple[str, ...] = getattr(getattr(callback, "__code__", None), "co_freevars", ())
    inner = dict(zip(names, cells, strict=True)).get("callback")
    return getattr(callback, "callback_func", callback) if inner is None else inner.cell_contents


# ---- tracebacks


def hide_frames(folder: str) -> None:
    """JAX treats code below `folder` as its own: in tracebacks, and where a program says which line made it."""
    for module in (_traceback_util, _source_info_util):
        if hasattr(module, "register_exclusion"):
            module.register_exclusion(folder)
        else:
            lacking["hiding frames"] = f"{module.__name__}.register_exclusion"


def is_hidden_file(filename: str) -> bool:
    """Does JAX leave frames of this file out of tracebacks?"""
    return not _traceback_util.include_filename(filename)


def filtering_mode() -> str:
    """How JAX hides frames: `off`, `tracebackhide`, `remove_frames` or `quiet_remove_frames`."""
    return _traceback_util._filtering_mode()


def source_frames(equation: Any) -> list[tuple[str, int, str]]:
    """(file, line, function) of the code that made an equation, innermost first, without that of JAX and graftax."""
    frames = getattr(equation.source_info.traceback, "frames", None) or ()
    own = str(Path(jax.__file__).parent)  # of which JAX itself shows some
    users = [f for f in frames if not is_hidden_file(f.file_name) and not f.file_name.startswith(own)]
    return [(f.file_name, f.line_num, f.function_name) for f in users]


def run_equation(equation: Any, operands: list[Any]) -> list[Any]:
    """The outputs of one equation. JAX 0.12 has the functions of a custom rule among the parameters."""
    params = equation.primitive.get_bind_params(equation.params)
    functions, params = params if isinstance(params, tuple) else ([], params)
    with equation.ctx.manager:
        outputs = equation.primitive.bind(*functions, *operands, **params)
    return list(outputs) if equation.primitive.multiple_results else [outputs]


def closed(jaxpr: Any) -> Any:
    """A closed Jaxpr of one without constants."""
    return jax.extend.core.ClosedJaxpr(jaxpr, ())  # pyright: ignore[reportPrivateImportUsage]


def scan_parts(equation: Any) -> tuple[int, int]:
    """(how many operands of a scan are constants, how many are carried). JAX 0.12 says it with trees."""
    params = equation.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carried, _ = params["ft_in"].update(list(range(len(equation.invars)))).unpack()
    return len(list(constants)), len(list(carried))


def name_scopes(equation: Any) -> tuple[list[str], list[str]]:
    """(transforms, named scopes) that an equation was made in, outermost first."""
    stack = getattr(equation.source_info.name_stack, "stack", ())
    transforms = [part.name for part in stack if type(part).__name__ == "Transform"]
    return transforms, [part.name for part in stack if type(part).__name__ != "Transform"]


# ---- compilation

_STAGES = {
    "/jax/core/compile/jaxpr_trace_duration": "traced",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowered",
    "/jax/core/compile/backend_compile_duration": "compiled",
}


def on_compile_stages(listener: Any) -> None:
    """Registers `listener(event, seconds, **metadata)`, called at the end of each stage of a compilation."""
    jax.monitoring.register_event_duration_secs_listener(listener)


def compile_stage(event: str, about: dict[str, Any]) -> tuple[str, str] | None:
    """(`traced`, `lowered` or `compiled`; name of the function) of an event of JAX; None for other events."""
    stage, name = _STAGES.get(event), about.get("fun_name")
    if stage is None or not isinstance(name, str):
        return None
    return stage, name[4:-1] if name.startswith("jit(") and name.endswith(")") else name


_AVAL_LOCK = threading.RLock()


@contextlib.contextmanager
def pickling_avals() -> Generator[None]:
    """While entered, the types of arrays are pickled by what they are made of.

    Newer versions compare them by identity, and so a mark in them, of which JAX's pickles of executables hold
    copies. Functions that are given the results of an executable that was loaded would be traced again.
    """
    cls: Any = _jax_core.ShapedArray
    if not hasattr(cls, "_create"):
        yield
        return
    parameters = inspect.signature(cls.__new__).parameters.values()
    defaults = {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}

    def reduce(aval: Any) -> tuple[Any, ...]:
        options = {name: getattr(aval, name) for name in defaults if getattr(aval, name) is not defaults[name]}
        return copyreg.__newobj_ex__, (cls, (aval.shape, aval.dtype, aval.weak_type), options)  # pyright: ignore

    with _AVAL_LOCK:
        copyreg.pickle(cls, reduce)
        try:
            yield
        finally:
            del copyreg.dispatch_table[cls]


def is_cache_retrieval(event: str) -> bool:
    """Does this event say that an executable was read from JAX's own cache? The end of its compilation follows."""
    return event == "/jax/compilation_cache/cache_retrieval_time_sec"


# ---- errors of JAX, recognised by their text, which may change in any version: they have no class of their own

DONATION_UNUSED = "Some donated buffers were not usable"  # how the warning begins


def is_concretization_error(error: BaseException) -> bool:
    """Is it a concretization error, or another error of tracing? Its message names flat arguments."""
    if isinstance(error, IndexError) and "Slice entries must be static integers" in str(error):  # JAX before 0.11
        return True
    return isinstance(error, jax.errors.JAXTypeError) or "The error occurred while tracing the function" in str(error)


def is_placement_error(error: BaseException) -> bool:
    """Is it an error about the devices or the sharding of a flat argument?"""
    return isinstance(error, ValueError) and bool(re.search(r"(key path|Got argument) leaves\[", str(error)))


def is_mismatched_leaf(error: BaseException, leaf: Any) -> bool:
    """Can this leaf be the argument that a sharding error is about?"""
    ending = f"arg sharding: {getattr(leaf, 'sharding', None)} for arg type: {jax.typeof(leaf).str_short()}"
    return str(error).endswith(ending)


def refused_class(error: BaseException) -> str | None:
    """The class of the object in an error of a JAX transform that does not accept it; None for other errors."""
    if not isinstance(error, TypeError):
        return None
    text = str(error)
    if "is not a valid JAX type" not in text and "as an abstract array" not in text:
        return None
    match = re.search(r"of type '?<class '([\w.<>]+)'>", text)
    return match[1] if match else None


def _has_text(text: str, *kinds: type[BaseException]) -> Callable[[BaseException], bool]:
    return lambda error: isinstance(error, kinds or BaseException) and text in str(error)


is_format_of_tracer = _has_text("Tracer.__format__", TypeError)
is_item_assignment = _has_text("in-place item assignment", TypeError)
is_deleted_array_error = _has_text("delete", RuntimeError, ValueError)
is_out_of_memory = _has_text("ut of memory", RuntimeError)  # of a device; its code differs between backends
is_of_a_timeout = _has_text("DEADLINE_EXCEEDED")
is_of_refused_arguments = _has_text("INVALID_ARGUMENT")  # by an executable, so that nothing has run
is_of_reverse_loop = _has_text("Reverse-mode differentiation does not work for lax.while_loop")
is_of_differentiated_callback = _has_text("callbacks do not support JVP")
is_of_exported_callback = _has_text("callback")
is_of_symbolic_zeros = _has_text(
    "symbolic_zeros support with shard_map"
)  # the zeros of a derivative rule, not compiled
is_of_specs = _has_text(
    "does not match the specs of the input"
)  # a spec of `shard_map`, and the sharding of its argument
# An argument does not have the sharding in `in_shardings`: the message has the sharding and the type.
is_sharding_mismatch = _has_text("does not match the sharding on the respective arg", ValueError)
is_output_error = _has_text("key path result[", ValueError)


def name_argument_of_specs(error: ValueError, path: str) -> None:
    error.args = (str(error).replace("for arg:", f"for {path}:"),)
