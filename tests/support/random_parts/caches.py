# SPDX-License-Identifier: Apache-2.0
"""Caches of functions and tables by type."""

from random_parts.part import Part

PARTS = {
    "a cache": Part(
        """
        import functools
        $k = {'a': 2.}
        class $S:
            def __init__(self): self.lr = 3.
        @functools.cache
        def $get(): return $S()
        @functools.lru_cache(maxsize=4)
        def $of(n): return n * $k['a']
        class $M:
            w = 2.
            @functools.cached_property
            def p(self): return self.w * 3
            @staticmethod
            @functools.cache
            def s(): return $k['a'] + 1
        class $T:
            @functools.lru_cache(8)
            def rows(self, n=1, *, start=0): return {'n': n + start}
        $m = $M(); $t = $T()
        """,
        ["$get().lr", "$of(2)", "$of(3)", "$m.p", "$M.s()", "$k['a']", "$t.rows()['n']", "$t.rows(2, start=3)['n']"],
        [
            "$get().lr = {v}",
            "$get.cache_clear()",
            "$of.cache_clear()",
            "$k['a'] = {v}",
            "$m.w = {v}",
            "vars($m).pop('p', 0)",
            "$M.s.cache_clear()",
            "$M.w = {v}",
            "$m.p = {v}",
            "$t.rows()['n'] = {i}",
            "$T.rows.cache_clear()",
            "$t = $T()",
        ],
        ["$get().lr += 1", "$get().new = {v}", "$k['a'] += 1", "vars($m).pop('p', 0)", "$t.rows()['n'] += 1"],
        ["$get().lr", "vars($m)", "$k", "$t.rows()"],
    ),
    "singledispatch": Part(
        """
        import functools
        @functools.singledispatch
        def $show(v): return 1.
        @$show.register
        def _(v: int): return 2.
        class $T: pass
        class $U($T): pass
        $t = $U()
        """,
        ["$show(1)", "$show('a')", "$show($t)", "$show(2.5)", "$show([1])", "len($show.registry)"],
        [
            "$show.register($T, lambda v: {v})",
            "$show.register($U, lambda v: {v})",
            "$show.register(str, lambda v: {v})",
            "$show.register(float)(lambda v: {v})",
            "$show.register(list, lambda v: {v})",
        ],
        ["$show.register(str, lambda v: {v})"],
        ["$show('b')"],
    ),
}
