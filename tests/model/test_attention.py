import dataclasses
import logging
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention import PLAIN
from families import FAMILIES

from bert_jax.config import MeshConfig
from bert_jax.errors import UserError
from bert_jax.model.attention import choice
from bert_jax.model.attention.kernels import (
    KernelOptions,
    cudnn_attention,
    cudnn_attention_by_length,
    einsum_attention,
    softmax_narrow,
)
from bert_jax.model.attention.layer import kernels
from bert_jax.model.dropout import row_seeds
from bert_jax.model.embeddings import sequence_lengths, token_positions, visible_keys
from bert_jax.model.runtime import Runtime, detailed_platform
from bert_jax.train.sharding import OnMesh, make_mesh

GPU = {"platform": "gpu", "compute_dtype": "bfloat16", "head_width": 64, "dropout_rate": 0.0}
TPU = GPU | {"platform": "tpu"}


def random_heads(slots: int = 7) -> tuple[jax.Array, ...]:
    return tuple(jax.random.normal(jax.random.key(index), (2, slots, 3, 5)) for index in range(3))


def visible_in(sequences: jax.Array, **limits) -> jax.Array:
    places = token_positions(sequences, jnp.zeros_like(sequences))
    return visible_keys(places, places, **limits)


SEQUENCES = jnp.asarray([[1, 1, 1, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1, 1]], jnp.int32)


def test_a_query_sees_its_own_sequence_and_no_padding():
    visible = np.asarray(visible_in(SEQUENCES))[0, 0]
    np.testing.assert_array_equal(visible[0], [1, 1, 1, 0, 0, 0, 0])
    np.testing.assert_array_equal(visible[3], [0, 0, 0, 1, 1, 0, 0])


def test_windows_and_causality_are_those_of_a_loop_over_pairs():
    for window, causal in ((0, True), (2, False), (1, True)):
        visible = np.asarray(visible_in(SEQUENCES, window=window, causal=causal))
        for row, query, key in np.ndindex(2, 7, 7):
            same = SEQUENCES[row, query] == SEQUENCES[row, key]
            near = not window or abs(query - key) <= window
            assert visible[row, 0, query, key] == (same and near and (not causal or key <= query))


def test_a_bias_is_added_to_the_scores_before_the_softmax():
    heads, visible, bias = random_heads(), visible_in(SEQUENCES), jax.random.normal(jax.random.key(9), (1, 3, 7, 7))
    wanted = jax.nn.dot_product_attention(*heads, bias=bias, mask=visible, implementation="xla")
    context, probabilities = einsum_attention(heads, visible, None, PLAIN, bias=bias)
    np.testing.assert_allclose(context, wanted, atol=1e-6)
    np.testing.assert_allclose(probabilities.sum(-1), 1, atol=1e-6)
    np.testing.assert_allclose(jnp.einsum("bnqk,bknh->bqnh", probabilities, heads[2]), wanted, atol=1e-6)


def test_einsum_equals_jax_dot_product_attention():
    heads, visible = random_heads(), visible_in(SEQUENCES)
    wanted = jax.nn.dot_product_attention(*heads, mask=visible, implementation="xla")
    np.testing.assert_allclose(einsum_attention(heads, visible, None, PLAIN)[0], wanted, atol=1e-6)


def test_a_masked_key_has_zero_gradient_and_padding_makes_no_nan():
    visible = visible_in(SEQUENCES)

    def first_sequence(*heads):
        return jnp.square(einsum_attention(heads, visible, None, PLAIN)[0][0, :3]).sum()

    gradients = jax.grad(first_sequence, (0, 1, 2))(*random_heads())
    for gradient in gradients:
        assert np.abs(gradient[0, :3]).min() > 0
        np.testing.assert_array_equal(gradient[0, 3:], 0)
        np.testing.assert_array_equal(gradient[1], 0)


def test_a_row_of_padding_alone_stays_finite_with_its_gradient():
    nothing = visible_in(jnp.zeros((2, 7), jnp.int32))

    def total(*heads):
        return einsum_attention(heads, nothing, None, PLAIN)[0].sum()

    value, gradients = jax.value_and_grad(total, (0, 1, 2))(*random_heads())
    assert np.isfinite(value)
    assert all(np.isfinite(gradient).all() for gradient in gradients)


