# SPDX-License-Identifier: Apache-2.0
"""Random programs of what Python code reads and changes around a function: run plainly and jitted, step by step.

A program is put together of parts: a class with a name that its bases have, an enum with state, a cache, a table of
`singledispatch`. Each has expressions that the function reads, statements that it runs, and changes that happen between
its calls. `python tests/support/random_programs.py 100 200` tries the seeds from 100 to 199 and prints what differs.
"""

from __future__ import annotations

import random
import sys
import textwrap
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import graftax


class Part(NamedTuple):
    """`$` stands for a prefix of its own. What is a list of texts is drawn from."""

    setup: str
    reads: list[str]  # expressions of x and n in the function: numbers, arrays, texts
    changes: list[str]  # statements between calls
    effects: Sequence[str] = ()  # statements in the function
    state: Sequence[str] = ()  # expressions that are compared after each call


PARTS: dict[str, Part] = {
    "attributes of bases": Part(
        """
        class $Root: rate = 2.
        class $Base($Root): table = [3.]
        class $Mixin: pass
        class $C($Base, $Mixin): pass
        $c = $C()
        """,
        [
            "$c.rate",
            "$C.rate",
            "$c.table[0]",
            "getattr($c, 'rate')",
            "getattr($c, 'bonus', 1.)",
            "hasattr($c, 'bonus')",
        ],
        [
            "$Root.rate = {v}",
            "$Base.rate = {v}",
            "$C.rate = {v}",
            "$c.rate = {v}",
            "$Mixin.bonus = {v}",
            "$C.table = [{v}]",
            "$Base.table[0] = {v}",
            "$C.__bases__ = ($Mixin, $Base)",
            "vars($c).clear()",
            "$C.rate = property(lambda self: {v})",
        ],
        [
            "$c.rate = $c.rate + 1",
            "$C.count = getattr($C, 'count', 0) + 1",
            "$Base.table[0] += 1",
            "setattr($Root, 'rate', {v})",
        ],
        ["$c.rate", "$C.__dict__.get('count')", "$Base.table", "vars($c)"],
    ),
    "special methods": Part(
        """
        class $V:
            k = 2.
            def __call__(self, x): return x * self.k
        $v = $V()
        """,
        [
            "$v(x)",
            "bool($v)",
            "$v == 3",
            "len($v) if hasattr($v, '__len__') else -1",
            "'a' in $v if hasattr($V, '__contains__') else 5",
            "str($v)[:3]",
        ],
        [
            "$V.__bool__ = lambda s: {b}",
            "$V.__len__ = lambda s: {i}",
            "$V.__eq__ = lambda s, o: {b}",
            "$V.__contains__ = lambda s, o: {b}",
            "$V.__call__ = lambda s, x: x * {v}",
            "$V.__getattr__ = lambda s, name: {v}",
            "$V.__str__ = lambda s: 'a{i}'",
            "$V.k = {v}",
            "$v.k = {v}",
            "$v.__class__ = type('Other', ($V,), dict(k={v}))",
        ],
        ["$V.k = $V.k + 1", "$V.__len__ = lambda s: {i}", "$v.k = {v}"],
        ["$V.k", "vars($v)"],
    ),
    "an enum with state": Part(
        """
        import enum
        class $Mode(enum.Enum):
            FAST = {'rate': 2.}
            SLOW = {'rate': 5.}
            def __init__(self, v): self.uses = 0
        class $Plain(enum.IntEnum):
            ONE = 1
            TWO = 2
        $mode = $Mode.FAST
        """,
        [
            "$mode.value['rate']",
            "$Mode.SLOW.value['rate']",
            "$Mode['FAST'].uses",
            "$Plain.ONE * 3",
            "sum(m.value['rate'] for m in $Mode)",
            "$Plain(2).name",
        ],
        [
            "$Mode.FAST.value['rate'] = {v}",
            "$mode = $Mode.SLOW",
            "$mode = $Mode.FAST",
            "$Mode.FAST.uses = {i}",
            "$Mode.extra = {v}",
            "$Mode.SLOW.value['rate'] += 1",
        ],
        ["$mode.uses += 1", "$Mode.SLOW.value['rate'] = {v}", "$Mode.FAST.value.setdefault('k', 0)"],
        ["$Mode.FAST.uses", "$Mode.SLOW.uses", "$Mode.FAST.value", "$Mode.SLOW.value"],
    ),
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
    "a metaclass": Part(
        """
        class $Meta(type):
            scale = 2.
            @property
            def s(cls): return cls.scale
            def __len__(cls): return len(cls.items)
            def __contains__(cls, v): return v in cls.items
            def __iter__(cls): return iter(cls.items)
            def __getitem__(cls, i): return cls.items[i]
        class $C(metaclass=$Meta): items = [1, 2]
        """,
        ["$C.s", "len($C)", "1 in $C", "sum($C)", "$C[0]", "$C.scale", "bool($C)"],
        [
            "$Meta.scale = {v}",
            "$C.scale = {v}",
            "$C.items = [{i}]",
            "$C.items.append({i})",
            "$Meta.s = property(lambda cls: {v})",
            "$Meta.__len__ = lambda cls: {i}",
            "$Meta.__bool__ = lambda cls: {b}",
        ],
        ["$C.items.append(7)", "$C.scale = {v}", "$Meta.scale = $Meta.scale + 1"],
        ["$C.items", "$Meta.scale", "$C.__dict__.get('scale')"],
    ),
    "default factories": Part(
        """
        from dataclasses import dataclass, field, fields, replace
        $base = {'k': 2.}
        class $Ids:
            n = 0
            def next(self): self.n += 1; return self.n
        $ids = $Ids()
        @dataclass
        class $C:
            d: dict = field(default_factory=$base.copy)
            i: int = field(default_factory=$ids.next)
            j: float = 4.
        """,
        [
            "$C().d['k']",
            "$C(i=1).j",
            "$C(d={}).i",
            "len(fields($C))",
            "replace($C(i=2), j=1.).i",
            "repr($C(d={}, i=1))",
        ],
        [
            "$base['k'] = {v}",
            "$ids.n = {i}",
            "$C.j = {v}",
            "$C.__repr__ = lambda s: 'r{i}'",
            "$C.__post_init__ = lambda s: setattr(s, 'j', {v})",
            "$C.__init__.__defaults__ = tuple(list($C.__init__.__defaults__)[:-1]) + ({v},)",
        ],
        ["$base['k'] += 1", "$ids.n += 2", "$ids.next()"],
        ["$base", "$ids.n"],
    ),
    "numbers": Part(
        """
        import contextlib, decimal, datetime, math, fractions
        $n = [3]
        def $safe(v):
            try: return float(v)
            except: return 0.
        def $quiet(v):
            r = -1.
            with contextlib.suppress(Exception): r = math.sqrt(v)
            return r
        def $last(v):
            r = -2.
            try: r = len(range(v))
            finally: return r
        def $dec(v):
            try: return float(decimal.Decimal(v))
            except Exception: return -3.
        """,
        [
            "$safe(n)",
            "$quiet(n)",
            "$last(n)",
            "$dec(n)",
            "$safe($n[0])",
            "np.float32(n) * 2",
            "int(n) // 2",
            "round(n / 3, 1)",
            "jnp.asarray(n).dtype.name",
            "f'{n:03d}'",
            "math.floor(n / 2)",
            "bool(n % 2)",
            "[1, 2, 3][n % 3]",
            "divmod(n, 3)[1]",
            "str(datetime.timedelta(minutes=n))",
            "np.int8(n % 100) + 1",
            "float(fractions.Fraction(n, 7))",
            "n in (1, 4)",
            "max(n, 3)",
            "{1: 2.}.get(n, 5.)",
        ],
        ["$n[0] = {i}", "$n[0] += 1", "$n = [{i}]"],
        ["$n[0] += 1", "$n.append(n)", "$n[0] = n"],
        ["$n"],
    ),
    "the thread": Part(
        """
        import threading, contextvars
        $local = threading.local()
        $local.v = 2.
        $var = contextvars.ContextVar('$var', default=3.)
        $var.set(4.)
        def $elsewhere(fn, *args):
            out = []
            thread = threading.Thread(target=lambda: out.append(fn(*args)))
            thread.start(); thread.join()
            return out[0]
        """,
        ["$local.v", "$var.get()", "getattr($local, 'w', 1.)", "hasattr($local, 'w')", "len(vars($local))"],
        ["$local.v = {v}", "$var.set({v})", "$local.w = {v}", "$local.__dict__.pop('w', 0)"],
        ["$local.v += 1", "$local.w = n", "$var.set($var.get() + 1)"],
        ["$local.v", "$var.get()", "vars($local)"],
    ),
    "computed names": Part(
        """
        import operator, types
        class $Cfg: alpha, beta = 1., 2.
        $cfg = $Cfg()
        $ns = types.SimpleNamespace(alpha=3., inner=types.SimpleNamespace(beta=4.))
        $names = ['alpha']
        $get = operator.attrgetter('inner.beta')
        """,
        [
            "sum(getattr($cfg, k) for k in ('alpha', 'beta'))",
            "getattr($cfg, $names[0])",
            "$get($ns)",
            "operator.attrgetter('alpha')($Cfg)",
            "'{0.alpha}'.format($cfg)",
            "'%s' % $cfg.beta",
            "f'{$ns.inner.beta}'",
            "getattr($cfg, 'al' + 'pha')",
            "sorted(k for k in vars($Cfg) if k[0] != '_')",
            "len(dir($ns)) > 0",
            "vars($ns)['alpha']",
        ],
        [
            "$Cfg.alpha = {v}",
            "$Cfg.beta = {v}",
            "$cfg.alpha = {v}",
            "$ns.alpha = {v}",
            "$ns.inner.beta = {v}",
            "$names[0] = 'beta'",
            "$Cfg.gamma = {v}",
            "del $ns.alpha; $ns.alpha = {v}",
        ],
        [
            "setattr($cfg, $names[0], {v})",
            "setattr($Cfg, 'beta', $Cfg.beta + 1)",
            "$ns.inner.beta += 1",
            "vars($ns).update(q=n)",
        ],
        ["vars($cfg)", "$Cfg.beta", "$Cfg.alpha", "vars($ns.inner)", "$ns.alpha"],
    ),
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
    "mappings": Part(
        """
        import collections
        class $D(dict):
            hits = 0
            def __missing__(self, k): self.hits += 1; return 7.
        $d = $D(a=2.)
        class $O(collections.OrderedDict):
            def __setitem__(self, k, v): super().__setitem__(k, v); self.last = k
        $o = $O(a=1.)
        $dd = collections.defaultdict(list, a=[1])
        $chain = collections.ChainMap({'a': 1.}, {'b': 2.})
        """,
        [
            "$d['a']",
            "$d['zz']",
            "list($o)",
            "len($dd['q'])",
            "$chain['b']",
            "$chain.get('a')",
            "$o.last",
            "sorted($dd)",
            "$d.hits",
        ],
        [
            "$d['a'] = {v}",
            "$o['k{i}'] = {v}",
            "$dd['q'].append({i})",
            "$chain.maps[0]['b'] = {v}",
            "$o.move_to_end('a')",
            "$D.__missing__ = lambda s, k: {v}",
            "$dd.default_factory = lambda: [1, 2]",
            "del $dd['a']; $dd['a'] = [2]",
        ],
        ["$d['n'] = n", "$o['x'] = 2.", "$dd['r'].append(n)", "$chain['a'] = {v}", "$o.pop('x', 0)"],
        ["dict($d)", "$d.hits", "list($o.items())", "dict($dd)", "[dict(m) for m in $chain.maps]", "$o.last"],
    ),
    "abstract classes": Part(
        """
        import abc, typing
        class $Reg(abc.ABC): pass
        @typing.runtime_checkable
        class $CanGo(typing.Protocol):
            def go(self): ...
        class $A:
            __match_args__ = ('u',)
            def __init__(self): self.u, self.w = 2., 3.
        $a = $A()
        def $match(v):
            match v:
                case $A(2.): return 1.
                case $A(u): return u
        """,
        [
            "isinstance($a, $Reg)",
            "isinstance($a, $CanGo)",
            "issubclass($A, $Reg)",
            "$match($a)",
            "len($A.__subclasses__())",
            "type($a).__name__",
            "$a.__class__ is $A",
        ],
        [
            "$Reg.register($A)",
            "$A.go = lambda s: 1",
            "$A.__match_args__ = ('w',)",
            "$a.u = {v}",
            "$a.w = {v}",
            "$keep = type('Sub', ($A,), {})",
            "$A.__name__ = 'N{i}'",
            "del $A.go",
        ],
        ["$a.u = $a.u + 1", "$A.go = lambda s: 1"],
        ["vars($a)", "hasattr($A, 'go')"],
    ),
    "descriptors": Part(
        """
        class $Desc:
            def __init__(self, v): self.v = v
            def __set_name__(self, owner, name): self.name = name
            def __get__(self, obj, cls): return self.v if obj is None else obj.__dict__.get(self.name, self.v)
            def __set__(self, obj, value): obj.__dict__[self.name] = value * 2
        class $S:
            __slots__ = ('a', '__dict__')
            d = $Desc(3.)
            @property
            def p(self): return self.a + 1
            @classmethod
            def cm(cls): return cls.d
            @staticmethod
            def sm(): return 6.
        $s = $S(); $s.a = 2.
        """,
        ["$s.d", "$S.d", "$s.p", "$s.cm()", "$s.sm()", "$s.a"],
        [
            "$s.d = {v}",
            "vars($S)['d'].v = {v}",
            "$s.a = {v}",
            "$S.p = property(lambda s: {v})",
            "$S.cm = classmethod(lambda c: {v})",
            "$S.sm = staticmethod(lambda: {v})",
            "$Desc.__get__ = lambda s, o, c: {v}",
            "vars($s).clear()",
        ],
        ["$s.d = n", "$s.a += 1", "vars($S)['d'].v += 1"],
        ["vars($s)", "$s.a", "vars($S)['d'].v"],
    ),
    "numbers in C containers": Part(
        """
        import array, bisect, collections, heapq, itertools, operator, statistics, struct
        $q = collections.deque([3, 1], maxlen=3)
        $a = array.array('d', [1., 2.])
        $h = [2, 5]
        $count = collections.Counter(a=1)
        $table = {}
        """,
        [
            "list($q)",
            "sum($q)",
            "$a[0] * 2",
            "$a.tolist()",
            "bisect.bisect($h, n)",
            "heapq.nsmallest(1, [n, *$h])",
            "list(itertools.accumulate([n, 1, 2]))",
            "list(itertools.repeat(2, n))[-1]",
            "struct.unpack('<i', struct.pack('<i', n))[0]",
            "array.array('i', [n, 2]).tolist()",
            "collections.Counter([n, 3, 3]).most_common(1)",
            "list(collections.deque([1, 2, n], maxlen=2))",
            "statistics.mean([n, 2])",
            "operator.index(n) + 1",
            "bytes([n, 1]).hex()",
            "sorted({n, 3, 7})",
            "dict(zip('ab', (n, 2)))['a']",
            "$count['a'] + $count['b']",
            "$table.get(n, -1)",
            "int.from_bytes(n.to_bytes(2, 'big'), 'big')",
            "pow(n, 2, 7)",
            "slice(n).indices(4)[1]",
            "'abcdefghijk'[n]",
        ],
        [
            "$q.append({i})",
            "$h.append(9)",
            "$count['a'] = {i}",
            "$table[{i}] = {v}",
            "$q = collections.deque([{i}])",
            "$h[0] = 1",
        ],
        ["$q.append(n)", "heapq.heappush($h, n)", "$count['b'] += n", "$table[n] = 2", "$table.setdefault('k', n)"],
        ["list($q)", "$h", "dict($count)", "$table"],
    ),
    "work of threads": Part(
        """
        import concurrent.futures, queue, threading
        $cfg = {'k': 2.}
        class $Box:
            rate = 3.
            def __init__(self): self.seen = []
        $box = $Box()
        def $work(v): return v * $cfg['k'] + $box.rate
        def $in_thread(v):
            out = []
            thread = threading.Thread(target=lambda: out.append($work(v)))
            thread.start()
            thread.join()
            return out[0]
        def $in_pool(v):
            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                return list(pool.map($work, [v, 1]))
        def $through_queue(v):
            q = queue.Queue()
            q.put($work(v))
            return q.get()
        def $noting(v):
            thread = threading.Thread(target=$box.seen.append, args=(v,))
            thread.start()
            thread.join()
        """,
        [
            "$in_thread(2)",
            "$in_pool(3)",
            "$through_queue(2)",
            "len($box.seen)",
            "$work(n)",
            "threading.active_count() > 0",
        ],
        ["$cfg['k'] = {v}", "$Box.rate = {v}", "$box.rate = {v}", "$box.seen.append({i})", "$work = lambda v: v + {v}"],
        ["$box.seen.append(1)", "$noting(4)", "$noting(n)", "$noting({'n': n + 1})", "$cfg['k'] += 1"],
        ["$cfg", "$box.seen", "vars($box)"],
    ),
    "generators and contexts": Part(
        """
        import contextlib
        $log = []
        $k = [2.]
        class $Swallows:
            count = 0
            def __enter__(self): self.count += 1; return self
            def __exit__(self, *error): return True
        $s = $Swallows()
        @contextlib.contextmanager
        def $scaled(v):
            before, $k[0] = $k[0], v
            try: yield
            finally: $k[0] = before
        def $items(n):
            try:
                for i in range(n): yield i * $k[0]
            except ValueError: yield -1.
            finally: $log.append(1)
        def $inside(v):
            result = -1.
            with $s: result = float(v) * $k[0]
            return result
        def $under(v):
            with $scaled(v): return $k[0]
        def $first(v): return next(i for i in $items(v) if i >= 0)
        """,
        ["$inside(n)", "$under(n)", "sum($items(3))", "sum($items(n))", "$first(n)", "$s.count", "len($log)", "$k[0]"],
        ["$k[0] = {v}", "$Swallows.__exit__ = lambda s, *e: True", "$s.count = {i}", "$log.clear()"],
        ["$k[0] += 1", "$inside(3)", "$log.append(n)", "$s.__enter__()"],
        ["$k", "$log", "$s.count"],
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

WRAPPERS = [
    "{read}",
    "(lambda: {read})()",
    "[{read} for _ in range(1)][0]",
    "$$_guard(lambda: {read})",
    "$$_final(lambda: {read})",
    "$$_quiet(lambda: {read})",
]
HEAD = """
import contextlib
def _guard(read):
    try: return read()
    except Exception as error: return type(error).__name__
def _final(read):
    try: result = read()
    except: result = 'failed'
    finally: return result
def _quiet(read):
    result = 'quiet'
    with contextlib.suppress(Exception): result = read()
    return result
"""


class Program(NamedTuple):
    source: str
    steps: list[str]  # an empty text is a call, another one a change
    numbers: list[int]  # what is given as n, one for each call
    state: list[str]


def _filled(rng: random.Random, text: str, prefix: str) -> str:
    for name, value in (
        ("{v}", lambda: str(float(rng.randrange(2, 90)))),
        ("{i}", lambda: str(rng.randrange(2, 9))),
        ("{b}", lambda: str(rng.random() < 0.5)),
    ):
        while name in text:
            text = text.replace(name, value(), 1)
    return text.replace("$$", "").replace("$", prefix)


def make(seed: int) -> Program:
    """The program of a seed."""
    rng = random.Random(seed)
    names = rng.sample(sorted(PARTS), rng.choice((1, 1, 2, 3)))
    source, body, reads, changes, state = [HEAD], list[str](), list[str](), list[str](), list[str]()
    for number, name in enumerate(names):
        part, prefix = PARTS[name], f"p{number}"
        source.append(textwrap.dedent(part.setup).replace("$", prefix))
        body += [
            _filled(rng, e, prefix) for e in rng.sample(part.effects, min(len(part.effects), rng.choice((0, 0, 1, 2))))
        ]
        for read in rng.sample(part.reads, rng.choice((1, 1, 2, 3))):
            reads.append(_filled(rng, rng.choice(WRAPPERS).replace("{read}", read), prefix))
        changes += [_filled(rng, change, prefix) for change in rng.sample(part.changes, min(len(part.changes), 4))]
        state += [text.replace("$", prefix) for text in part.state]
    lines = [f"r{i} = {read}" for i, read in enumerate(reads)] + body
    rng.shuffle(lines)
    shuffled = [*lines, f"return x * n, [{', '.join(f'r{i}' for i in range(len(reads)))}]"]
    if rng.random() < 0.3:  # in a helper
        source.append("def inner(x, n):\n" + textwrap.indent("\n".join(shuffled), "    "))
        shuffled = ["return inner(x, n)"]
    source.append("def f(x, n):\n" + textwrap.indent("\n".join(shuffled), "    "))
    rng.shuffle(changes)
    steps = ["", ""]
    for change in changes[: rng.choice((1, 2, 3))]:
        steps += [change, ""]
    count, changing = steps.count(""), rng.random() < 0.4
    numbers = [rng.randrange(1, 9) if changing else 3 for _ in range(count)]
    return Program("\n".join(source), [*steps, ""], [*numbers, 4], state)


def plain_values(value: Any) -> Any:
    """Arrays as lists, and numbers with their types."""
    if isinstance(value, jax.core.Tracer):
        return "TRACER"
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        return np.asarray(value).tolist()
    if isinstance(value, (list, tuple)):
        return [plain_values(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain_values(item) for key, item in value.items()}
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


def _outcome(run: Callable[[], Any]) -> Any:
    try:
        return plain_values(run())
    except graftax.GraftaxError:
        raise
    except Exception as error:
        return type(error).__name__


def observe(program: Program, wrap: Callable[[Any], Any]) -> Iterator[Any]:
    """What each call gives, and what is there after it."""
    module = types.ModuleType("users")
    vars(module).update(jnp=jnp, jax=jax, np=np)
    sys.modules["users"] = module
    exec(compile(program.source, "users.py", "exec", dont_inherit=True), vars(module))
    call, numbers, x = wrap(vars(module)["f"]), iter(program.numbers), jnp.ones(1)
    for step in program.steps:
        if step:
            yield _outcome(lambda step=step: exec(step, vars(module)))
            continue
        number = next(numbers)
        result = _outcome(lambda number=number: call(x, number))
        yield result, [_outcome(lambda text=text: eval(text, vars(module))) for text in program.state]


class Found(NamedTuple):
    compared: int
    difference: str | None  # without a warning
    refused: str | None


def compare(program: Program) -> Found:
    """Runs a program plainly and jitted until they differ, or it is refused."""
    expected = list(observe(program, lambda f: f))
    count = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for count, given in enumerate(observe(program, graftax.jit)):
                if is_error(expected[count]) and is_error(given):  # a call that raises has changed nothing
                    return Found(count, None, None)
                if given != expected[count] and not _told(caught):
                    text = f"step {count} {program.steps[count]!r}\n  plain {expected[count]}\n  jit   {given}"
                    return Found(count, text, None)
        except graftax.GraftaxError as error:
            return Found(count, None, str(error))
    return Found(count + 1, None, None)


def is_error(given: Any) -> bool:
    """Did a call raise?"""
    return isinstance(given, tuple) and isinstance(given[0], str)


def _told(caught: list[Any]) -> bool:
    """Was the user told that something is done once?"""
    return any(issubclass(warning.category, graftax.ImpureCallWarning) for warning in caught)


def main(first: int, last: int) -> None:
    compared = refused = faults = 0
    for seed in range(first, last):
        found = compare(make(seed))
        compared += found.compared
        if found.refused is not None:
            refused += 1
            print(seed, "refused", found.refused.splitlines()[0][:160], flush=True)
        if found.difference is not None:
            faults += 1
            print(seed, "DIFFERS", found.difference, flush=True)
        if seed % 100 == 99:
            jax.clear_caches()
    print(f"{last - first} programs, {compared} comparisons, {refused} refused, {faults} differ")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
