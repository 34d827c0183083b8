# SPDX-License-Identifier: Apache-2.0
"""Code that looks at all that a class has, with `vars(cls)` or `cls.__dict__`, sees what it has now."""

import json
from typing import Any

import jax.numpy as jnp
import pytest

import graftax

x = jnp.ones(2)


class Config:
    scale = 2.0
    table = jnp.ones(2)
    log = [1]  # noqa: RUF012


def scaled(y):
    return y * vars(Config)["scale"] + vars(Config)["table"] + Config.table + len(vars(Config)["log"])


def all_of(cls):
    return {name: value for name, value in vars(cls).items() if not name.startswith("_")}


def test_values_that_vars_shows_are_as_they_are_now(monkeypatch):
    f = graftax.jit(lambda y: scaled(y))
    for name, value in (("scale", 2.0), ("scale", 3.0), ("table", jnp.zeros(2)), ("log", [1, 2])):
        monkeypatch.setattr(Config, name, value)
        assert f(x).tolist() == scaled(x).tolist()
    traces = f.cache_info().traces
    Config.table = x + 7
    assert f(x).tolist() == scaled(x).tolist() and f.cache_info().traces == traces  # arrays are inputs


def test_what_a_class_gets_and_loses_is_seen():
    class Registry:
        pass

    f = graftax.jit(lambda y: {name: y * value for name, value in all_of(Registry).items()})
    for change in (lambda: None, lambda: setattr(Registry, "a", 2.0), lambda: setattr(Registry, "b", x)):
        change()
        assert f(1.0).keys() == all_of(Registry).keys()
    del Registry.a
    assert list(f(1.0)) == ["b"]
    hits = f.cache_info().hits
    f(1.0)
    assert f.cache_info().hits == hits + 1


def test_methods_see_what_their_class_and_its_bases_have():
    class Base:
        k = 1.0

    class Model(Base):
        def __init__(self):
            self.w = jnp.ones(2)

        def total(self):
            return self.w * sum(v for cls in type(self).__mro__ for n, v in vars(cls).items() if isinstance(v, float))

    f = graftax.jit(Model.total)
    for Base.k in (1.0, 5.0):
        assert f(Model()).tolist() == Model().total().tolist()
    Model.extra = 2.0
    assert f(Model()).tolist() == [7, 7]


def test_a_class_whose_dict_is_read_shows_no_stand_ins():
    class Table:
        array = jnp.ones(2)
        k = 1.0

    f = graftax.jit(lambda y: y + Table.__dict__["array"] + Table.array * Table.k)
    assert f(0.0).tolist() == [2, 2]
    Table.array = jnp.zeros(2)
    assert f(0.0).tolist() == [0, 0]
    Table.array, Table.k = jnp.ones(2), 3.0
    assert f(0.0).tolist() == [4, 4]


@pytest.mark.parametrize("show", [lambda m: vars(m), lambda m: m.__dict__])
def test_instances_are_as_ever(show):
    class Model:
        pass

    model = Model()
    model.w = jnp.ones(2)

    @graftax.jit
    def f(m, y):
        for value in show(m).values():
            y = y + value
        show(m)["last"] = y
        return y

    assert f(model, 1.0).tolist() == [2, 2] and model.last.tolist() == [2, 2] and f(model, 1.0).tolist() == [4, 4]


def test_vars_without_arguments_are_the_local_variables():
    @graftax.jit
    def f(y):
        z = y * 2  # noqa: F841 - read by its name
        return vars()["z"]

    assert f(1.0) == 2 and f(1.0) == 2


@pytest.mark.parametrize("inherited", [False, True])
def test_a_class_that_has_changed_too_often_to_have_versions_is_still_seen(inherited):
    class Base:
        rate = 0.0

        def of(self, x):
            return x * self.rate

    class Model(Base):
        pass

    f = graftax.jit(lambda model, x: model.of(x))
    model, x = Model() if inherited else Base(), jnp.ones(2)
    for i in range(3_000):  # the interpreter gives a class a thousand versions, and tells of no change after them
        Base.other = i
        model.of(x)
    for rate in (0.0, 1.0, 2.0, 2.0, 1.0):
        Base.rate = rate
        assert f(model, x).tolist() == model.of(x).tolist()
    Base.of = lambda self, x: x + 7
    assert f(model, x).tolist() == model.of(x).tolist()


def test_the_getattr_of_a_metaclass_is_not_asked():
    class Strict(type):
        def __getattr__(cls, name: str) -> Any:
            raise KeyError(name)

    class Scale(metaclass=Strict):
        factor = 2.0

        def go(self, x: Any) -> Any:
            return x * self.factor

    scale = Scale()
    step = graftax.jit(lambda x, scale: scale.go(x) * Scale().factor)
    assert float(step(jnp.ones(()), scale)) == 4
    Scale.factor = 3.0
    assert float(step(jnp.ones(()), scale)) == 9


def test_a_name_that_is_given_to_getattribute_is_read():
    class Scale:
        factor, rate = 2.0, 1.0

    step = graftax.jit(lambda x, s: x * object.__getattribute__(s, "factor") * type.__getattribute__(Scale, "rate"))
    assert float(step(jnp.ones(()), Scale())) == 2
    Scale.factor = 3.0
    assert float(step(jnp.ones(()), Scale())) == 3
    Scale.rate = 2.0
    assert float(step(jnp.ones(()), Scale())) == 6


@pytest.mark.parametrize("by_text", [False, True])
def test_a_subclass_gets_a_name_that_the_function_sets_in_a_base(by_text):
    class Base:
        rate = 2.0

    class Child(Base):
        pass

    def f(y):
        rate = Child().rate
        if by_text:
            setattr(Base, "rate", rate + 1.0)  # noqa: B010
        else:
            Base.rate = rate + 1.0
        return y * rate

    def after(changes, call):
        Base.rate = 2.0
        for change in changes:
            if change is None:
                del Child.rate
            elif change != ():
                Child.rate = change
            yield call(x).tolist(), Base.rate

    changes = ((), (), 55.0, property(lambda self: 57.0), 3.0, None, ())
    assert list(after(changes, graftax.jit(f))) == list(after(changes, f))


class Greeting:
    def text(self):
        return super().__repr__()


class Separated(json.JSONEncoder):
    item_separator = ";"


class Again(Separated):
    item_separator = "|"


def text_lengths(y):
    return y * len(Again().encode([1, 2])) + len(Separated().encode([1, 2]))


def lengths_after_super(y):
    Greeting().text()  # from now on what code asks `super()` for is looked up in all classes
    return text_lengths(y)


def test_what_a_library_asks_a_base_class_for_is_seen_after_super_was_asked(monkeypatch):
    f = graftax.jit(lengths_after_super)
    assert f(x).tolist() == lengths_after_super(x).tolist()
    monkeypatch.setattr(Separated, "item_separator", ";;;")
    assert f(x).tolist() == lengths_after_super(x).tolist()
