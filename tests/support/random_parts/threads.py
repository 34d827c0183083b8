# SPDX-License-Identifier: Apache-2.0
"""Threads, what is local to one, and what is done on the way out of a context."""

from random_parts.part import Part

PARTS = {
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
}
