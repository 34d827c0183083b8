# SPDX-License-Identifier: Apache-2.0
"""Which numbers the bytecode of a function computes anew: it reads one by a name, and hands the result on under it.

The instructions are followed once, in their order, with a stack of what is known of each value. An instruction that is
not handled here leaves values of which nothing is known.
"""

from __future__ import annotations

import dis
import inspect
import re
import types
from typing import Any, NamedTuple

from graftax._base.missing import MISSING
from graftax._capture.bytecode import instructions_of


class Variable(NamedTuple):
    """The name of a parameter, or of a variable that a function shares with the one around it."""

    name: str


Name = str | int | Variable  # of an attribute; the key or index of an item; of a variable


class _Value(NamedTuple):
    """What is known of a value on the stack."""

    names: frozenset[Name] = frozenset()  # under which it was read, or under which the numbers that it comes from were
    is_computed: bool = False  # is it the result of an operation on these?
    is_known: bool = False  # does it come from these names and constants, and nothing else?
    handed: frozenset[Name] = frozenset()  # names of the computed, known numbers that it is, or has as items
    object: Any = MISSING  # of a constant or a class, itself; of a function made here, its code
    owner: frozenset[Name] = frozenset()  # of an attribute, the names under which its object was read


_UNKNOWN = _Value()
_PRECALLS = "PRECALL" in dis.opmap  # Python 3.11
_FAST = re.compile("(LOAD|STORE)_FAST")  # one instruction may load or store two variables
# Instructions that put no value of their own on the stack.
_LEAVE_THE_TOP = ("POP_", "NOP", "RESUME", "STORE_", "DELETE_", "PUSH_", "COPY_FREE", "MAKE_CELL", "NOT_TAKEN")
_BETWEEN_KEYS = re.compile(r"[.\[\]'\"]+")  # of a key path
# After these, execution does not reach the next instruction.
_LEAVES = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "RAISE_VARARGS", "RERAISE", "RETURN_CONST")


def numbers_computed_anew(
    code: types.CodeType, scope: dict[str, Any], numbers: set[Name], hands_back: bool
) -> set[Name]:
    """The numbers, of those that are asked about, that the code computes anew.

    The code stores the result under the name of the number (`m.n += 1`, `d["n"] = d["n"] + 1`, `nonlocal n; n += 1`).
    Or it calls a function with the result (`d.update(n=d["n"] + 1)`, `replace(s, n=s.n + 1)`,
    `setattr(m, "n", m.n + 1)`, `tree_at(lambda m: m.n, m, m.n + 1)`, or the field of a class), or a method of what was
    read under that name (`at(m)["n"].set(m.n + 1)`). Or the result is an item of a dict (`d | {"n": d["n"] + 1}`).
    Instead of the result there may be a function that computes it (`at(m)["n"].apply(lambda n: n + 1)`).

    Args:
        scope: the globals of the code.
        hands_back: whether results of the code may be arguments of the next call. Then it may also return a number that
            it has computed from this number and constants alone (`return params, n + 1`).
    """
    return _followed(_Flow(code, scope, numbers, hands_back)).computed


def _merged(first: _Value, second: _Value) -> _Value:
    """What is known where two branches meet."""
    if first is second:
        return first
    return _Value(
        first.names | second.names,
        first.is_computed or second.is_computed,
        first.is_known and second.is_known,
        first.handed | second.handed,
        first.object if first.object is second.object else MISSING,
        first.owner | second.owner,
    )


def _result(*values: _Value) -> _Value:
    """What is known of the result of an operation."""
    # With a text or a complex number the result is no number that an argument could be.
    if any(isinstance(value.object, str | bytes | complex) for value in values):
        return _UNKNOWN
    names = frozenset[Name]().union(*(value.names for value in values))
    is_known = all(value.is_known for value in values)
    return _Value(names, bool(names), is_known, names if is_known and len(names) == 1 else frozenset())


def _container(values: list[_Value]) -> _Value:
    """What is known of a new tuple, list or dict with these items."""
    return _Value(handed=frozenset[Name]().union(*(value.handed for value in values)))


