# SPDX-License-Identifier: Apache-2.0
"""Functions with state, and those that are left behind."""

from random_parts.part import Part

PARTS = {
    "functions": Part(
        """
        import functools
        def $helper(x, k=2., *, table=[3.]): return x * k + table[0]
        $part = functools.partial($helper, k=5.)
        def $make():
            count = 0
            def step():
                nonlocal count
                count += 1
                return count
            return step
        $step = $make()
        def $mark(fn): fn.marks = getattr(fn, 'marks', 0) + 1; return fn.marks
        """,
        [
            "$helper(x)",
            "$part(x)",
            "$step()",
            "$helper.__defaults__[0]",
            "getattr($helper, 'marks', 0)",
            "$helper.__name__",
            "$part.keywords['k']",
        ],
        [
            "$helper.__defaults__ = ({v},)",
            "$helper.__kwdefaults__['table'][0] = {v}",
            "$part = functools.partial($helper, k={v})",
            "$step = $make()",
            "$helper.marks = {i}",
            "$helper.__name__ = 'h{i}'",
            "$helper.__code__ = (lambda x, k=1., *, table=None: x - k).__code__",
            "$helper.__kwdefaults__ = {'table': [{v}]}",
        ],
        ["$step()", "$mark($helper)", "$helper.__kwdefaults__['table'][0] += 1"],
        ["getattr($helper, 'marks', 0)", "$helper.__kwdefaults__", "$step.__closure__[0].cell_contents"],
    ),
    "functions that are left behind": Part(
        """
        import functools
        $w = jnp.ones(1)
        $rate = 2.
        class $Keep: pass
        $keep = $Keep()
        def $make(k): return lambda v: v * k * $rate + $w
        """,
        ["$make(2.)(x)", "$rate", "$w * 2", "getattr($keep, 'n', 0)"],
        ["$rate = {v}", "$w = $w + 1", "$keep.n = {i}", "$make = lambda k: lambda v: v + k"],
        [
            "$keep.last = lambda v: v * $rate + $w",
            "$keep.last = $make(3.)",
            "$keep.part = functools.partial($make(2.), x)",
        ],
        ["$keep.last(jnp.ones(1))", "$keep.last(2.)", "$rate", "$keep.part.func(1.)"],
    ),
}
