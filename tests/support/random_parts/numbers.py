# SPDX-License-Identifier: Apache-2.0
"""Numbers that C code reads."""

from random_parts.part import Part

PARTS = {
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
}
