# SPDX-License-Identifier: Apache-2.0
"""Key paths: their text, what they lead to, and patterns."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

import graftax
import zoo
from graftax import Path
from graftax._graph.path import Graph
from zoo import Affine, Box, Frozen, Registered, f32

pytestmark = pytest.mark.quick(8)  # a case takes milliseconds

KEYS: list[Any] = [
    *(
        "a",
        "a b",
        "a.b",
        "a[0]",
        "[",
        "]",
        "'",
        '"',
        "it's",
        "\\",
        "\n",
        "",
        "0",
        "-1",
        "1.5",
        "None",
        "True",
        "*",
        "**",
    ),
    *("<flat index 0>", "obj", ".x", "(1, 2)", "é", "b'x'"),
    *(0, -1, 2.5, None, (1, "x"), b"k", zoo.Color.RED),
]


@pytest.mark.parametrize("build", zoo.BUILDERS, ids=zoo.NAMES)
def test_the_text_of_a_path_leads_to_the_same_place(build: Any):
    x = build()
    graph = Graph(x)
    for place, row in enumerate(graph.rows):
        path = graph.path(place)
        assert graph.number(path) == place
        if row.category != "ref":
            assert path.get(x) is row.value or row.aux  # aux data may be made anew by each flatten
        for text in (str(path), repr(path)):
            restored = Path.parse(text)
            assert str(restored) == str(path) and graph.number(restored) == place and path.matches(text)


@pytest.mark.parametrize("key", KEYS, ids=repr)
def test_any_key_can_be_written(key: Any):
    x = {"other": 1, key: [2], ("more",): 3}
    path = Path([DictKey(key), SequenceKey(0)])
    for text in (str(path), repr(path)):
        parsed = Path.parse(text)
        assert parsed.get(x) == 2 and str(parsed) == str(path)
        assert parsed == path or not isinstance(key, str)
        assert graftax.at(x)[text].get() == 2
    path.set(x, 5)
    assert x[key] == [5]
    assert path.matches("*[*]") and path.matches("**[0]") and not path.matches("*") and not path.matches("[other][*]")


def test_a_number_is_an_index_or_a_key_and_a_name_an_attribute_or_a_key():
    assert Path.parse("[0]").get(["x"]) == Path.parse("[0]").get({0: "x"}) == Path.parse("[0]").get(Registered("x", 1))
    assert Path.parse("a.b").get({"a": {"b": 1}}) == Path.parse("a.b").get(Box(a=Box(b=1))) == 1
    mapping = {0: "number", "0": "text"}
    assert Path.parse("[0]").get(mapping) == "number" and Path.parse("['0']").get(mapping) == "text"
    with pytest.raises(graftax.StructureError):
        Path.parse("[1]").get({True: 1})


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("", []),
        ("obj", []),
        ("layers[0].w", [GetAttrKey("layers"), SequenceKey(0), GetAttrKey("w")]),
        ("obj.layers", [GetAttrKey("layers")]),
        ("objects.w", [GetAttrKey("objects"), GetAttrKey("w")]),
        ("['a']", [DictKey("a")]),
        ('["a"][b]', [DictKey("a"), DictKey("b")]),
        ("[<flat index 3>]", [FlattenedIndexKey(3)]),
        ("[aux data]", [DictKey("aux data")]),
        (r"['\'']", [DictKey("'")]),
    ],
)
def test_parse(text: str, path: list[Any]):
    assert Path.parse(text) == Path(path)


@pytest.mark.parametrize("text", ["a..b", "a[", "a]", "[a", "a[0]b", ".", "a.", "['a]", "[[0]]"])
def test_what_is_no_path(text: str):
    with pytest.raises(ValueError, match=r"is not a path: what begins at .* cannot be parsed. Write layers\[0\].w"):
        Path.parse(text)


def test_paths_are_values():
    path = Path.parse("layers[0].w")
    assert path == Path(path) and hash(path) == hash(Path(path)) and pickle.loads(pickle.dumps(path)) == path
    assert path[:1] == (GetAttrKey("layers"),) and isinstance(path + (GetAttrKey("x"),), Path)
    assert Path([DictKey(1)]) != Path([DictKey(True)]) and len({Path([DictKey(1)]), Path([DictKey(True)])}) == 2
    assert path != tuple(path)
    assert Path() == Path.parse("") and str(Path()) == "" and repr(Path()) == "obj"


def test_a_path_made_from_another_is_the_same_as_one_made_at_once():
    entries = [GetAttrKey("layers"), SequenceKey(0), DictKey("w"), DictKey(2), FlattenedIndexKey(3)]
    whole = Path(entries)
    for cut in range(6):
        for second in range(cut, 6):
            parts = Path(entries[:cut]) + tuple(entries[cut:second]) + entries[second:]
            assert parts == whole and hash(parts) == hash(whole) and tuple(parts) == tuple(whole) == tuple(entries)
            assert len(parts) == 5 and repr(parts) == repr(whole)
            assert parts.parent == Path(entries[:-1]) and parts.parent.parent == Path(entries[:-2])
            assert [parts[i] for i in range(-5, 5)] == entries * 2 and parts[1:3] == tuple(entries[1:3])
            assert list(reversed(parts)) == entries[::-1] and parts.index(SequenceKey(0)) == 1
            assert parts != Path([*entries[:-1], FlattenedIndexKey(4)]) and parts != Path([DictKey("x"), *entries[1:]])
            assert (entries[0],) + parts == (entries[0], *entries) and parts + () is parts
            for copied in (copy.copy(parts), copy.deepcopy(parts), pickle.loads(pickle.dumps(parts))):
                assert copied == whole and hash(copied) == hash(whole) and type(copied) is Path
    with pytest.raises(IndexError):
        whole[5]
    with pytest.raises(ValueError, match="not in tuple"):
        whole.index(SequenceKey(7))
    assert Path().parent == Path() and not Path() and Path([DictKey(1)]) + [DictKey(2)] != Path([DictKey(1)] * 2)
    with pytest.raises(TypeError, match="unhashable"):
        hash(Path([DictKey([])]) + (DictKey(1),))


def test_a_path_is_a_static_value_of_a_graph():
    x, y = Path.parse("a[0]"), Path.parse("a") + (SequenceKey(0),)
    assert graftax.flatten([x])[1] == graftax.flatten([y])[1] and graftax.equal([x], [y])
    assert not graftax.equal([x], [x.parent]) and graftax.copy([x])[0] is x
    assert graftax.from_dict(graftax.to_dict([x, y])) == [x, y]


def test_get_says_how_far_the_path_leads():
    x = Box(layers=[Box(w=1), Box(w=2)], config={"width": 3})
    for text, message in [
        ("layers[0].weight", r"no .layers\[0\].weight: the Box at .layers\[0\] has no .weight. It has .w"),
        ("layers[7].w", r"the list at .layers has no \[7\]"),
        ("layers[-1].w", r"the list at .layers has no \[-1\]"),
        ("layer", r"this Box has no .layer. It has .layers"),
        ("config.with", r"the dict at .config has no .with. It has \['width'\]"),
        ("config.width.x", r"the int at .config.width has no .x. It has nothing below"),
    ]:
        path = Path.parse(text)
        for act in (lambda p=path: p.get(x), lambda p=path: p.set(x, 1), lambda t=text: graftax.at(x)[t]):
            with pytest.raises(graftax.StructureError, match=message):
                act()


def test_set_through_immutable_objects():
    x = {"t": (1, Frozen((2, [3])))}
    inner = x["t"][1].a[1]
    Path.parse("t[1].a[0]").set(x, "new")
    assert x["t"] == (1, Frozen(("new", inner))) and x["t"][1].a[1] is inner
    module = [Affine(f32(1), None)]
    Path.parse("[0].bias").set(module, 5)
    assert module[0].bias == 5
    for root in ((1, 2), Frozen(1), Affine(1, 2)):
        with pytest.raises(TypeError, match="cannot be written to: every object from the root"):
            Graph(root).path(1).set(root, "new")


def test_set_is_an_assignment():
    layer = Box(w=1)
    x = {"a": layer, "b": layer}
    Path.parse("b").set(x, 2)
    assert x == {"a": layer, "b": 2}
    Path.parse("a.w").set(x, x)
    assert layer.w is x
    with pytest.raises(TypeError, match=r"^obj cannot be written to"):
        Path().set(x, 1)


def test_set_keeps_what_unusual_setters_would_do():
    class Guarded:
        def __init__(self) -> None:
            self.__dict__["w"] = 1

        def __setattr__(self, name: str, value: Any) -> None:
            raise AssertionError("not by assignment")

    x = Guarded()
    Path.parse("w").set(x, 2)
    assert x.w == 2


@pytest.mark.quick(100)
@pytest.mark.parametrize(
    ("path", "pattern", "fits"),
    [
        ("layers[0].w", "layers[*].w", True),
        ("layers[0].w", "layers.*.w", False),
        ("layers[0].w", "**.w", True),
        ("w", "**.w", True),
        (".w", "**.w", True),
        ("['w']", "**.w", False),
        ("['w']", "**[w]", True),
        ("['w']", "w", False),
        ("w", "w", True),
        ("a.b.c", "a.**.c", True),
        ("a.c", "a.**.c", True),
        ("a.c", "a.*.c", False),
        ("a.b.c", "a.**", True),
        ("a", "a.**", True),
        ("a.b", "**", True),
        ("a.b", "**.**", True),
        ("a.b", "*", False),
        ("a.bias_1", "a.bias*", True),
        ("a.bias", "a.b*s", True),
        ("a.b", "obj.a.b", True),
        ("['a.b'].c", "[*].c", True),
        ("['a.b'].c", "[a.*].c", True),
        ("['[x]']", "['[x]']", True),
        ("['*']", "['*']", True),
        ("['x']", "['*']", False),
        ("a[10]", "a[1*]", True),
        ("[<flat index 1>]", "[*]", True),
        ("[<flat index 1>]", "[1]", True),
        ("a.b.c.b.c", "**.b.c", True),
        ("a.b.c.b", "**.b.c", False),
    ],
)
def test_patterns(path: str, pattern: str, fits: bool):
    assert Path.parse(path).matches(pattern) == fits or (path == "['w']" and pattern == "w")


def test_a_name_that_comes_first_is_a_key_too():
    assert Path([DictKey("w")]).matches("w") and Path([GetAttrKey("w")]).matches("w")
    assert Path([DictKey("w"), GetAttrKey("b")]).matches("w.*")


@pytest.mark.parametrize("pattern", ["a..b", "**w", "a[*", "a**", "[0]x"])
def test_what_is_no_pattern(pattern: str):
    with pytest.raises(ValueError, match=r"is not a pattern: what begins at"):
        Path.parse("a").matches(pattern)


def test_a_pattern_of_many_stars_takes_no_more_than_its_length():
    path = Path([GetAttrKey("a")] * 400)
    assert not path.matches("**" + ".a.**" * 60 + ".b") and path.matches("**" + ".a.**" * 60)


def test_half_of_a_surrogate_pair_is_a_name_as_any_other():
    name = "\udcff"  # as os.fsdecode makes of bytes that are no UTF-8
    box = Box(**{name: f32(1)})
    path = Path.parse(name)
    assert path == Path([GetAttrKey(name)]) and str(path) == f".{name}" and repr(path)
    assert list(graftax.to_dict(box))[-1] == path and graftax.at(box)[name].get() is getattr(box, name)
    structure = graftax.flatten(box)[1]
    assert structure.fingerprint() != graftax.flatten(Box(x=f32(1)))[1].fingerprint()
    assert not graftax.equal(box, Box(x=f32(1))) and "\\udcff" in ascii(graftax.diff(box, Box(x=f32(1))))
    with pytest.raises(ValueError, match=f"there is no .{name}"):
        graftax.at(Box(x=f32(1)))[name].get()


def test_half_of_a_surrogate_pair_is_shown_where_a_message_names_it():
    def broken(box):
        setattr(box, "\udcff", iter([]))

    with pytest.raises(graftax.GraftaxError, match=r"\\udcff"):
        graftax.jit(broken)(Box(x=f32(1)))


@pytest.mark.parametrize("star", ["*", "*a", "*aa*"])
def test_a_pattern_of_many_stars_within_a_step_takes_no_more_than_its_length(star: str):
    path = Path([DictKey("a" * 2000)])
    assert not path.matches(f"[{star * 200}b]") and path.matches(f"[{star * 200}a]")


@pytest.mark.parametrize("text", ["-" * 10_000 + "1", "(" * 150, "(" * 10_000, "[" * 500, "not " * 3000 + "1"])
def test_what_is_too_deep_for_the_parser_is_a_text(text: str):
    if "[" in text:
        with pytest.raises(ValueError, match="is not a path"):
            Path.parse(f"a[{text}]")
    else:
        assert Path.parse(f"a[{text}]")[1] == DictKey(text) and Path([DictKey(text)]).matches(f"[{text}]")
