# SPDX-License-Identifier: Apache-2.0
"""What a `functools.lru_cache` holds: the only layout of its kind. A self-test at import says whether it is known.

The collector is told of the parts of a cache: of one with a limit first of each key and its result, then of the table,
whose values are the links between them. Without a limit the values of the table are the results.
"""

from __future__ import annotations

import functools
import gc
import warnings
from typing import Any

from graftax._base.errors import UnknownInterpreterWarning

_PARTS_OF_LINK = 3  # its key, its result, its class
Cache = type(functools.lru_cache(len))  # the interpreter's own class, which has no public name

UNKNOWN_LAYOUT = (
    "graftax does not know how this Python stores the results of functools.lru_cache. Compiled functions "
    "do not notice changes of cached objects and cleared caches, and a cache that a trace fills is "
    "cleared as a whole."
)


def table_of(cache: object) -> dict[Any, Any]:
    """The dict that the cache looks its keys up in."""
    parts = [part for part in gc.get_referents(cache) if part is not vars(cache)]
    return next((part for part in reversed(parts) if type(part) is dict), {})  # after what its links hold


def results_in(cache: Any) -> dict[Any, Any]:
    """What the cache would give out, by key: a dict of its own."""
    table = table_of(cache)
    if cache.cache_parameters()["maxsize"] is None:
        return dict(table)
    parts = gc.get_referents(cache)[1:]  # after its class
    links = parts[: next((i for i, part in enumerate(parts) if part is table), 0)]
    # A link that is no longer in the table stays until there is no room for it, before a later one of its key.
    results = zip(links[::_PARTS_OF_LINK], links[1::_PARTS_OF_LINK], strict=True)
    return {key: result for key, result in results if key in table}


def take_out(cache: object, key: object) -> None:
    """The cache computes the result of this key again."""
    table_of(cache).pop(key, None)


def _is_known() -> bool:
    for size in (None, 4):
        cache: Any = functools.lru_cache(size)(lambda *args: [args])
        expected = {1: cache(1), "a": cache("a"), (2, 3): cache(2, 3), (): cache()}
        results = results_in(cache)
        if results.keys() != expected.keys() or any(results[key] is not expected[key] for key in expected):
            return False
        if table_of(cache).keys() != expected.keys():
            return False
        take_out(cache, "a")
        if results_in(cache).keys() != expected.keys() - {"a"} or cache("a") is expected["a"]:
            return False
        if results_in(cache)["a"] is not cache("a"):
            return False
    cache.cache_clear()
    return not results_in(cache)


def _test() -> bool:
    try:
        if _is_known():
            return True
    except (TypeError, ValueError):
        pass
    warnings.warn(UNKNOWN_LAYOUT, UnknownInterpreterWarning, 2)
    return False


is_known = _test()
