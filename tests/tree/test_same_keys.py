# SPDX-License-Identifier: Apache-2.0
"""Key paths, and how they are printed."""

from collections import OrderedDict, defaultdict, namedtuple

import jax
import pytest

import graftax.tree
from beside import both

Pair = namedtuple("Pair", ["left", "right"])
TREE = {
    "a": [1, (2, None)],
    "b c": Pair(3, {"x": 4, "'": 5}),
    "d": OrderedDict([(2, 6), ("e", 7)]),
    "f": defaultdict(int, {(1, "t"): 8}),
    "g": jax.tree_util.Partial(print, 9, end=10),
}


def test_key_classes_are_those_of_jax():
    for name in ("SequenceKey", "DictKey", "GetAttrKey", "FlattenedIndexKey", "KeyEntry", "KeyPath"):
        assert getattr(graftax.tree, name) is getattr(jax.tree_util, name)


def test_every_path_of_a_tree():
    both(lambda t: t.tree_flatten_with_path(TREE))
    both(lambda t: t.tree_leaves_with_path(TREE, lambda v: v is None))
    both(lambda t: t.tree_leaves_with_path(1), [((), 1)])
    both(lambda t: t.tree_leaves_with_path(None), [])
    both(lambda t: t.tree_leaves_with_path([list(range(3000)), [tuple(range(1100))]]))
    both(lambda t: t.tree_leaves_with_path({k: k for k in (1, 2.5, True)}))
    both(lambda t: t.tree_leaves_with_path({b"k": 1}))


@pytest.mark.parametrize("simple", [False, True])
@pytest.mark.parametrize("separator", ["", "/", ".", ", "])
def test_keystr(simple, separator):
    both(lambda t: [t.keystr(p, simple=simple, separator=separator) for p, _ in t.tree_leaves_with_path(TREE)])
    both(lambda t: t.keystr((), simple=simple, separator=separator), "")
    both(lambda t: t.keystr(("own", 3, t.DictKey("k")), simple=simple, separator=separator))
    both(lambda t: t.keystr([t.SequenceKey(0), t.GetAttrKey("a"), t.FlattenedIndexKey(2)], simple=simple))


def test_key_entries_can_be_compared_and_matched():
    paths = [p for p, _ in graftax.tree.leaves_with_path(TREE)]
    assert paths == [p for p, _ in jax.tree.leaves_with_path(TREE)]
    assert len({hash(p) for p in paths}) == len(set(paths)) == len(paths)
    match paths[0]:
        case (jax.tree_util.DictKey(key=key), jax.tree_util.SequenceKey(idx=idx)):
            assert (key, idx) == ("a", 0)
        case other:
            raise AssertionError(other)


def test_map_with_path():
    both(lambda t: t.tree_map_with_path(lambda p, v: t.keystr(p) + str(v), TREE))
    both(lambda t: t.tree_map_with_path(lambda p, v, w: (len(p), v, w), TREE, TREE))
    both(lambda t: t.tree_map_with_path(lambda p, v: (p, v), [1, None], is_leaf=lambda v: v is None))
    both(lambda t: t.tree_map_with_path(lambda p, v: p, 1), ())
    both(lambda t: t.tree_map_with_path(lambda p, v: p, []), [])
    both(lambda t: t.tree_map_with_path(lambda p, v: p, [1], (1,)), ValueError)


def test_a_tuple_whose_fields_do_not_name_its_items():
    class Wrong(tuple):
        _fields = ("a",)

    class Numbers(tuple):
        _fields = (1, 2)

    class Nothing(tuple):
        _fields = None

    for cls in (Wrong, Numbers, Nothing):
        both(lambda t: t.tree_flatten(cls((1, 2))))
        both(lambda t: t.tree_flatten_with_path(cls((1, 2))))
        both(lambda t: t.tree_map(lambda v: v, cls((1, 2))), TypeError)
