# SPDX-License-Identifier: Apache-2.0
"""Where the interpreter's frames are not known: that is said, in the process in which it is so."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from graftax import _core

START = """
import warnings, jax.numpy as jnp
import graftax
graftax._core.forget_frames("its layout is another one")
SCALE = [2.0]
def helper(x): return x * SCALE[0]
def scaled(x): return helper(x)
"""


def run(program: str) -> str:
    program = START + textwrap.dedent(program)
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    return out.stdout


def test_this_interpreter_is_known():
    assert _core.frames_unknown() == ""


@pytest.mark.quick(0)
def test_the_first_jit_warns_once_and_names_what_is_not_seen():
    out = run("""
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            first, second = graftax.jit(scaled), graftax.jit(scaled)
        (warning,) = found
        print(warning.category is graftax.UnknownInterpreterWarning, warning.filename, warning.message)
    """)
    assert out.startswith("True <string> graftax does not know the frames of ")
    assert "(its layout is another one)" in out
    assert "what helper functions and methods read" in out
    assert "check=True" in out


@pytest.mark.quick(0)
def test_a_checked_call_finds_what_a_call_does_not_see():
    out = run("""
        warnings.simplefilter("ignore")
        plain, checked = graftax.jit(scaled), graftax.jit(scaled, check=True)
        x = jnp.ones(())
        print(float(plain(x)), float(checked(x)))
        SCALE[0] = 3.0
        print(float(plain(x)))
        try:
            checked(x)
        except graftax.CheckError as error:
            print(str(error).splitlines()[0])
    """)
    lines = out.splitlines()
    assert lines[0] == "2.0 2.0"
    assert lines[1] == "2.0"  # as jax.jit
    assert lines[2].startswith("scaled behaves differently when it is compiled")


@pytest.mark.quick(0)
def test_the_doctor_finds_it():
    out = run("""
        from graftax.__main__ import main
        warnings.simplefilter("ignore")
        print(main(["doctor"]))
    """)
    assert "WRONG: graftax does not know the frames of" in out
    assert out.rstrip().endswith("1")
