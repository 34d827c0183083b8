# SPDX-License-Identifier: Apache-2.0
"""JAX's settings: each is classified here, and a call follows those that change what a function means."""

import enum
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import config as jax_config

import graftax
import oracle
from graftax._jax import settings
from watchdog import isolated
from zoo import f32

# ── a table of them all ──


def names(text):
    return text.split()


# JAX traces anew when one of these changes, and so does a call of graftax, which is a call of `jax.jit` underneath.
IN_JAXS_TRACE_CONTEXT = names("""
    check_vma eager_constant_folding jax_accurate_erf_inv jax_allow_f16_reductions jax_auto_pcast
    jax_check_static_indices jax_custom_jvp3 jax_custom_vjp3 jax_debug_key_reuse jax_default_device
    jax_default_matmul_precision jax_disable_jit jax_embedded_constants_max_bytes jax_enable_pgle jax_enable_x64
    jax_error_checking_behavior_divide jax_error_checking_behavior_nan jax_error_checking_behavior_oob
    jax_explicit_x64_dtypes jax_no_execution jax_numpy_dtype_promotion jax_numpy_rank_promotion
    jax_pallas_enable_debug_checks jax_pallas_use_mosaic_gpu jax_pgle_profiling_runs
    jax_ragged_dot_use_gpu_pallas_triton_lowering jax_raise_on_ppermute_sort_diff jax_random_seed_offset jax_remat3
    jax_remat_barrier_no_cotangents jax_remove_size_one_mesh_axis_from_type jax_scan3 jax_softmax_custom_jvp
    jax_threefry_gpu_kernel_lowering jax_threefry_partitionable jax_use_direct_linearize
    jax_use_emit_pipeline_primitive jax_use_hlo_logistic_lowering jax_use_shardy_partitioner
    jax_use_simplified_jaxpr_constants jax_xla_profile_version
""")

# They change what a trace means, and JAX does not look at them when it is called again: part of graftax's own key.
IN_GRAFTAXS_KEY = ["jax_default_prng_impl", "jax_enable_custom_prng"]

# `jax.jit` looks at them on every call, or in its key beside the trace context.
BY_JAX_ON_EVERY_CALL = names("""
    jax_array_garbage_collection_guard jax_check_tracer_leaks jax_debug_infs jax_debug_nans jax_log_compiles
    jax_memory_fitting_effort jax_memory_fitting_level jax_exec_time_optimization_effort jax_no_tracing
    jax_optimization_level jax_pallas_auto_assign_collective_ids jax_pallas_auto_assign_collective_ids_limit
    jax_thread_guard jax_transfer_guard jax_transfer_guard_device_to_device jax_transfer_guard_device_to_host
    jax_transfer_guard_host_to_device
""")

# They raise or warn while a function is traced or compiled, or choose among ways to the same result. As with
# `jax.jit`, what is compiled already is not compiled anew.
WHILE_TRACING_ONLY = names("""
    jax_bcoo_cusparse_lowering jax_captured_constants_report_frames jax_captured_constants_warn_bytes
    jax_compiler_enable_remat_pass jax_disable_bwd_checks jax_disable_most_optimizations jax_disable_vmap_shmap_error
    jax_disallow_mesh_context_manager jax_enable_checks jax_explain_cache_misses jax_high_dynamic_range_gumbel
    jax_hlo_source_file_canonicalization_regex jax_include_full_tracebacks_in_locations jax_legacy_prng_key
    jax_log_checkpoint_residuals jax_mosaic_allow_hlo jax_mosaic_unzip_debug_locations jax_mutable_array_checks
    jax_pallas_poison_buffers jax_ragged_dot_use_ragged_dot_instruction jax_refs_to_pins
    jax_traceback_in_locations_limit jax_use_magma jax_use_rgv3
""")

