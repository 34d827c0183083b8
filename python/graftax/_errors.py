# SPDX-License-Identifier: Apache-2.0
"""Every exception and message of graftax, each with its remedy."""

from __future__ import annotations

import pickle
import re
from collections.abc import Sequence
from typing import Any


class GraftaxError(Exception):
    """Base of every error that graftax raises itself."""


class UnsupportedValueError(GraftaxError, TypeError):
    """A value that cannot be part of a compiled program: hidden state, or arrays where none can be."""


class StructureError(GraftaxError, ValueError):
    """An object graph, or a structure, that cannot be walked, rebuilt or matched."""


class ConcurrentChangeError(GraftaxError, RuntimeError):
    """An object changed while it was walked."""


class UnpicklableError(GraftaxError, pickle.PicklingError):
    """A GraphDef that holds a static which cannot be pickled."""


class MutationError(GraftaxError, RuntimeError):
    """A change that the options forbid, or that cannot be brought back to the caller."""


class CheckError(GraftaxError, AssertionError):
    """jit(check=True): the compiled function did something else than the plain one."""


class RecompileWarning(UserWarning):
    """A static value changes on most calls, and each change compiles anew."""


class CapturedArrayWarning(UserWarning):
    """A big NumPy array that the function captures is copied on every call."""


class LostChangeWarning(UserWarning):
    """A by-value call changed an argument, and the change is dropped."""


def type_name(value: Any) -> str:
    """The type of a value, as messages name it."""
    name = type(value).__qualname__
    return "Array" if name == "ArrayImpl" else name


def a_type(value: Any) -> str:
    """A value by its type: `a list`, `an Array`."""
    name = type_name(value)
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


def some(texts: Sequence[str], most: int = 6, total: int | None = None) -> str:
    """The first few texts, and how many more there are."""
    shown, total = texts[:most], len(texts) if total is None else total
    return ", ".join(shown) + (f" and {total - len(shown)} more" if total > len(shown) else "")


def at_path(error: BaseException, path: str) -> BaseException:
    """Puts the key path into `error`: into the message of ours, as a note on anybody else's."""
    if isinstance(error, GraftaxError) and not getattr(error, "_has_path", False):
        error.args = (f"{path}: {error.args[0]}", *error.args[1:])
        error._has_path = True  # type: ignore[attr-defined]
    elif not isinstance(error, GraftaxError):
        error.add_note(f"graftax was walking {path}")
    return error


def rename_leaves(error: BaseException, paths: Sequence[str], flat: str = "leaves") -> None:
    """Rewrites `leaves[3]`, JAX's name for a flat argument, to that leaf's key path."""
    if error.args and isinstance(error.args[0], str) and f"{flat}[" in error.args[0]:
        text = re.sub(
            rf"\b{re.escape(flat)}\[(\d+)\]",
            lambda m: paths[int(m[1])] if int(m[1]) < len(paths) else m[0],
            error.args[0],
        )
        error.args = (text, *error.args[1:])


OF_A_TRACE = "The error occurred while tracing the function"  # in JAX's errors of a traced value that must be known

