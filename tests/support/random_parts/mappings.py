# SPDX-License-Identifier: Apache-2.0
"""Subclasses of dict, and chains of them."""

from random_parts.part import Part

PARTS = {
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
}