def test_dropout_falls_on_the_probabilities_and_leaves_their_mean():
    query, key, _ = random_heads(slots=64)
    visible = jnp.ones((2, 1, 64, 64), bool)
    ones = jnp.ones((2, 64, 3, 5))
    seeds = row_seeds(jax.random.key(3), (), 2)
    options = dataclasses.replace(PLAIN, dropout_rate=0.1)
    sums = einsum_attention((query, key, ones), visible, seeds, options)[0]  # of each query's kept probabilities
    assert float(jnp.std(sums)) > 0.01
    # 384 queries of about 64 probabilities each: the standard error of the mean is under 0.01. Five of them.
    assert abs(float(sums.mean()) - 1) < 0.05


def choose(requested, **situation):
    return choice.choose(requested, choice.Situation(**situation))


def test_auto_takes_cudnn_only_where_it_can():
    assert choose("auto", **GPU) == "cudnn"
    assert choose("einsum", **GPU) == "einsum"
    for change in ({"platform": "cpu"}, {"compute_dtype": "float32"}, {"dropout_rate": 0.1}, {"needs_scores": True}):
        assert choose("auto", **GPU | change) == "einsum"
    assert choose("auto", **GPU | {"head_width": 5}) == "einsum"
    assert choose("auto", **GPU | {"some_queries": True}) == "cudnn"


@pytest.mark.parametrize(
    ("platform", "version", "kernel"),
    [
        ("gpu", "PJRT C API\ncuda 12090", "cudnn"),
        ("gpu", "PJRT C API\nrocm 60300", "einsum"),
        ("gpu", "a third maker's 1.0", "einsum"),
        ("cpu", "<unknown>", "einsum"),
    ],
)
def test_gpus_of_other_makers_use_einsum(platform, version, kernel):
    """jax calls them all `gpu`."""
    found = detailed_platform(SimpleNamespace(platform=platform, platform_version=version))
    assert choose("auto", **GPU | {"platform": found}) == kernel


def test_the_platform_of_this_machine_is_found():
    assert Runtime().device_platform == detailed_platform(jax.devices()[0].client)
    assert Runtime(platform="tpu").device_platform == "tpu"
    if jax.default_backend() != "gpu":
        assert Runtime().device_platform == jax.default_backend()


def test_auto_takes_splash_only_where_it_can():
    assert choose("auto", **TPU) == "splash"
    for change in (
        {"compute_dtype": "float32"},
        {"dropout_rate": 0.1},
        {"needs_scores": True},
        {"head_width": 36},
        {"some_queries": True},
        {"shardable": False},
    ):
        assert choose("auto", **TPU | change) == "einsum"


def test_flash_runs_with_dropout_where_it_is_requested_and_never_by_itself():
    dropping = TPU | {"dropout_rate": 0.1}
    assert choose("auto", **dropping) == "einsum"
    assert choose("flash", **dropping) == choose("flash", **TPU) == "flash"
    assert choose("flash", **dropping | {"some_queries": True}) == "einsum"


def test_bands_are_for_layers_with_a_window_that_is_narrow():
    narrow = {"window": 128, "local": True, "length": 513}
    for device in (GPU, TPU):
        assert choose("auto", **device | narrow | {"compute_dtype": "float32"}) == "banded"
    # Bands rather than cuDNN's dense scores; splash skips blocks outside of the window itself.
    assert choose("auto", **GPU | narrow) == "banded" and choose("auto", **TPU | narrow) == "splash"
    assert choose("auto", **GPU | narrow | {"length": 512}) == "cudnn"
    assert choose("cudnn", **GPU | narrow) == "cudnn"
    plain = GPU | {"dropout_rate": 0.123} | narrow
    for change in (
        {"local": False},
        {"length": 512},
        {"some_queries": True},
        {"needs_scores": True},
    ):
        assert choose("auto", **plain | change) == "einsum"
    assert choose("banded", **plain | {"length": 512}) == "banded"
    assert (
        choose("banded", **plain | {"local": False}) == choose("banded", **plain | {"some_queries": True}) == "einsum"
    )