MUTATION_FORBIDDEN = (
    "{name} changed {paths}, and mutation='error' forbids that. Return the new value instead, or use "
    "mutation='propagate' (the change comes back to the caller) or 'discard'."
)
CHANGE_LOST = (
    "{name} changed {paths}, but works by value: the change is dropped and not part of the result. "
    "Return the changed object, or use graftax.jit, which brings changes back."
)
GLOBAL_ASSIGNED = (
    "{name} assigns the global {names}. A compiled call cannot repeat an assignment to a module's globals: keep the "
    "value in a list, a dict or an object and change that, or return it."
)
ATTRIBUTE_SET = (
    "{name} sets attributes of the jitted function itself. A compiled call cannot repeat that: keep the value in a "
    "list, a dict or an object that the function captures or is given."
)
GENERATOR = (
    "{name} is a {what}: its body runs after the call has returned, where nothing can be traced. Compile a plain "
    "function and call it from the {what}."
)
CHANGED_BEHIND = (
    "{name} was traced, and meanwhile {path} was changed from outside the traced copy, most likely by a helper that "
    "reaches it through its own globals or closure. Pass it to the function as an argument. (Or a registered class "
    "flattens to something new each time it is asked.)"
)
CHANGED_WHILE = (
    "{name} ran, and meanwhile {paths} was changed from outside of the copy that the function is given: by another "
    "thread, by a host function, or by a derivative rule that reaches it through its own closure. Pass it to the "
    "function as an argument; let only the host function name what the host function changes."
)
NO_SHARDING = (
    "the sharding prefix {spec!r} has no entry for {path} of {of}. Give one sharding for everything, or a tree with an "
    "entry for each part: None leaves a part to JAX."
)
SHARDING_TOO_DEEP = (
    "the sharding prefix has {spec!r} for {path} of {of}, which is an array. Give one sharding, or None, there."
)
NO_SUCH_NAME = "{option}={which!r}: {name} has no argument {which!r}; it takes {names}.{hint}"
NO_SUCH_POSITION = "{option}={which}: {name} has no positional argument {which}; it takes {count}."
NO_PATTERN = "{text!r} is no pattern: it makes no sense from {rest!r} on. Write layers[*].w or **.w"
EMPTY_PATTERN = "'' is no pattern: it is empty. Write layers[*].w, or '**', which covers everything"
NOWHERE = (
    "{name}: the pattern {pattern!r} of {option} means nothing that is there. There is: {paths}. Name one of these, or "
    "what they are in, or leave the pattern out. .w is an attribute, [w] a key."
)
NOT_FOR = (
    "{option}={which!r}: {name} has no argument {root!r}, with which this pattern of key paths begins. It takes "
    "{names}."
)
STRUCTURE_CHANGES = (
    "{name} compiles anew on most calls: {count} structures in a row, each another than the one before. Between the "
    "last two:\n{differences}\nWhat is no array is compared, and a list that grows is a new structure each time: keep "
    "counters and logs outside of what the function is given, or make them jax.Arrays of a fixed shape."
)
STATIC_CHANGES = (
    "{name} compiles anew because {path} keeps changing (last values: {values}); {count} versions so far. Python "
    "numbers are static: to compile once, trace it with jit(..., dynamic={path!r}), pass graftax.Dynamic(value), or "
    "make it a jax.Array."
)
STATIC_CHANGES_IN_PACK = (
    "{name} compiles anew because {path} keeps changing (last values: {values}); {count} versions so far. Python "
    "numbers are static, in packed state too: to compile once, pack a jax.Array or graftax.Dynamic(value) there."
)
COMPILED_FOR_OTHERS = (
    "{name} was {done} for other arguments:\n{differences}\n{again}, or call the jitted function, which compiles for "
    "what it is given."
)
NOT_KEPT = (
    "a {what} belongs to this process and cannot be pickled or copied. graftax.export(f)(*args).serialize() makes "
    "bytes that another process can call; a copy of the jitted function can be lowered again."
)
CAPTURED_CHANGED = (
    "{name} changes {path}, which it captures. An exported function has only its arguments: pass the object as one "
    "(for a bound method, export the function of the class and pass the instance)."
)
CAPTURED_RETURNED = (
    "the result of {name}, or what it leaves in an argument, holds {path}, which it captures. An exported function has "
    "only its arguments: pass the object as one, or return a copy."
)
CAPTURED_SHARED = (
    "{name} is given {one}, which it also captures as {other}: one object now, and two for every call of the exported "
    "function. Pass a copy, or let the function use its argument."
)
PACKED_SHAPE = (
    "{name} is exported for {path}, a jax.ShapeDtypeStruct inside of packed state, where it is no array. Pack arrays "
    "of these shapes (jnp.zeros), whose sizes are fixed then; for symbolic shapes pass the object itself, not a handle."
)
SYMBOLIC = (
    "{name}: a symbolic dimension is a part of the result, or of what is left in an argument, at {path}. What is no "
    "array is the same for every shape: make it an array (jnp.asarray(x.shape[0])), or let the caller find it."
)
NO_CALLBACKS = (
    "{name} calls a function on the host, which is no part of an exported program. Take callbacks, jax.debug.print and "
    "progress= out of it, or compile it where it runs."
)
NOT_SAVED = (
    "{name} cannot be saved: {what}: {error}. Functions and classes are saved by name: define them at the "
    "top of a module."
)
BY_IDENTITY = "it counts by identity, and a copy that is loaded would be another object"
NOT_EXPORTED = "these are not the bytes of an exported function, or they were damaged: {error}"
CHECK_FAILED = (
    "{name} does something else when it is compiled:\n{difference}\n(expected is what the plain function did). What is "
    "read from time, environ, Python's random numbers or a file is read once, when the function is traced; print and "
    "warn run then only."
)
DONATED_AND_KEPT = (
    "{name} is asked to donate {donated}, but {kept} is the same array and is kept. Donate both (it is then passed "
    "once), pass a copy (jnp.copy) for one of them, or donate neither."
)
DELETED = (
    "{path} holds an array that was deleted, so {name} cannot run ({error}). Most likely an earlier call took it as a "
    "donated argument: use what that call returned or wrote back, or do not donate it."
)
BIG_CAPTURED = (
    "{name} captures the NumPy array {path} ({size} MB), which is copied on every call, so that changing it is seen. "
    "Make it a jax.Array once: jnp.asarray(...)."
)
CLASS_GONE = "this {what} holds {value!r} at {path}, which cannot be pickled: {error}"
PACK_USED = (
    "this packed state was used up by {name}, which returned a new one in its place: its memory was donated. Use what "
    "the call returned, or pack with donate=False."
)
PACK_CHANGED_TWICE = (
    "{name} changed what is in a handle of packed state both as its argument and through the handle itself, which it "
    "reaches another way (update, or another argument): one of the two would be lost. Change it in one of these ways."
)
PACK_DELETED = (
    "this packed state's arrays are gone: a call took them as donated. It failed while it ran, or another handle, or "
    "an object packed or unpacked with copy=False, holds the same arrays (jax.tree.map makes such handles). Use what "
    "that call wrote back or returned, copy.copy(handle) before it, or pack with donate=False."
)
PACK_RESHAPED = (
    "a buffer of this packed state is {found}, and not the {size} numbers that were packed: jax.vmap, or a tree "
    "operation on the handle, made it so. Unpack under the same jax.vmap, or turn it back first."
)
PACK_OF_PACK = "this is packed already: a handle can be passed on as it is, and unpack() gives the objects inside."
PACK_BYTES = "max_bytes={value!r}: expected a whole number of bytes, 0 or more."
NO_SUCH_OPERAND = (
    "{name} is given no argument {which!r}; it is given {operands}. A number counts positional arguments; wrt= takes "
    "the names of all that are given."
)
WRT_TYPE = (
    "{name}: {option}={given!r} says of no argument that it is differentiated. Give argnums= positions of arguments, "
    "wrt= positions, names, patterns of key paths, or a predicate of arrays."
)
TANGENT_COUNT = (
    "{name}: there are {count} primals and {given} tangents. Give one graph of tangents for each; None stands for zero."
)
WRT_TWICE = "{name}: wrt={wrt!r} names an argument twice."
NOTHING_TO_DIFFERENTIATE = (
    "{name}: there is no array of a floating dtype to differentiate in {where}. Integers have no derivative (pass 3.0 "
    "for 3, or allow_int=True for zeros of no dtype), and Python numbers inside of an argument are static: make them "
    "arrays (jnp.asarray), or name another argument with argnums= or wrt=."
)
NOT_WITH_AUX = (
    "{name}: with has_aux=True the function returns a pair (value, aux); it returned {found}. Write return value, aux."
)
NOT_SCALAR = (
    "{name}: the function has to return a scalar array, and returned {found}. Return (value, aux) with has_aux=True "
    "for what else there is, or use jacrev for the derivative of more than one number."
)
OTHER_SHAPE = "{name}: the {what} at {path} has to be {expected}, and is {given}."
OTHER_TANGENT = (
    "{name}: there is a {what} at {path}, where nothing is differentiated. A {what} stands in the place of a floating "
    "array, in a graph of the same structure, with None for zero: here at {expected}."
)
NO_TANGENT = (
    "{name}: there is no {what} for {path}. A {what} stands in the place of each floating array, in a graph of the "
    "same structure; None, or a static, stands for zero."
)
NOT_PRIMALS = (
    "{name}: {option} is {given}. Both are tuples with one element for each positional argument: "
    "jvp(f, (x, y), (tangent_of_x, tangent_of_y))."
)
WRT_UNUSED = (
    "{name}: the pattern {pattern!r} of wrt= covers no floating array of the arguments. There is: {paths}. .w is an "
    "attribute, [w] a key."
)
WRT_AND_ARGNUMS = (
    "{name}: argnums={argnums!r} and wrt={wrt!r} both say what to differentiate. Give one of them; wrt= takes "
    "positions, too."
)
NO_REVERSE = (
    "A graftax.while_loop(..., max_steps=n), which makes at most n steps, can be differentiated in reverse mode, and "
    "so can a graftax.fori_loop with Python numbers as bounds."
)
LOOP_STRUCTURE = (
    "{name}: a step has to leave the structure of its state as it found it, and does not:\n{differences}\n(expected "
    "is the state before a step, given the one after it.) The state is the carry and everything that the functions "
    "capture. One compiled step serves for all, so only arrays can change. Make a number that changes an array "
    "(jnp.asarray), and return what is to be collected as the second result of a scan instead of appending it."
)
LOOP_TYPE = (
    "{name}: {path} is {expected} before a step and {given} after it. An array of the state keeps its shape and dtype "
    "in every step: convert it inside of the function (x.astype), or begin with {given}."
)
TRACED_NUMBERS = "{name}: the Python numbers at {paths} are traced here, because the steps change them."
MOVED = (
    "{name}: a step puts the object at {source} in the place of {path}. Which object is where would depend on the "
    "number of steps: put a copy there (copy.copy), or move the arrays instead of the objects."
)
CHANGED_AND_REPLACED = (
    "{name}: a step changes the object at {path} in place, and puts another one there. The second step would change "
    "that one instead, so only the first change would come back. Change the object and keep it, or leave it as it is "
    "and put a new one there."
)
NO_CHANGES = (
    "{name}: {what} must not change anything, and changed {paths}. Return what is new instead, or change it elsewhere."
)
NOT_A_PAIR = (
    "{name}: the function has to return a pair (carry, y), and returned {found}. Return (carry, None) for no y."
)
NOT_A_TEST = (
    "{name}: cond_fun has to return a scalar boolean array, and returned {found}. Compare (x > 0), and make one of "
    "several with .any() or .all()."
)
WRONG_MAX_STEPS = "{name}: max_steps={given!r}: expected a whole number of steps that is known now, 0 or more, or None."
NOT_SLICED = (
    "{name}: {path} is a scalar and has no rows to go over. What is the same in each step belongs into the carry or "
    "the closure; a Python number in xs is the same in each step."
)
OTHER_LENGTH = "{name}: {path} has {count} rows and {first} means {length}. All arrays of xs have as many rows."
NO_LENGTH = (
    "{name}: xs holds no array, so the number of steps is not known: pass length=, or arrays with a row for each step "
    "(jnp.arange(n) for a range)."
)
WRONG_LENGTH = "{name}: length={given!r}: expected a whole number of steps, 0 or more."
NO_AXIS = "{name}: {path} has the shape {shape}, and no axis {axis} to go along."
RAGGED = "{name}: {path} has {size} elements along axis {axis} and {first} has {length}. All arrays have as many."
RETURNS_NONE = (
    "{name}: the function returns None, which would be the next step's {carry}. Return what the next step is to be "
    "given, also where it is the object that was changed in place."
)
OTHER_ELEMENTS = "{name}: the function has to return the same structure each time, and does not:\n{differences}"
NO_RICH = "progress= shows a bar with the rich package: pip install graftax[show], or pass a function of (done, steps)."
WRONG_PROGRESS = "{name}: progress= takes True, a title or a function of (done, steps), not {given}."
BRANCH_STRUCTURE = (
    "{name}: {one} and {other} leave different structures behind:\n{differences}\n(expected is what {one} leaves, "
    "given what {other} does.) Which branch runs is known on the device only, so only arrays can depend on it: make "
    "what differs a jax.Array, or do in both branches what changes the structure."
)
BRANCH_RESULTS = (
    "{name}: {one} and {other} return different structures:\n{differences}\n(expected is what {one} returns, given "
    "what {other} does.) Only arrays can depend on the branch: return the same structure from each, and an array "
    "(jnp.asarray) for a number that differs."
)
BRANCH_TYPES = (
    "{name}: {path} is {expected} after {one} and {given} after {other}. Arrays of all branches have the same shape "
    "and dtype: convert one (x.astype)."
)
BRANCH_OBJECTS = (
    "{name}: {path} stays the object that it is in one of {one} and {other}, and is replaced or moved in the other. "
    "Which object is where cannot depend on an array: change the object's content instead of replacing it."
)
BRANCH_REPLACED = (
    "{name}: {one} changes the object at {path} in place, and then removes or replaces it: the change would be unknown "
    "after the other branches. Change the object and keep it, or leave it as it is."
)
NOT_BRANCHES = "switch: the second argument is a list of functions, and was given {given!r}."
NO_BRANCHES = "switch: there is no branch to choose: pass at least one function."
UNSEEN = (
    "{name}: the function puts an array at {path}, in an attribute that the class's flatten leaves out, so that its "
    "value cannot be followed. Make it one of the children, or keep it elsewhere."
)
NOT_CALLABLE = "{name} expects a callable, and was given {given!r}."
CALLBACK_CHANGES = (
    "{name}: the host function changed its arguments, which are copies: the change would be lost.\n{differences}\n"
    "(expected is what it was given.) Return the new value, or change what the function reaches through its closure or "
    "as a bound method."
)
CALLBACK_RETURNS = (
    "{name}: the host function returned something else than result_shape_dtypes says:\n{differences}\nThe compiled "
    "code is made for result_shape_dtypes: arrays stand where it has shapes, all else has to be equal."
)
CALLBACK_SHAPE = (
    "{name}: the host function returned {given} at {path}, and result_shape_dtypes says {expected}. Return that, for "
    "example np.asarray(value, dtype), or correct result_shape_dtypes."
)
CAPTURED_COPY = (
    "{name}: the host function changed what it captures, which is a copy made for the trace, because the compiled "
    "function captures the object too: the change would be lost.\n{differences}\n(expected is what it was.) Let only "
    "the host function name the object: write it as a function of its own, outside of the compiled one."
)
COPY_CHANGED = (
    "{name}: its host function {host} seems to change {paths}, which is a copy made for the trace, because {name} "
    "reaches it too: the change would be lost. Let only the host function name the object: write it as a function of "
    "its own, outside of {name}. With graftax.io_callback in place of JAX's callbacks a change of a copy is an error."
)
NO_RULE = "{name} has no rule: give it one with {how}, or call the function without the decorator."
OF_CAPTURED = (
    "{name} is differentiated by {path}, which its rule says nothing about: a rule has the derivative by the arguments "
    "alone{besides}. Pass it as an argument, or stop its gradient (jax.lax.stop_gradient)."
)
RULE_CHANGES = (
    "the rule of {name} changed {paths}. JAX runs a rule whenever it asks for a derivative, possibly later than the "
    "call or not at all: return the new value, or let the function itself do the change, which is what comes back."
)
RULE_CHANGES_COPY = (
    "the bwd of {name} changed what it is given, which are copies: the change would be lost.\n{differences}\n(expected "
    "is what it was given.) Return the new value as a cotangent, or do the change in the function itself."
)
RULE_RETURNS = (
    "{name}: its rule has to return the value that the function returns, and returned another:\n{differences}\n"
    "(expected is what the function returns.)"
)
WRITTEN_BY_HOST = (
    "{name} changes {paths}, and computes what it writes there with a host function of what is differentiated. Its "
    "rule speaks of the result alone: return the value, or give the host function jax.lax.stop_gradient(...) of its "
    "arguments."
)
NO_SUCH_NONDIFF = "{name}: nondiff_argnums has {which}, and the call has {count} arguments. Positions begin at 0."
RULE_PAIR = "{name}: its {rule} has to return a pair {pair}; it returned {found}."
RULE_TUPLE = "{name}: its bwd has to return a tuple of {count} cotangents, one for each argument; it returned {found}."
RETURNS_ARGUMENT = (
    "{name} returns an object of the caller's, whose array at {path} would then keep the derivative that it has, and "
    "not get that of the rule. Return a new object: jax.tree.map(lambda x: x, ...) copies a tree."
)
KEYWORD_ONLY = "{name}: keyword-only arguments have no position that a rule could be given: {error}"
FIRST_BY_POSITION = "{name}: the first argument is the one that is differentiated; pass it, and by position."
OTHER_TREE = (
    "{name}: the tangents have to be a tree like the primals, with None for no tangent: {expected}, not {given}."
)
CONVERTED_FOR_OTHERS = (
    "{name}: the function was converted for other arguments:\n{differences}\nConvert it again, with arguments like "
    "these."
)
OLD_RULE = (
    "{title}.{old} is the old form of {new}, in which None stands for a {of} that is not there; with {old} arrays of "
    "zeros are made for it."
)
NOT_AN_ENTRY = "{name}: {option} gives {entry!r} for {path}. Give {what} there, or a tree of them like the argument."
NO_ENTRY = (
    "{name}: {option} says nothing of {path}. Add an entry for it; the last of several patterns can be '**', which "
    "covers what no other does."
)
NO_TEXT = (
    "{name}: a dict for {option} as a whole has patterns of key paths as its keys, such as 'x' or '**.w', and "
    "{given!r} is none. For one entry an argument, give a tuple."
)
ENTRY_TOO_DEEP = "{name}: {option} has {entry!r} for {path}, which is an array. Give {what} there."
OTHER_PARTS = (
    "{name}: {option} has {entry!r} for {path}: that {found}, and {path} does not. Give {what} for all of it, or one "
    "for each of its parts."
)
PATTERN_UNUSED = (
    "{name}: the pattern {pattern!r} of {option} decides about no array: it covers none, or patterns before it cover "
    "them all (the first that covers a path counts). There is: {paths}. .w is an attribute, [w] a key."
)
TWO_ENTRIES = (
    "{name}: {one} and {other} are one array, in an object that is reached twice, and {option} gives {a} for the first "
    "place and {b} for the second. Give both places the same, or pass a copy of the object in one of them."
)
AMBIGUOUS_ENTRY = (
    "{name} puts a new array at {path}, where {option} could mean {entries}. Say which with an entry for that place, "
    "or return the array as part of the result."
)
ENTRIES_COUNT = (
    "{name}: {option} is a tuple of {count}, and there are {given} positional arguments. Give one entry for each of "
    "them{keywords}."
)
NO_SUCH_DIMENSION = (
    "{name}: {option} maps {path} along axis {axis}, and its shape is {shape}. Give None for what is not mapped."
)
OTHER_SIZE = (
    "{name}: what is mapped has to have one size, and {path} has {size} along axis {axis}, but {other}. Map axes of "
    "one size, and give None for what is not mapped."
)
NOTHING_MAPPED = (
    "{name}: {option} maps no array of the arguments. Map one, or say how often to run the function with axis_size=."
)
DEPENDS_ON_AXIS = (
    "{name} changes {path} to something that depends on the mapped axis, but {path} is not mapped: it has room for "
    "one value, not for one of each. Return the value as part of the result, or map the object with in_axes."
)
RESULT_DEPENDS = (
    "{name}: out_axes is None for {path}, which depends on the mapped axis. Give it an axis, or reduce it (with "
    "axis_name= and jax.lax.pmean, for example)."
)
RETURNED_OTHERWISE = (
    "{name} returns at {path} an object that it was given, which comes back with {entry!r}, as {inputs} says, and "
    "{option} asks for {asked!r} there. Give {entry!r} for it in {option}, or return a copy or the arrays alone."
)
NO_MESH_AXIS = "{name}: out_specs names the axis {axis!r} for {path}, and the mesh has {names}."
NOT_INFERRED = (
    "{name}: in_specs can be inferred along explicit mesh axes only, and {axis!r} is of type {type}. Give in_specs, or "
    "make the mesh with axis_types=(jax.sharding.AxisType.Explicit, ...)."
)
PARTS_INFERRED = (
    "{name}: {path} is sharded as {spec}, of which the part along {names} cannot be told alone: give in_specs, or "
    "reshard it (jax.sharding.reshard)."
)
DIFFERS_BY_SHARD = (
    "{name} changes {path} to something that differs along the mesh axis {axis!r}, over which {path} is replicated. "
    "Reduce it (jax.lax.pmean, psum), return it as part of the result, or shard the object with in_specs."
)
RESULT_DIFFERS = (
    "{name}: out_specs has {entry!r} for {path}, which differs along the mesh axis {axis!r}. Name that axis there, or "
    "reduce the value (jax.lax.pmean, psum)."
)
NO_ROOM_FOR_AXIS = (
    "{name}: {option} puts the mapped axis of {path} at {axis}, but the shape without it is {shape}, which has no "
    "room for an axis there."
)
PACK_MAPPED = (
    "{name}: {option} maps {path}, a buffer of packed state, which has no such axis. Pass what unpack() gives, or give "
    "{entry!r} for the handle."
)

