# SPDX-License-Identifier: Apache-2.0
"""Where `graftax.tree` and `jax.tree` differ on purpose: one table. They run in a process of their own,
as some of JAX's errors cost the process a part of its recursion limit.
"""

import textwrap

import pytest

from watchdog import python

COMMON = """
    import dataclasses, operator
    from collections import OrderedDict, defaultdict
    import jax, graftax.tree
    def outcome(program, t):
        try:
            return repr(program(t))
        except BaseException as error:
            return type(error).__name__
    class Node:
        def __init__(self, *children, fail=None):
            self.children, self.fail = children, fail
    def opened(n):
        if n.fail:
            raise n.fail
        return n.children, None
    jax.tree_util.register_pytree_node(Node, opened, lambda data, c: list(c))
    First, Second = (
        jax.tree_util.register_dataclass(dataclasses.make_dataclass(name, ["x"])) for name in ("First", "Second")
    )
    def stop(error):
        raise error
    class Key:
        def __init__(self, error):
            self.error = error
        def __lt__(self, other):
            raise self.error
    cycle = [1]
    cycle.append(cycle)
    deep = 1
    for _ in range(20_000):
        deep = [deep]
    of_nan = {float("nan"): 1, 2.0: 3, 1.0: 4}
"""

RECURSION = ("RecursionError", "SystemError")

# (what is asked, what JAX gives, what graftax gives, why)
DIFFERENCES = {
    "StopIteration from f": (
        "lambda t: t.map(lambda v: stop(StopIteration()), [1])",
        ("RuntimeError",),
        "StopIteration",
        "what f raises comes out as it is",
    ),
    "interrupts while keys are sorted": (
        "lambda t: t.leaves({Key(KeyboardInterrupt()): 1, Key(KeyboardInterrupt()): 2})",
        ("ValueError",),
        "KeyboardInterrupt",
        "an interrupt is no error of the keys",
    ),
    "NaN among the keys": (
        "lambda t: t.leaves(of_nan) == [of_nan[k] for k in sorted(of_nan)]",
        ("False", "True"),
        "True",
        "the order of sorted(), where keys have none",
    ),
    "a flatten that raises where another type is due": (
        "lambda t: t.map(lambda *a: a, [[1]], [Node(fail=KeyError())])",
        ("KeyError",),
        "ValueError",
        "the wrong type is the fault, and is named",
    ),
    "no treedef, to unflatten": (
        "lambda t: t.unflatten(3, [])",
        ("AttributeError",),
        "TypeError",
        "names what was given",
    ),
    "no treedef, to treedef_tuple": (
        "lambda t: getattr(t, 'treedef_tuple', jax.tree_util.treedef_tuple)([3])",
        ("RuntimeError",),
        "TypeError",
        "names what was given",
    ),
    "too many leaves, to walk": (
        "lambda t: t.structure([1]).walk(lambda c, d: c, lambda v: v, [1, 2])",
        ("[1]", "(1,)", "ValueError", "TypeError"),
        "ValueError",
        "counted, as in unflatten",
    ),
    "walk without f_leaf": (
        "lambda t: t.structure([1]).walk(lambda c, d: c, None, [1])",
        ("TypeError",),
        "(1,)",
        "the signature of both allows None",
    ),
    "transposing what has no leaves outside": (
        "lambda t: t.transpose(t.structure(()), t.structure([0]), ())",
        ("ValueError",),
        "[()]",
        "the inner structure comes outside, as always",
    ),
    "treedefs of both kinds": (
        "lambda t: t.structure([1]) != graftax.tree.structure([1]) and t is jax.tree",
        ("False",),
        "False",
        "they are never equal, and JAX's != says False; from_jax and to_jax turn one into the other",
    ),
    "!= of a treedef and something else": (
        "lambda t: t.structure([1]) != 3",
        ("False",),
        "True",
        "!= is the opposite of ==",
    ),
    "two dataclasses with equal fields": (
        "lambda t: t.structure(First(1)) == t.structure(Second(1))",
        ("True", "False"),
        "False",
        "the class is part of the structure",
    ),
    # From Python 3.14 on, JAX's walk is given enough of the stack.
    "a deep tree": ("lambda t: len(t.leaves(deep))", (*RECURSION, "1"), "1", "the walk has a stack of its own"),
    "a cycle": (
        "lambda t: t.leaves(cycle)",
        ("SystemError", "RecursionError"),
        "RecursionError",
        "says what contains itself",
    ),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, tuple[str, str]]:
    """(ours, JAX's) of each row."""
    rows = [
        f"print(outcome({program}, graftax.tree), '|', outcome({program}, jax.tree))"
        for program, *_ in DIFFERENCES.values()
    ]
    end = "\nimport os, sys\nsys.stdout.flush()\nos._exit(0)"  # not the way out that needs what JAX lost
    lines = python(textwrap.dedent(COMMON) + "\n".join(rows) + end).splitlines()
    return {name: tuple(line.split(" | ")) for name, line in zip(DIFFERENCES, lines, strict=True)}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_difference_is_as_the_table_says(name, outcomes):
    _, theirs, ours, reason = DIFFERENCES[name]
    assert outcomes[name][0] == ours, reason
    assert outcomes[name][1] in theirs