# Where things run, where they are kept, what is logged: nothing that a function's result could show.
IRRELEVANT = names("""
    jax2tf_associative_scan_reductions jax2tf_default_native_serialization jax_backend_target jax_check_proxy_envs
    jax_compilation_cache_check_contents jax_compilation_cache_dir jax_compilation_cache_expect_pgle
    jax_compilation_cache_include_metadata_in_key jax_compilation_cache_max_size jax_compiler_detailed_logging_min_ops
    jax_cpu_collectives_implementation jax_cpu_enable_async_dispatch jax_cpu_get_global_topology_timeout_minutes
    jax_cpu_get_local_topology_timeout_minutes jax_cross_host_transfer_socket_address
    jax_cross_host_transfer_timeout_seconds jax_cross_host_transfer_transfer_size jax_cross_host_transport_addresses
    jax_cuda_visible_devices jax_debug_leaked_clients_on_clear_backends jax_debug_log_modules jax_distributed_debug
    jax_distributed_verify_secure_credentials jax_dump_ir_modes jax_dump_ir_to jax_enable_compilation_cache
    jax_enable_preemption_service jax_enable_recoverability jax_experimental_unsafe_xla_runtime_errors
    jax_export_calling_convention_version jax_export_deserialize_expired_versions
    jax_export_ignore_forward_compatibility jax_force_dcn_cross_host_transfers jax_include_debug_info_in_dumps
    jax_logging_level jax_mock_gpu_topology jax_mtls_ca_file jax_mtls_cert_file jax_mtls_key_file
    jax_mtls_peer_uri_prefix jax_num_cpu_devices jax_oneapi_visible_devices jax_pallas_verbose_errors
    jax_persistent_cache_enable_xla_caches jax_persistent_cache_min_compile_time_secs
    jax_persistent_cache_min_entry_size_bytes jax_pgle_aggregation_percentile jax_pjrt_client_create_options
    jax_platform_name jax_platforms jax_pprint_use_color jax_raise_persistent_cache_errors
    jax_remove_custom_partitioning_ptr_from_cache_key jax_rocm_visible_devices jax_send_traceback_to_runtime
    jax_serialization_version jax_share_binary_between_hosts jax_share_binary_between_hosts_timeout_ms
    jax_sort_devices_by_process_index jax_source_url_schema jax_traceback_filtering
    jax_tracer_error_num_traceback_frames jax_use_cpp_shard_args jax_xla_backend mock_num_gpu_processes
""")

CLASSES = (IN_JAXS_TRACE_CONTEXT, IN_GRAFTAXS_KEY, BY_JAX_ON_EVERY_CALL, WHILE_TRACING_ONLY, IRRELEVANT)
STATES = {name: holder for name, holder in jax_config.config._value_holders.items() if hasattr(holder, "swap_local")}

OTHERS = {
    "jax_default_matmul_precision": "highest",
    "jax_numpy_rank_promotion": "raise",
    "jax_random_seed_offset": 7,
    "jax_default_prng_impl": "rbg",
    "jax_debug_log_modules": "jax",
    "jax_error_checking_behavior_nan": "raise",
    "jax_error_checking_behavior_divide": "raise",
    "jax_error_checking_behavior_oob": "raise",
    "jax_hlo_source_file_canonicalization_regex": "x",
    "jax_use_hlo_logistic_lowering": True,
}


def another_value(name):
    """A value that is not the one in force."""
    now = STATES[name].value
    if name in OTHERS:
        return OTHERS[name]
    if name == "jax_default_device":
        return jax.devices()[0]
    if isinstance(now, bool):
        return not now
    if isinstance(now, enum.Enum):
        return next(member for member in type(now) if member is not now)
    assert isinstance(now, int), name
    return now + 1


def test_every_setting_of_jax_is_classified_once():
    classified = [name for group in CLASSES for name in group]
    assert sorted(classified) == sorted(set(classified))
    assert sorted(set(jax.config.values) - set(classified)) == []


