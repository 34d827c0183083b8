# SPDX-License-Identifier: Apache-2.0
"""Functions that share cells, partials, weak references, and dicts that are instance dictionaries."""

import functools
import sys
import types
import weakref

import jax
import jax.numpy as jnp
import pytest

import graftax

x = jnp.arange(3.0)


class Thing:
    pass


def thing(**values):
    new = Thing()
    vars(new).update(values)
    return new


class AttrDict(dict):
    """Items as attributes, the short way."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


# ── functions ──


def counter():
    n, log = 0, []

    def step():
        nonlocal n
        n += 1
        return n

    return step, lambda: (n, log)


@pytest.mark.parametrize("wrap", [lambda f, g: [f, g], lambda f, g: [g, f], lambda f, g: [[g], {"f": f}]])
def test_functions_that_share_a_cell_share_it_when_they_are_rebuilt(wrap):
    step, read = counter()
    graph = wrap(step, read)
    leaves, graphdef = graftax.flatten(graph)
    rebuilt = {f.__name__: f for f in functions_of(graftax.unflatten(graphdef, leaves))}
    assert rebuilt["step"]() == 1
    assert rebuilt["<lambda>"]() == (1, [])
    assert read() == (0, [])


def functions_of(graph):
    if isinstance(graph, types.FunctionType):
        return [graph]
    values = graph.values() if isinstance(graph, dict) else graph
    return [f for value in values for f in functions_of(value)]


def test_a_function_below_another_stays_itself_only_where_both_do():
    log = []

    def write(y):
        log.append(y)

    def outer(y):
        return write(y)

    graph = [write, outer]
    leaves, graphdef = graftax.flatten(graph)
    again = graftax.unflatten(graphdef, leaves)
    again[1](1)
    assert log == []
    assert again[0].__closure__[0].cell_contents == [1]


def test_a_function_without_a_closure_made_inside_is_fresh_for_each_call():
    make = graftax.jit(lambda y: [y, lambda z: z])
    first, second = make(x)[1], make(x)[1]
    assert first is not second
    first.mark = 1
    assert not hasattr(make(x)[1], "mark")


def plain(y):
    return y


@pytest.mark.parametrize("name, value", [("__name__", "q"), ("__doc__", "q"), ("__module__", "q")])
def test_names_that_are_changed_inside_are_an_error_and_everything_is_restored(name, value):
    config = thing(k=1, items=[1])

    def f(g, config, y):
        config.k = 2
        config.items.append(2)
        setattr(g, name, value)
        return g(y)

    before = getattr(plain, name)
    with pytest.raises(graftax.StructureError, match="name"):
        graftax.jit(f)(plain, config, x)
    assert getattr(plain, name) == before
    assert (config.k, config.items) == (1, [1])


def test_code_that_is_replaced_inside_is_put_back():
    def f(g, config, y):
        config.k = 2
        g.__code__ = (lambda y: y + 1).__code__
        return g(y)

    config = thing(k=1)
    with pytest.raises(graftax.StructureError, match="code"):
        graftax.jit(f)(plain, config, x)
    assert plain(1) == 1
    assert config.k == 1


def test_the_docstring_of_a_function_is_part_of_the_key():
    def scale(w):
        def g(y):
            "first"
            return y * w

        return g

    look = graftax.jit(lambda g: g.__doc__)
    for w in (x, 2):
        g = scale(w)
        assert look(g) == "first"
        g.__doc__ = "second"
        assert look(g) == "second"


if sys.version_info >= (3, 12):

    def test_a_rebuilt_function_has_its_type_parameters():
        space = {}
        exec("def make(w):\n  def f[T](y: T) -> T: return y * w\n  return f", space)
        assert graftax.jit(lambda f: len(f.__type_params__))(space["make"](x)) == 1


# ── partials ──


@pytest.mark.parametrize("w", [x, 2])
def test_a_partial_that_is_set_anew_inside_comes_back(w):
    def f(p):
        p.__setstate__((p.func, (p.args[0] * 2,), {"k": 1}, p.__dict__))
        return p.args[0]

    plain, traced = functools.partial(max, w), functools.partial(max, w)
    plain.note = traced.note = [1]
    note, g = traced.note, graftax.jit(f)
    for _ in range(3):
        assert jnp.array_equal(f(plain), g(traced))
        assert jnp.array_equal(plain.args[0], traced.args[0])
        assert plain.keywords == traced.keywords
        assert traced.note is note


def test_a_partial_that_holds_itself_is_rebuilt():
    p = functools.partial(max)
    p.__setstate__((max, (p, x), {}, {}))
    is_kept, total = graftax.jit(lambda p: (p.args[0] is p, p.args[1].sum()))(p)
    assert is_kept and float(total) == 3


# ── weak references ──


@jax.tree_util.register_pytree_node_class
class Leafy:
    def __init__(self, content):
        self.content = content

    def tree_flatten(self):
        return (self.content,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@pytest.mark.parametrize("holder", [list, tuple])
def test_a_reference_and_a_registered_node_that_lead_to_each_other(holder):
    node = Leafy(None)
    ref = weakref.ref(node)
    node.content = holder([x, ref])
    alone = graftax.jit(lambda r: (r().content[1]() is r(), r().content[0] + 1))
    assert alone(ref)[0]
    assert alone(ref)[1].tolist() == (x + 1).tolist()
    both = graftax.jit(lambda r, n: (r() is n, n.content[1]() is n))
    assert both(ref, node) == (True, True)
    leaves, graphdef = graftax.flatten([ref, node])
    again = graftax.unflatten(graphdef, leaves)
    assert again[0]() is again[1] and again[1].content[1]() is again[1]


# ── instance dictionaries ──


def test_a_dict_that_is_its_own_instance_dict_stays_one():
    def f(d):
        d.y = d["x"] * 2
        d["n"] = d.n + 1
        return d["y"], d.n

    plain, traced = AttrDict(x=x, n=0), AttrDict(x=x, n=0)
    g = graftax.jit(f)
    for _ in range(3):
        want, got = f(plain), g(traced)
        assert got[0].tolist() == want[0].tolist() and got[1] == want[1]
        assert list(traced) == list(plain) and traced.n == plain.n
        assert traced.__dict__ is traced
    made = graftax.jit(lambda y: AttrDict(a=y))(x)
    assert made.__dict__ is made and made.a.tolist() == x.tolist()
    leaves, graphdef = graftax.flatten(AttrDict(a=x))
    again = graftax.unflatten(graphdef, leaves)
    assert len(leaves) == 1 and again.__dict__ is again


def test_a_dict_is_told_from_one_that_is_its_own_instance_dict():
    class Loose(AttrDict):
        def __init__(self, own, **items):
            dict.__init__(self, **items)
            if own:
                self.__dict__ = self

    g = graftax.jit(lambda d: hasattr(d, "x"))
    for own in (True, False, True):
        assert g(Loose(own, x=x)) == own


def two_with_one_dict(w):
    a, b = Thing(), Thing()
    b.__dict__ = a.__dict__
    a.w = w
    return [a, b]


def test_two_rebuilt_objects_with_one_dict_are_a_clear_error():
    f = graftax.jit(lambda items: items[1].w)
    separate = [thing(w=x), thing(w=x)]
    for _ in range(2):
        assert jnp.array_equal(f(separate), x)
        with pytest.raises(graftax.StructureError, match=r"items\[1\].*__dict__"):
            f(two_with_one_dict(x))


def test_two_objects_with_one_dict_that_are_handed_over_keep_it():
    def f(items, y):
        items[0].w += 1
        return y * items[1].w

    jitted = graftax.jit(f)
    items = two_with_one_dict(1)
    for w in (2, 3, 4):
        assert jitted(items, x).tolist() == (x * w).tolist()
        assert items[0].w == items[1].w == w and items[0].__dict__ is items[1].__dict__


def test_an_object_and_its_dict_are_a_clear_error_and_its_dict_alone_is_a_dict():
    f = graftax.jit(lambda o, d: o.w + d["w"])
    o = thing(w=x)
    for _ in range(2):
        assert f(o, {"w": x}).tolist() == (2 * x).tolist()
        with pytest.raises(graftax.StructureError, match=r"d: .*vars"):
            f(o, vars(o))
        with pytest.raises(graftax.StructureError, match=r"o: .*vars"):
            graftax.jit(lambda d, o: 0)(vars(o), o)
    graftax.jit(lambda d: d.update(z=d["w"] * 2))(vars(o))
    assert o.z.tolist() == (2 * x).tolist()

    def g(y):
        return y

    g.w = x
    with pytest.raises(graftax.StructureError, match="__dict__"):
        graftax.jit(lambda g, d: 0)(g, vars(g))


# ── by value ──


@pytest.mark.parametrize("wrap", [graftax.filter_jit, functools.partial(graftax.jit, mutation="discard")])
def test_by_value_a_returned_function_and_a_returned_list_are_about_the_same_list(wrap):
    def over(content):
        return lambda: content

    items = [x]
    out, f = wrap(lambda items, f: (items, f))(items, over(items))
    assert out is not items
    assert f() is out
    alone = over(x)
    assert wrap(lambda f: f)(alone) is alone
