# SPDX-License-Identifier: Apache-2.0
"""Several processes on this machine, as hosts: they compare what they run, and what differs is an error on all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import graftax
from processes import run

PROGRAM = Path(__file__).parents[1] / "support" / "hosts.py"
COUNT = int(os.environ.get("GRAFTAX_TEST_HOSTS", "2"))


@pytest.fixture(scope="module")
def hosts() -> list[dict[str, Any]]:
    return run(PROGRAM, COUNT)


def on_all(hosts: list[dict[str, Any]], scenario: str) -> Any:
    """What a scenario gives, where it is the same on all hosts."""
    first = hosts[0][scenario]
    assert [host[scenario] for host in hosts] == [first] * len(hosts)
    return first


@pytest.mark.quick(0)
def test_hosts_that_agree_compare_once_for_each_structure(hosts: Any):
    sums, comparisons, spec, status = on_all(hosts, "the_same_on_all")
    assert (sums, comparisons, status) == ([56.0, 112.0, 224.0], 1, "on") and "'d'" in spec
    assert on_all(hosts, "nothing_is_lowered_or_traced_twice") == [1, 1]


@pytest.mark.quick(0)  # one worker starts the hosts
@pytest.mark.parametrize(
    ("scenario", "said"),
    [
        ("a_number_that_differs", "state['n'] is int 2 on host 0, and int 3 on host 1."),
        (
            "a_dict_in_another_order",
            "Host 0 has state['names']['a'] (int 1), where host 1 has state['names']['b'] (int 2).",
        ),
        ("another_function", "the function is double on host 0, and scale on host 1."),
        ("the_same_name_and_other_code", "The structures are equal, but the programs are not."),
        ("another_shape", "x is float32[3] on host 0, and float32[4] on host 1."),
        ("another_sharding", "w is float32[8], P('d',) on a mesh"),
    ],
)
def test_what_differs_is_an_error_on_every_host(hosts: Any, scenario: str, said: str):
    text = hosts[0][scenario]
    assert said in text
    for host in hosts[1:]:  # the name of the function differs where the function does
        assert host[scenario].partition(": ")[2] == text.partition(": ")[2]


@pytest.mark.quick(0)
def test_counters_and_host_functions_are_alike(hosts: Any):
    assert on_all(hosts, "a_counter_and_a_host_function") == [28.0, 56.0, 84.0, 112.0]


@pytest.mark.quick(0)
def test_a_program_that_was_loaded_is_compared_as_one_that_is_compiled(hosts: Any):
    count, traces, totals, comparisons, text = on_all(hosts, "a_program_that_was_loaded_is_compared")
    assert (count, traces, totals, comparisons) == (1, 0, [56.0] * 3, 2)
    assert "state['n'] is int 2 on host 0, and int 3 on host 1." in text


@pytest.mark.quick(0)
def test_what_is_not_compared(hosts: Any):
    assert on_all(hosts, "programs_of_one_host_are_not_compared") == 0
    assert on_all(hosts, "turned_off") == [0, "off: GRAFTAX_CHECK_HOSTS=0"]


@pytest.mark.quick(0)
def test_a_host_that_stays_away_is_named(hosts: Any):
    last = len(hosts) - 1
    for host in hosts[:-1]:
        text, late, soon = host["a_host_that_stays_away"]
        assert soon and f"host {last} has not reached comparison" in text and "within 5 s" in text
        assert len(late) == 1 and f"host {last} has not reached comparison" in late[0]


@pytest.mark.quick(0)
def test_a_host_0_that_comes_when_nobody_waits_any_more_has_an_error_too(hosts: Any):
    assert "had timed out" in hosts[0]["host_0_comes_too_late"] and "host 1" in hosts[0]["host_0_comes_too_late"]
    assert all("host 0 has not reached" in host["host_0_comes_too_late"] for host in hosts[1:])


@pytest.mark.quick(0)
def test_rules_place_arrays_on_all_hosts(hosts: Any):
    spec, same, numpy, local, total, addressable = on_all(hosts, "rules_place_arrays_on_all_hosts")
    rows = 8 // len(hosts)
    assert "'d'" in spec and same and numpy == local == [8, 2] and not addressable
    assert total == sum(number * rows * 2 for number in range(len(hosts)))


@pytest.mark.quick(0)
def test_arrays_that_span_hosts_are_compared_whole(hosts: Any):
    same, differences = on_all(hosts, "equal_and_diff_of_arrays_that_span_hosts")
    assert same and len(differences) == 1 and "1 of 8 elements differ, the first at [7]" in differences[0]
    total, spec = on_all(hosts, "the_plain_function_beside")
    assert total == 84.0 and "'d'" in spec


@pytest.mark.quick(0)
def test_check_hosts(hosts: Any):
    assert on_all(hosts, "check_hosts_of_the_same") == "fine"
    number, small, large, shapes, length = on_all(hosts, "check_hosts_of_others")
    assert "obj['lr'] is float 0.1 on host 0, and float 0.2 on host 1." in number
    assert "obj['seed'] is int32[1] [0] on host 0, and int32[1] [1] on host 1." in small
    assert "obj['big'] is int32[100] with values" in large and shapes == "nothing raised"
    assert "obj is name builtins.list of 1 on host 0, and name builtins.list of 2 on host 1." in length


@pytest.mark.quick(0)
def test_parts_of_an_array_that_several_hosts_hold_are_compared():
    name = "check_hosts_of_parts_that_all_hold"
    array, keys, types = on_all(run(PROGRAM, COUNT, name, devices=2), name)
    last = COUNT - 1
    assert f"obj['w'][2:4, :] has other values on host {last} than on host 0." in array
    assert f"obj['keys'][2:4, :] has other values on host {last} than on host 0." in keys
    assert types == "nothing raised"


def test_with_one_process_there_is_nothing_to_compare():
    graftax.check_hosts({"a": 1})


@pytest.mark.quick(0)
@pytest.mark.skipif(COUNT > 2, reason="has them")
def test_all_of_this_with_four_hosts():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", __file__]
    environment = {**os.environ, "GRAFTAX_TEST_HOSTS": "4"}
    root = Path(__file__).parents[2]
    completed = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stdout[-3000:]