# A call whose executable is known compiles, traces and transfers nothing.
NOTHING_TO_A_WARM_CALL = names("""
    jax_array_garbage_collection_guard jax_log_compiles jax_no_tracing jax_transfer_guard
    jax_transfer_guard_device_to_device jax_transfer_guard_device_to_host jax_transfer_guard_host_to_device
""")


def test_direct_calls_ask_for_every_setting_that_jax_looks_at_on_every_call():
    asked = {*settings.MUST_BE_OFF, *settings.IN_JITS_KEY, *NOTHING_TO_A_WARM_CALL}
    assert sorted(set(BY_JAX_ON_EVERY_CALL) - asked) == []
    assert sorted(asked - set(BY_JAX_ON_EVERY_CALL) - set(IN_JAXS_TRACE_CONTEXT)) == []


def test_what_is_said_to_be_in_jaxs_trace_context_is_there():
    for name in IN_JAXS_TRACE_CONTEXT:
        if name in STATES:
            before = jax_config.trace_context()
            with STATES[name](another_value(name)):
                assert jax_config.trace_context() != before, name


# ── a call under each of them is the function under each of them ──


def probe(x, log):
    """Touches what settings decide: widths, ranks, precision, random numbers."""
    log.append(len(log))
    wide = jnp.asarray(np.arange(3.0))
    return {
        "x64": (x + np.float64(1.5), jnp.arange(3), jnp.asarray(1.5)),
        "rank": x.reshape(2, 2) + x[:2],
        "dot": x.reshape(2, 2) @ x.reshape(2, 2),
        "random": jax.random.uniform(jax.random.key(0), (3,)),
        "raw": jax.random.key_data(jax.random.key(1)),
        "typed": jax.random.PRNGKey(3),
        "softmax": jax.grad(lambda w: jax.nn.softmax(w)[0])(wide),
        "scan": jax.lax.scan(lambda c, y: (c + y, c), jnp.zeros_like(wide[0]), wide),
        "gumbel": jax.random.gumbel(jax.random.key(2), (2,)),
        "logistic": jax.nn.sigmoid(x),
    }


def run(f):
    """What a call does: its result, or the type of its exception; and the log it leaves."""
    log = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return "result", f(f32(1, 2, 3, 4), log), log
        except Exception as error:
            return "exception", type(error), log


def close(a, b):
    """Of one structure, type, width and key implementation; values up to the order of floating-point operations."""
    left, right = jax.tree.leaves(a), jax.tree.leaves(b)
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    for x, y in zip(left, right, strict=True):
        if isinstance(x, jax.Array) and isinstance(y, jax.Array):
            if (x.dtype, x.shape) != (y.dtype, y.shape):
                return False
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                x, y = jax.random.key_data(x), jax.random.key_data(y)
            if x.weak_type != y.weak_type:
                return False
            if not np.allclose(np.asarray(x), np.asarray(y), rtol=1e-6):
                return False
        elif x is not y:
            return False
    return True


RELEVANT = [name for name in (*IN_JAXS_TRACE_CONTEXT, *IN_GRAFTAXS_KEY) if name in STATES]


@pytest.mark.quick(0)
def test_a_call_is_the_function_under_the_settings_as_they_are():
    assert close(run(probe), run(graftax.jit(probe)))


@pytest.mark.parametrize("name", [name for name in RELEVANT if name not in ("jax_no_execution", "jax_disable_jit")])
@pytest.mark.quick(0)
def test_a_call_under_a_setting_is_the_function_under_it(name):
    f = graftax.jit(probe)
    f.clear_cache()
    before = run(f)
    with STATES[name](another_value(name)):
        expected = run(probe)
        for _ in range(2):
            got = run(f)
            assert close(expected[:2], got[:2]), (expected, got)
        failed = got[0] == "exception"
        assert got[2] == ([] if failed else [0])  # an exception undoes what the function did before it
    after = run(f)
    assert close(before, after)
    assert f.cache_info().traces == (1 if failed else 2)


