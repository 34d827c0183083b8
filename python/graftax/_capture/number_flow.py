# SPDX-License-Identifier: Apache-2.0
"""Which numbers the bytecode of a function computes anew: it reads one by a name, and hands the result on under it.

The instructions are gone over once, in their order, with a stack of what is known of each value. What an instruction
does that is not listed here leaves a value of which nothing is known.
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

    names: frozenset[Name] = frozenset()  # under which it was read, or what it is computed from
    is_computed: bool = False
    is_known: bool = False  # is it made of what was read under these names and of constants, and nothing else?
    handed: frozenset[Name] = frozenset()  # of such numbers among its items, where they are computed
    object: Any = MISSING  # if it is a constant or a class; the code, if it is a function made here
    owner: frozenset[Name] = frozenset()  # under which that was read whose attribute it is


_UNKNOWN = _Value()
_PRECALLS = "PRECALL" in dis.opmap  # Python 3.11
_FAST = re.compile("(LOAD|STORE)_FAST")  # one instruction may load or store two
_LEAVE_THE_TOP = ("POP_", "NOP", "RESUME", "STORE_", "DELETE_", "PUSH_", "COPY_FREE", "MAKE_CELL", "NOT_TAKEN")
_BETWEEN_KEYS = re.compile(r"[.\[\]'\"]+")  # of a path
_LEAVES = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "RAISE_VARARGS", "RERAISE", "RETURN_CONST")


def numbers_computed_anew(
    code: types.CodeType, scope: dict[str, Any], numbers: set[Name], hands_back: bool
) -> set[Name]:
    """Those of these numbers that the code computes anew.

    It stores the result under the name of the number (`m.n += 1`, `d["n"] = d["n"] + 1`, `nonlocal n; n += 1`), or
    calls a function with it (`d.update(n=d["n"] + 1)`, `replace(s, n=s.n + 1)`, `setattr(m, "n", m.n + 1)`,
    `tree_at(lambda m: m.n, m, m.n + 1)`, or the field of a class), or a method of what was read under that name
    (`at(m)["n"].set(m.n + 1)`), or it is an item of a dict (`d | {"n": d["n"] + 1}`). In place of the result there may
    be a function that computes it (`at(m)["n"].apply(lambda n: n + 1)`).

    Args:
        scope: the globals of the code.
        hands_back: whether results of the code may be arguments of the next call: then it may also return a number that
            it has computed from this number and constants alone (`return params, n + 1`).
    """
    return _followed(_Flow(code, scope, numbers, hands_back)).found


def _either(one: _Value, other: _Value) -> _Value:
    """What is known where two branches meet."""
    if one is other:
        return one
    return _Value(
        one.names | other.names,
        one.is_computed or other.is_computed,
        one.is_known and other.is_known,
        one.handed | other.handed,
        one.object if one.object is other.object else MISSING,
        one.owner | other.owner,
    )


def _result(*values: _Value) -> _Value:
    if any(isinstance(value.object, str | bytes | complex) for value in values):
        return _UNKNOWN
    names = frozenset[Name]().union(*(value.names for value in values))
    is_known = all(value.is_known for value in values)
    return _Value(names, bool(names), is_known, names if is_known and len(names) == 1 else frozenset())


def _container(values: list[_Value]) -> _Value:
    return _Value(handed=frozenset[Name]().union(*(value.handed for value in values)))


class _Flow:
    def __init__(self, code: types.CodeType, scope: dict[str, Any], numbers: set[Name], hands_back: bool) -> None:
        self.found: set[Name] = set()
        self.returned = frozenset[Name]()  # the names of what it returns as it was read
        self.code, self._scope, self._numbers, self._hands_back = code, scope, numbers, hands_back
        self._variables: dict[str, _Value] = {}
        self._stack: list[_Value] | None = []  # None behind a jump, up to where another one leads to
        # The stacks and the variables that jumps lead with, by offset.
        self._at: dict[int, tuple[list[_Value], dict[str, _Value]]] = {}
        self._keywords: tuple[str, ...] = ()  # of the next call, before Python 3.13
        if hands_back:
            parameters = code.co_argcount + code.co_kwonlyargcount
            self._variables = {name: self._read(Variable(name)) for name in code.co_varnames[:parameters]}

    def follow(self, part: dis.Instruction) -> None:
        if part.offset in self._at:
            self._stack, self._variables = self._meeting(*self._at[part.offset], self._stack)
        if self._stack is None or part.opname in ("CACHE", "EXTENDED_ARG"):
            return
        if "JUMP" in part.opname or part.opname in ("FOR_ITER", "SEND"):
            there = self._after(dis.stack_effect(part.opcode, part.arg, jump=True))
            before = self._at.get(part.argval)
            self._at[part.argval] = self._meeting(*before, there) if before else (there, dict(self._variables))
        if part.opname in ("RETURN_VALUE", *_LEAVES):
            if part.opname == "RETURN_VALUE":
                result = self._pop(1)[0]
                self.returned |= frozenset() if result.is_computed else result.names
                self.found |= result.handed if self._hands_back else frozenset()
            self._stack = None
        elif not any(part_of(part) for part_of in (self._moves, self._reads, self._stores, self._makes, self._calls)):
            self._stack = self._after(dis.stack_effect(part.opcode, part.arg))
            if self._stack and not part.opname.startswith(_LEAVE_THE_TOP):
                self._stack[-1] = _UNKNOWN

    def _meeting(
        self, stack: list[_Value], variables: dict[str, _Value], here: list[_Value] | None
    ) -> tuple[list[_Value], dict[str, _Value]]:
        """What is known where a jump with this stack and these variables meets what was followed up to here."""
        if here is None:
            return list(stack), dict(variables)
        names = variables.keys() & self._variables.keys()
        values = {name: _either(variables[name], self._variables[name]) for name in names}
        return [_either(*pair) for pair in zip(stack, here, strict=False)], values

    def _after(self, effect: int) -> list[_Value]:
        """The stack with so many more values, or less."""
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

    def _moves(self, part: dis.Instruction) -> bool:
        """Are these local variables, or values on the stack?"""
        op = part.opname
        if op in ("COPY", "SWAP"):
            first, *others = self._pop(part.arg or 1)
            if op == "COPY" or not others:
                return self._push(first, *others, *([first] if op == "COPY" else ()))
            return self._push(others[-1], *others[:-1], first)
        if "_FAST" not in op or op.startswith("DELETE"):
            return False
        names = part.argval if isinstance(part.argval, tuple) else (part.argval,)
        for name, does in zip(names, _FAST.findall(op), strict=False):
            if does == "STORE":
                self._variables[name] = self._pop(1)[0]
            else:
                self._push(self._variables.get(name, _UNKNOWN))
        return True

    def _reads(self, part: dis.Instruction) -> bool:
        op, effect = part.opname, dis.stack_effect(part.opcode, part.arg)
        if op in ("LOAD_CONST", "LOAD_SMALL_INT"):
            return self._push(_Value(is_known=True, object=part.argval))
        if op == "LOAD_GLOBAL":
            return self._push(*[_Value(object=self._scope.get(part.argval, MISSING))] * effect)  # with a null
        if op == "LOAD_DEREF":
            return self._push(self._variables.get(part.argval, self._read(Variable(part.argval))))
        if op in ("LOAD_ATTR", "LOAD_METHOD"):
            value = self._read(part.argval)._replace(owner=self._pop(1)[0].names)
            return self._push(*[value] * (effect + 1))
        if op == "BINARY_SUBSCR" or (op == "BINARY_OP" and part.argrepr == "[]"):
            return self._push(self._named_by(self._pop(2)[1]))
        if op == "UNPACK_SEQUENCE":
            self._pop(1)
            return self._push(*(self._read(i) for i in reversed(range(part.arg or 0))))
        return False

    def _read(self, name: object) -> _Value:
        names = frozenset(number for number in self._numbers if type(number) is type(name) and number == name)
        return _Value(names, is_known=True) if names else _UNKNOWN

    def _named_by(self, value: _Value) -> _Value:
        """What is read by a key, the path that a text may be, or a function that returns a part of what it is given."""
        if isinstance(value.object, types.CodeType):
            names = _followed(_Flow(value.object, self._scope, self._numbers, hands_back=False)).returned
            return _Value(names, is_known=True) if names else _UNKNOWN
        read = self._read(value.object)
        if read.names or not isinstance(value.object, str):
            return read
        last = next((key for key in reversed(_BETWEEN_KEYS.split(value.object)) if key), "")
        return self._read(int(last) if last.isdecimal() else last)

    def _stores(self, part: dis.Instruction) -> bool:
        if part.opname == "STORE_ATTR":
            self._hand_on(part.argval, self._pop(2)[0])
        elif part.opname == "STORE_SUBSCR":
            value, _, key = self._pop(3)
            self._hand_on(key.object, value)
        elif part.opname == "STORE_DEREF":
            value = self._variables[part.argval] = self._pop(1)[0]
            self._hand_on(Variable(part.argval), value)
        else:
            return False
        return True

    def _hand_on(self, name: object, value: _Value) -> None:
        if value.is_computed:
            self.found |= value.names & self._read(name).names

    def _makes(self, part: dis.Instruction) -> bool:
        op, count = part.opname, part.arg or 0
        if op in ("MAKE_FUNCTION", "SET_FUNCTION_ATTRIBUTE"):  # the code, or the function, lies above what it is given
            return self._push(self._pop(1 - dis.stack_effect(part.opcode, part.arg))[-1])
        if op == "BINARY_OP":
            return self._push(_result(*self._pop(2)))
        if op in ("BUILD_TUPLE", "BUILD_LIST"):
            return self._push(_container(self._pop(count)))
        if op == "BUILD_MAP":
            items = self._pop(2 * count)
            keys, values = [key.object for key in items[::2]], items[1::2]
        elif op == "BUILD_CONST_KEY_MAP":
            *values, of_keys = self._pop(count + 1)
            keys = of_keys.object
        else:
            return False
        for key, value in zip(keys, values, strict=False):
            self._hand_on(key, value)
        return self._push(_container(values))

    def _calls(self, part: dis.Instruction) -> bool:
        op, count = part.opname, part.arg or 0
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
        """The result of a call. Arguments have the names of keywords, of a class's fields, or of a text before them."""
        positional, keywords = args[: len(args) - len(self._keywords)], self._keywords
        self._keywords = ()
        for name, value in zip(keywords, args[len(positional) :], strict=True):
            self._hand_on(name, value)
        for cls in [value.object for value in called if isinstance(value.object, type)][:1]:
            fields = inspect.getattr_static(cls, "__match_args__", ())
            for name, value in zip(fields if type(fields) is tuple else (), positional, strict=False):
                self._hand_on(name, value)
        texts = [value.object for value in positional if type(value.object) is str]
        places = (self._named_by(value).names for value in positional if isinstance(value.object, str | types.CodeType))
        self._hand_on_all(args, next(filter(None, places), called[0].owner))
        names = frozenset[Name]().union(*(value.names for value in args), *(self._read(text).names for text in texts))
        return _Value(names, any(value.names for value in args))

    def _hand_on_all(self, args: list[_Value], names: frozenset[Name]) -> None:
        """Hands on, under these names, what is computed from them, and what functions compute from what they get."""
        for value in args if names else ():
            self.found |= value.names & names if value.is_computed else frozenset()
            if isinstance(value.object, types.CodeType):
                parameters: set[Name] = {Variable(name) for name in value.object.co_varnames[:1]}
                self.found |= names if _followed(_Flow(value.object, self._scope, parameters, True)).found else set()


def _followed(flow: _Flow) -> _Flow:
    for instruction in instructions_of(flow.code):
        flow.follow(instruction)
    return flow
