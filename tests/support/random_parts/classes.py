# SPDX-License-Identifier: Apache-2.0
"""Classes: attributes of bases, special methods, metaclasses, enums, descriptors, abstract classes."""

from random_parts.part import Part

PARTS = {
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
}
