# SPDX-License-Identifier: Apache-2.0
"""What a `functools.lru_cache` holds. A self-test at import says whether the layout is as it is described here.

The interpreter does not show it, but tells the garbage collector of the parts of a cache. With a limit, these are the
key, the result and the class of each link, and then the table, whose values are the links. Without a limit, the values
of the table are the results.
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
    # The attributes of a cache, such as `__wrapped__`, are a dict as well.
    referents = [referent for referent in gc.get_referents(cache) if referent is not vars(cache)]
    return next((referent for referent in reversed(referents) if type(referent) is dict), {})  # behind its links


def results_in(cache: Any) -> dict[Any, Any]:
    """What the cache would give out, by key: a dict of its own."""
    table = table_of(cache)
    if cache.cache_parameters()["maxsize"] is None:
        return dict(table)
    referents = gc.get_referents(cache)[1:]  # behind its class
    links = referents[: next((i for i, referent in enumerate(referents) if referent is table), 0)]
    # A link that was taken out of the table stays until the cache needs its room; a later one of the same key follows.
    results = zip(links[::_PARTS_OF_LINK], links[1::_PARTS_OF_LINK], strict=True)
    return {key: result for key, result in results if key in table}


def take_out(cache: object, key: object) -> None:
    """The cache computes the result of this key again."""
    table_of(cache).pop(key, None)


def _is_known() -> bool:
    """Do these functions find, in a cache of each kind, what the cache gives out, and take it out?"""
    for size in (None, 4):
        cache: Any = functools.lru_cache(size)(lambda *args: [args])
        # A single int or text is its own key. For other calls the key is a tuple.
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
    """The self-test: warns where the layout is not known."""
    try:
        if _is_known():
            return True
    except (TypeError, ValueError):
        pass
    warnings.warn(UNKNOWN_LAYOUT, UnknownInterpreterWarning, 2)
    return False


is_known = _test()