TREE_MISMATCH = "{name}: the trees do not have the same structure.\n{places}"
NO_IDENTITY = "a tree without leaves cannot be reduced. Give identity=, the result for that."
NOT_TRANSPOSABLE = "the tree is not what the two structures say.\nfound    {found}\nexpected {expected}"
NOT_MUTABLE = (
    "{paths} cannot be written to: every object from the root (a {cls}) down to it is immutable. "
    "graftax.at(obj)[path].set(value) returns a copy with the new value."
)
INSIDE_ANOTHER = (
    "{path!r} lies in {other!r}, which is replaced as well: the one value would be lost. Set the two one after the "
    "other, or make the pattern mean one of them."
)
TWO_VALUES = (
    "{path!r} is given two values: it is one place, named twice or reached through a shared object. Name it once."
)
NO_POINTING = (
    "the function given to at() returned the value at {paths}, which stands in several places. To see which one is "
    "meant, it is called again with other objects there, and failed: {error}. Give it the path instead: "
    "at(obj)['layers[0].w']"
)
NO_PLACE = "nothing in this {cls} matches {where!r}. {near}"
WHERE_ELSEWHERE = (
    "the function given to at() must return parts of the object it is called with, nothing computed from them. It "
    "returned {found} that is no part of it. Give a path instead: at(obj)['layers[0].w']"
)
SET_COUNT = "set() takes a list or tuple with one value for each of the {places} places, got {given}."
NOT_SELECTED = "{spec} at {path!r} does not say whether a leaf is selected: give a bool, or a tree of bools."
NO_BOOL = "the tree of bools has nothing for {path!r}: give True or False for it, or one for all that contains it."
NO_SUCH_BOOL = "the tree of bools has an entry for {path!r}, and there is no such place."
OTHER_STRUCTURE = (
    "{name}: the graphs do not have the same structure at {path!r}: {one} in the first, {other} in another."
)
UNSHARED = (
    " jax.tree makes a tree, in which a shared object is several. For a map over each array once: leaves, graphdef = "
    "graftax.flatten(obj), then graftax.unflatten(graphdef, new_leaves)."
)
NO_TYPE = "{spec!r} cannot be asked with isinstance: give the class, {origin}, or a function of a leaf."
CHANGED_SINCE = (
    "{cls} changed while it was read, in another thread or in a function that was given a part of the graph."
)
REGISTERED_ALREADY = "{cls} is registered with JAX already: by a library, by a base class's decorator, or twice."
DATACLASS_ALREADY = (
    "{cls} is a dataclass already, as every subclass of graftax.Module: leave dataclass(slots=True) off, which would "
    "make it anew without what its fields are declared with. A class may write its own __slots__ and __init__."
)
REGISTERED_NAMES = "{cls} has no field {names}. It has {known}."
REGISTERED_ITEMS = (
    "{cls} holds items besides its attributes, which would be lost. "
    "Give register() flatten= and unflatten= that keep them."
)
REGISTERED_CHILDREN = (
    "register({cls}, flatten=..., names=...) names {wanted} children ({names}), and flatten gave {count}. "
    "Give a name for each child, or leave out names= where their number varies."
)