class _Flow:
    """The state of following one code object: its stack, its variables, and what jumps take to their targets."""

    def __init__(self, code: types.CodeType, scope: dict[str, Any], numbers: set[Name], hands_back: bool) -> None:
        self.computed: set[Name] = set()  # the numbers that are computed anew
        self.returned = frozenset[Name]()  # the names of what it returns as it was read
        self.code, self._scope, self._numbers, self._hands_back = code, scope, numbers, hands_back
        self._variables: dict[str, _Value] = {}
        self._stack: list[_Value] | None = []  # None behind a jump, up to the target of another one
        # The stack and the variables at the targets of jumps, by offset.
        self._targets: dict[int, tuple[list[_Value], dict[str, _Value]]] = {}
        self._keywords: tuple[str, ...] = ()  # of the next call, before Python 3.13
        # Only where results may be arguments again is a parameter a number that the code can compute anew.
        if hands_back:
            parameters = code.co_argcount + code.co_kwonlyargcount
            self._variables = {name: self._read(Variable(name)) for name in code.co_varnames[:parameters]}

    def follow(self, instruction: dis.Instruction) -> None:
        """Follows one instruction. They have to come in their order, from the first one on."""
        op = instruction.opname
        # A jump leads here, besides what was followed up to here. Loops are followed once: their jump back is ignored.
        if instruction.offset in self._targets:
            self._stack, self._variables = self._meeting(*self._targets[instruction.offset], self._stack)
        if self._stack is None or op == "EXTENDED_ARG":
            return
        if "JUMP" in op or op in ("FOR_ITER", "SEND"):
            stack = self._stack_after(dis.stack_effect(instruction.opcode, instruction.arg, jump=True))
            known = self._targets.get(instruction.argval)
            self._targets[instruction.argval] = (
                self._meeting(*known, stack) if known else (stack, dict(self._variables))
            )
        if op in ("RETURN_VALUE", *_LEAVES):
            if op == "RETURN_VALUE":
                result = self._pop(1)[0]
                self.returned |= frozenset() if result.is_computed else result.names
                self.computed |= result.handed if self._hands_back else frozenset()
            self._stack = None
        # Each of these says whether it has handled the instruction. Of any other, only the depth of the stack is known.
        elif not any(
            handle(instruction) for handle in (self._moves, self._reads, self._stores, self._makes, self._calls)
        ):
            self._stack = self._stack_after(dis.stack_effect(instruction.opcode, instruction.arg))
            if self._stack and not op.startswith(_LEAVE_THE_TOP):
                self._stack[-1] = _UNKNOWN

    def _meeting(
        self, stack: list[_Value], variables: dict[str, _Value], current_stack: list[_Value] | None
    ) -> tuple[list[_Value], dict[str, _Value]]:
        """What is known where a jump with this stack and these variables meets what was followed up to here."""
        if current_stack is None:
            return list(stack), dict(variables)
        names = variables.keys() & self._variables.keys()
        # A variable that one of the branches has not set may be unbound: nothing is known of it.
        values = {name: _merged(variables[name], self._variables[name]) for name in names}
        return [_merged(*pair) for pair in zip(stack, current_stack, strict=False)], values

    def _stack_after(self, effect: int) -> list[_Value]:
        """The stack with `effect` unknown values more; where that is negative, with fewer values."""
        stack = self._stack or []
        return [*stack, *[_UNKNOWN] * effect] if effect >= 0 else stack[:effect]

    def _push(self, *values: _Value) -> bool:
        assert self._stack is not None
        self._stack += values
        return True

    def _pop(self, count: int) -> list[_Value]:
        """The upper values of the stack; the last one is the top."""
        assert self._stack is not None
        values = [self._stack.pop() if self._stack else _UNKNOWN for _ in range(count)]
        return values[::-1]

    def _moves(self, instruction: dis.Instruction) -> bool:
        """Handles local variables, and values that move on the stack."""
        op = instruction.opname
        if op in ("COPY", "SWAP"):
            deepest, *above = self._pop(instruction.arg or 1)
            if op == "COPY" or not above:
                return self._push(deepest, *above, *([deepest] if op == "COPY" else ()))
            return self._push(above[-1], *above[:-1], deepest)
        if "_FAST" not in op or op.startswith("DELETE"):
            return False
        names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
        for name, verb in zip(names, _FAST.findall(op), strict=False):
            if verb == "STORE":
                self._variables[name] = self._pop(1)[0]
            else:
                self._push(self._variables.get(name, _UNKNOWN))
        return True

    def _reads(self, instruction: dis.Instruction) -> bool:
        """Handles constants, globals, attributes, items and unpacking."""
        op, effect = instruction.opname, dis.stack_effect(instruction.opcode, instruction.arg)
        if op in ("LOAD_CONST", "LOAD_SMALL_INT"):
            return self._push(_Value(is_known=True, object=instruction.argval))
        if op == "LOAD_GLOBAL":
            # Twice where a null comes with it: a call takes two values off the stack, and a class may be either.
            return self._push(*[_Value(object=self._scope.get(instruction.argval, MISSING))] * effect)
        if op == "LOAD_DEREF":
            return self._push(self._variables.get(instruction.argval, self._read(Variable(instruction.argval))))
        if op in ("LOAD_ATTR", "LOAD_METHOD"):
            value = self._read(instruction.argval)._replace(owner=self._pop(1)[0].names)
            return self._push(*[value] * (effect + 1))
        # Up to Python 3.13 an index has an instruction of its own, from 3.14 on it is an operator.
        if op == "BINARY_SUBSCR" or (op == "BINARY_OP" and instruction.argrepr == "[]"):
            return self._push(self._named_by(self._pop(2)[1]))
        if op == "UNPACK_SEQUENCE":
            self._pop(1)
            return self._push(*(self._read(i) for i in reversed(range(instruction.arg or 0))))
        return False

    def _read(self, name: object) -> _Value:
        """What is known of a value that is read under a name."""
        # By type as well, since `1 == True` and `1 == 1.0`.
        names = frozenset(number for number in self._numbers if type(number) is type(name) and number == name)
        return _Value(names, is_known=True) if names else _UNKNOWN

    def _named_by(self, value: _Value) -> _Value:
        """What is read by a key, by a text with a key path, or by a function that returns a part of its argument."""
        if isinstance(value.object, types.CodeType):
            names = _followed(_Flow(value.object, self._scope, self._numbers, hands_back=False)).returned
            return _Value(names, is_known=True) if names else _UNKNOWN
        read = self._read(value.object)
        if read.names or not isinstance(value.object, str):
            return read
        last = next((key for key in reversed(_BETWEEN_KEYS.split(value.object)) if key), "")
        return self._read(int(last) if last.isdecimal() else last)

    def _stores(self, instruction: dis.Instruction) -> bool:
        """Handles what is stored under the name of an attribute, an item or a variable."""
        if instruction.opname == "STORE_ATTR":
            self._hand_on(instruction.argval, self._pop(2)[0])
        elif instruction.opname == "STORE_SUBSCR":
            value, _, key = self._pop(3)
            self._hand_on(key.object, value)
        elif instruction.opname == "STORE_DEREF":
            value = self._variables[instruction.argval] = self._pop(1)[0]
            self._hand_on(Variable(instruction.argval), value)
        else:
            return False
        return True

    def _hand_on(self, name: object, value: _Value) -> None:
        """A value gets this name. If it was computed from the number of that name, the number is computed anew."""
        if value.is_computed:
            self.computed |= value.names & self._read(name).names

    def _makes(self, instruction: dis.Instruction) -> bool:
        """Handles what makes a new value: functions, operators, tuples, lists and dicts."""
        op, count = instruction.opname, instruction.arg or 0
        if op in ("MAKE_FUNCTION", "SET_FUNCTION_ATTRIBUTE"):  # the code, or the function, is on top of its parts
            return self._push(self._pop(1 - dis.stack_effect(instruction.opcode, instruction.arg))[-1])
        if op == "BINARY_OP":
            return self._push(_result(*self._pop(2)))
        if op in ("BUILD_TUPLE", "BUILD_LIST"):
            return self._push(_container(self._pop(count)))
        if op == "BUILD_MAP":
            items = self._pop(2 * count)
            keys, values = [key.object for key in items[::2]], items[1::2]
        # Up to Python 3.13: the keys are one constant.
        elif op == "BUILD_CONST_KEY_MAP":
            *values, of_keys = self._pop(count + 1)
            keys = of_keys.object
        else:
            return False
        for key, value in zip(keys, values, strict=False):
            self._hand_on(key, value)
        return self._push(_container(values))

    def _calls(self, instruction: dis.Instruction) -> bool:
        """Handles calls: PRECALL and CALL in Python 3.11, CALL_KW from 3.13 on."""
        op, count = instruction.opname, instruction.arg or 0
        if op == "KW_NAMES":
            self._keywords = self.code.co_consts[count]
        elif op == "CALL" and _PRECALLS:
            self._push(self._pop(2)[1])
        elif op in ("CALL", "PRECALL", "CALL_KW"):
            if op == "CALL_KW":
                self._keywords = self._pop(1)[0].object
            args = self._pop(count)
            self._push(*[self._call(args, self._pop(2))] * (2 if op == "PRECALL" else 1))
        else:
            return False
        return True

    def _call(self, args: list[_Value], called: list[_Value]) -> _Value:
        """The result of a call. An argument has the name of its keyword, of a class's field, or in a text beside it."""
        positional, keywords = args[: len(args) - len(self._keywords)], self._keywords
        self._keywords = ()
        for name, value in zip(keywords, args[len(positional) :], strict=True):
            self._hand_on(name, value)
        for cls in [value.object for value in called if isinstance(value.object, type)][:1]:
            fields = inspect.getattr_static(cls, "__match_args__", ())
            for name, value in zip(fields if type(fields) is tuple else (), positional, strict=False):
                self._hand_on(name, value)
        # `setattr(m, "n", m.n + 1)`, `tree_at(lambda m: m.n, m, m.n + 1)`, `at(m)["n"].set(m.n + 1)`
        texts = [value.object for value in positional if type(value.object) is str]
        places = (self._named_by(value).names for value in positional if isinstance(value.object, str | types.CodeType))
        self._hand_on_all(args, next(filter(None, places), called[0].owner))
        names = frozenset[Name]().union(*(value.names for value in args), *(self._read(text).names for text in texts))
        return _Value(names, any(value.names for value in args))

    def _hand_on_all(self, args: list[_Value], names: frozenset[Name]) -> None:
        """Hands on, under these names, what is computed from them, and what functions compute from their argument."""
        for value in args if names else ():
            self.computed |= value.names & names if value.is_computed else frozenset()
            if isinstance(value.object, types.CodeType):
                parameters: set[Name] = {Variable(name) for name in value.object.co_varnames[:1]}
                inner = _followed(_Flow(value.object, self._scope, parameters, True))
                self.computed |= names if inner.computed else set()


def _followed(flow: _Flow) -> _Flow:
    """Follows all instructions of a flow's code."""
    for instruction in instructions_of(flow.code):
        flow.follow(instruction)
    return flow