def test_disable_jit_runs_the_function_on_the_callers_own_objects():
    seen = []

    @graftax.jit
    def f(box, x):
        seen.append(box)
        box["w"] = float(x[0])  # needs a value
        return box

    with jax.disable_jit():
        box = {}
        assert f(box, f32(3)) is box and box == {"w": 3.0} and seen[-1] is box
    with pytest.raises(jax.errors.ConcretizationTypeError):
        f({}, f32(3))
    with jax.disable_jit():
        assert f({}, f32(4)) == {"w": 4.0}


def test_disable_jit_inside_of_a_trace_is_followed_by_calls_in_there():
    inner = graftax.jit(lambda log, x: log.append(x * 2))

    def outer(x):
        log = []
        with jax.disable_jit():
            inner(log, x)
        inner(log, x)
        return log

    for f in (outer, jax.jit(outer), graftax.jit(outer)):
        assert [y.tolist() for y in f(f32(1))] == [[2.0], [2.0]]


@pytest.mark.parametrize(("setting", "bad"), [("jax_debug_nans", np.nan), ("jax_debug_infs", np.inf)])
def test_debug_nans_and_infs_raise_and_change_nothing(setting, bad):
    f = graftax.jit(lambda log, x: (log.append(x * 2), {"y": x / (x - x + bad if bad != bad else x - x)})[1])
    log = []
    f(log, f32(1))
    assert len(log) == 1
    with STATES[setting](True):
        for _ in range(2):
            with pytest.raises(FloatingPointError):
                f(log, f32(1))
            assert len(log) == 1 and not isinstance(log[0], jax.core.Tracer)
    f(log, f32(1))
    assert len(log) == 2 and oracle.same_graph(log[0], log[1])


def test_debug_nans_lets_good_values_pass():
    f = graftax.jit(lambda log, x: (log.append(x), {"y": x * 2})[1])
    with STATES["jax_debug_nans"](True):
        for count in (1, 2):
            log = [0] * count
            assert f(log, f32(1))["y"].tolist() == [2.0] and len(log) == count + 1


def test_checking_leaks_finds_none():
    f = graftax.jit(lambda box, x: box.update(w=x * 2))
    with jax.checking_leaks():
        for _ in range(2):
            box = {"w": f32(1)}
            f(box, f32(3))
            assert box["w"].tolist() == [6.0]


def test_no_tracing_forbids_a_first_call_and_lets_known_ones_pass():
    f = graftax.jit(lambda x: {"y": x + 1})
    f(f32(1))
    with STATES["jax_no_tracing"](True):
        assert f(f32(2))["y"].tolist() == [3.0]
        with pytest.raises(RuntimeError, match="trac"):
            f(f32(1, 2))


def test_the_transfer_guard_sees_numpy_arguments():
    f = graftax.jit(lambda x: x + 1)
    x = np.ones(2, np.float32)
    assert f(x).tolist() == [2.0, 2.0]
    device = f32(1, 2)
    f(device)
    with jax.transfer_guard_host_to_device("disallow_explicit"):
        assert f(device).shape == (2,)
        with pytest.raises(Exception, match=r"[Dd]isallowed"):
            f(x)


def test_a_default_device_is_where_results_are():
    f = graftax.jit(lambda: {"y": jnp.ones(2)})
    with jax.default_device(jax.devices()[0]):
        assert f()["y"].devices() == {jax.devices()[0]}


@isolated()
def test_a_setting_changed_for_good_is_followed():
    f = graftax.jit(lambda x: (x + np.float64(1), jnp.arange(2)))
    assert [y.dtype.name for y in f(f32(1))] == ["float32", "int32"]
    jax.config.update("jax_enable_x64", True)
    assert [y.dtype.name for y in f(f32(1))] == ["float64", "int64"] or [y.dtype.name for y in f(f32(1))] == [
        "float32",
        "int64",
    ]
    jax.config.update("jax_enable_x64", False)
    assert [y.dtype.name for y in f(f32(1))] == ["float32", "int32"]