@pytest.mark.parametrize(
    ("kernel", "change", "reason"),
    [
        ("banded", {}, r"windowed layers \(model\.window\)"),
        ("banded", {"window": 128, "needs_scores": True}, "banded returns no attention maps"),
        ("splash", {}, "splash needs a TPU, and this runs on gpu"),
        ("splash", {"platform": "tpu", "head_width": 12}, "splash .* multiple of 8, got 12"),
        ("splash", {"platform": "tpu", "shardable": False}, r"jax\.set_mesh"),
        ("flash", {}, "flash needs a TPU, and this runs on gpu"),
        ("flash", {"platform": "tpu", "compute_dtype": "float32"}, "flash needs config.compute_dtype=bfloat16"),
        ("flash", {"platform": "tpu", "needs_scores": True}, "flash returns no attention maps"),
        ("flash", {"platform": "tpu", "shardable": False}, r"jax\.set_mesh"),
        ("cudnn", {"platform": "cpu"}, "runs on cpu"),
        ("cudnn", {"platform": "rocm"}, "cudnn needs an NVIDIA GPU, and this runs on rocm; or use .*attention=auto"),
        ("cudnn", {"compute_dtype": "float32"}, "compute_dtype=bfloat16"),
        ("cudnn", {"dropout_rate": 0.1}, "attention_dropout=0"),
        ("cudnn", {"head_width": 12}, "multiple of 8"),
        ("cudnn", {"needs_scores": True}, "relative positions"),
        ("triton", {"platform": "tpu"}, "triton needs an NVIDIA GPU, and this runs on tpu"),
        ("triton", {"head_width": 24}, "triton needs a head width of 16, 32, 64 or 128, got 24"),
        ("triton", {"shardable": False}, r"jax\.set_mesh"),
    ],
)
def test_a_kernel_that_cannot_run_is_refused_with_the_reason(kernel, change, reason):
    with pytest.raises(UserError, match=reason):
        choose(kernel, **GPU | change)


def test_cudnn_is_the_default_without_dropout_from_ampere_on():
    assert choose("auto", **GPU) == "cudnn" and choose("auto", **GPU | {"head_width": 256}) == "einsum"
    assert choose("auto", **GPU | {"capability": "8.0"}) == "cudnn"
    assert choose("auto", **GPU | {"capability": "7.5"}) == "einsum"  # Turing


def test_triton_has_dropout_and_is_the_default_where_it_was_timed():
    dropped = GPU | {"dropout_rate": 0.1, "length": 128}
    assert choose("triton", **dropped) == "triton" and choose("auto", **dropped) == "einsum"
    assert choose("triton", **dropped | {"some_queries": True}) == "einsum"
    hopper = dropped | {"capability": "9.0", "head_width": 64}
    assert choose("auto", **hopper) == choose("auto", **hopper | {"length": 512}) == "triton"
    assert choose("auto", **hopper | {"dropout_rate": 0.0}) == "cudnn"
    untimed = {"capability": "8.0"}, {"head_width": 32}, {"length": 64}, {"length": 136}, {"causal": True}
    refused = {"window": 128, "local": True}, {"some_queries": True}, {"compute_dtype": "float32"}, {"shardable": False}
    for change in (*untimed, *refused):
        assert choose("auto", **hopper | change) == "einsum"


def test_a_model_with_dropout_has_the_timed_kernel_on_hopper():
    base = dataclasses.replace(FAMILIES["bert"], width=128, heads=2, attention_dropout=0.1)
    hopper = Runtime("bfloat16", platform="gpu", capability="9.0", placement=OnMesh())
    with jax.set_mesh(make_mesh(MeshConfig())):
        assert kernels(base, hopper, 128) == kernels(base, hopper, 512) == ["triton"]
        for other, length in ((hopper, 64), (dataclasses.replace(hopper, capability="8.0"), 128)):
            assert kernels(base, other, length) == ["einsum"]
        assert kernels(dataclasses.replace(base, causal=True), hopper, 128) == ["einsum"]
        assert kernels(dataclasses.replace(base, attention_dropout=0.0), hopper, 128) == ["cudnn"]


def test_the_kernels_of_a_model_are_those_of_its_kinds_of_layers():
    modern = FAMILIES["modernbert"]  # layer 0 sees all, layer 1 a window
    assert kernels(modern, Runtime(attention="banded"), 10) == ["einsum", "banded"]
    assert kernels(modern, Runtime(), 1000) == ["einsum", "banded"]
    assert kernels(modern, Runtime(), 10) == kernels(FAMILIES["shaw"], Runtime(), 1000) == ["einsum"]
    with pytest.raises(UserError, match=r"windowed layers \(model\.window\)"):
        kernels(FAMILIES["bert"], Runtime(attention="banded"), 1000)


def test_an_unknown_kernel_is_refused_by_name():
    with pytest.raises(
        UserError,
        match=r"unknown config\.model\.attention 'ring'; "
        r"choose from auto, splash, banded, cudnn, flash, triton, einsum",
    ):
        choose("ring", **GPU)


def test_the_choice_is_logged_once(caplog):
    choice.log_once.cache_clear()
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            choose("auto", **GPU | {"dropout_rate": 0.123})
    assert [record.message for record in caplog.records] == [
        "attention kernel: einsum (cudnn needs config.model.attention_dropout=0, got 0.123)"
    ]


@pytest.mark.accelerator
@pytest.mark.usefixtures("nvidia_gpu")
@pytest.mark.parametrize("causal", [False, True])
def test_cudnn_equals_einsum_in_values_and_gradients(causal):
    """With a mask on packed rows; with lengths, and without any array of T x T, on rows of one sequence."""
    heads = [jax.random.normal(jax.random.key(index), (2, 128, 3, 64), jnp.bfloat16) for index in range(3)]
    packed = jnp.repeat(jnp.asarray([[1, 2, 3, 0], [1, 1, 1, 1]], jnp.int32), 32, axis=1)
    alone = jnp.repeat(jnp.asarray([[1, 1, 1, 0], [1, 1, 1, 1]], jnp.int32), 32, axis=1)
    for sequences, masked in ((packed, True), (alone, False)):
        places = token_positions(sequences, sequences, unpacked=not masked)
        visible, real = visible_keys(places, places, causal=causal), (sequences > 0)[..., None, None]

        def fused(heads, places=places, visible=visible, masked=masked):
            if masked:
                return cudnn_attention(heads, visible, KernelOptions())
            return cudnn_attention_by_length(heads, sequence_lengths(places), KernelOptions(causal=causal))

        def run(attend, real=real):
            def loss(*heads):
                context = jnp.where(real, attend(heads), 0)
                return jnp.sin(context.astype(jnp.float32)).sum(), context

            return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))

        wanted = run(lambda heads, visible=visible: einsum_attention(heads, visible, None, PLAIN)[0])(*heads)
        program = run(fused).lower(*heads).compile()
        for ours, theirs in zip(jax.tree.leaves(program(*heads)), jax.tree.leaves(wanted), strict=True):
            ours, theirs = (np.asarray(array, np.float32) for array in (ours, theirs))
            np.testing.assert_allclose(ours, theirs, rtol=1e-2, atol=3e-2)
        assert ("[2,1,128,128]" in program.as_text()) == masked and "[2,3,128,128]" not in program.as_text()


def test_the_softmax_that_keeps_half_has_the_gradient_of_the_other_to_half_precision():
    scores, weights = (4 * jax.random.normal(jax.random.key(index), (3, 40)) for index in range(2))
    np.testing.assert_array_equal(softmax_narrow(scores), jax.nn.softmax(scores, axis=-1))
    narrow, exact = (
        jax.grad(lambda scores, softmax=softmax: (softmax(scores) * weights).sum())(scores)
        for softmax in (softmax_narrow, jax.nn.softmax)
    )
    np.testing.assert_allclose(narrow, exact, rtol=0, atol=2**-7 * float(np.abs(exact).max()))
