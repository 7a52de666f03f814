"""Which tactics there are for a tail, which is the default, and how TensorRT's choice reaches the launch.

The choice is a pure function of sizes, dtypes, alignment and device, so nothing here needs a GPU.
"""

import ctypes
from collections.abc import Iterator

import pytest

from moetrt.library import Device, MoEFinalizeParams, PluginLibrary
from moetrt.spec import FINALIZE_ADD, FINALIZE_ADD_RMS_NORM
from tests.plugins.driver import Driver, Plugin
from tests.plugins.node_cases import Node, make_node

FP32, FP16, BF16 = range(3)
H200, A100 = (90, 132), (80, 108)
CLUSTERS = ["cluster_2", "cluster_4", "cluster_8"]


def tactics(
    library: PluginLibrary, tokens: int, hidden: int, device: tuple[int, int] = H200, dtype: int = BF16, **sizes: int
) -> list[str]:
    params = MoEFinalizeParams(
        num_tokens=tokens, top_k=8, num_rows=tokens * 8, hidden_size=hidden, row_stride=hidden, dtype=dtype
    )
    for name, value in sizes.items():
        setattr(params, name, value)
    found = library.tactics(params, Device(*device))
    assert 0 not in found
    return list(found.values())


DEFAULTS = [
    # Decode on SM90: the largest cluster that leaves no multiprocessor without a token and no CTA with one warp.
    (1, 7168, H200, "cluster_8"),
    (16, 7168, H200, "cluster_8"),
    (17, 7168, H200, "cluster_4"),
    (33, 7168, H200, "cluster_4"),
    (34, 7168, H200, "cluster_2"),
    (66, 7168, H200, "cluster_2"),
    (67, 7168, H200, "cta_16"),
    (1, 4096, H200, "cluster_8"),
    (1, 2048, H200, "cluster_4"),
    (1, 1024, H200, "cluster_2"),
    (1, 512, H200, "cta_8"),
    # Before SM90, and where tokens fill the chip but do not queue: the most threads a token.
    (1, 7168, A100, "cta_16"),
    (1, 4096, A100, "cta_8"),
    (264, 4096, H200, "cta_8"),
    (216, 4096, A100, "cta_8"),
    # Prefill: the fewest threads a token of 128 or more.
    (265, 4096, H200, "cta_32"),
    (4096, 7168, H200, "cta_32"),
    (4096, 2880, H200, "cta_16"),
    (4096, 2048, A100, "cta_16"),
    (4096, 1024, H200, "cta_8"),
    (4096, 64, H200, "cta_8"),
    (16384, 16384, H200, "cta_32"),
    # Wider than a CTA's registers: the smallest cluster whose registers hold it, and beyond them the walk.
    (4096, 16392, H200, "cluster_8"),
    (4096, 16392, A100, "cta_32"),
    (1, 40000, H200, "cta_32"),
    # No 16-byte accesses.
    (1, 7167, H200, "scalar"),
    (4096, 66, A100, "scalar"),
]


@pytest.mark.parametrize(("tokens", "hidden", "device", "name"), DEFAULTS)
def test_the_default_needs_no_timing(
    library: PluginLibrary, tokens: int, hidden: int, device: tuple[int, int], name: str
) -> None:
    assert tactics(library, tokens, hidden, device)[0] == name


def test_the_tactics_worth_timing(library: PluginLibrary) -> None:
    assert sorted(tactics(library, 1, 7168)) == ["cluster_2", "cluster_4", "cluster_8", "cta_16", "cta_32"]
    assert sorted(tactics(library, 1, 4096)) == ["cluster_2", "cluster_4", "cluster_8", "cta_16", "cta_32", "cta_8"]
    assert sorted(tactics(library, 1, 4096, A100)) == ["cta_16", "cta_32", "cta_8"]
    # Clusters only while tokens do not fill the chip several times over.
    assert sorted(tactics(library, 200, 7168)) == ["cluster_2", "cluster_4", "cta_16", "cta_32"]
    assert sorted(tactics(library, 1056, 7168)) == ["cta_16", "cta_32"]
    # Where one warp has all, more elements a thread change nothing.
    assert tactics(library, 1, 64) == ["cta_8"]
    assert tactics(library, 0, 7168)[0] == "cluster_8"


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("device", [H200, A100, (120, 188), (75, 1), (90, 1)])
def test_there_is_always_a_tactic_and_none_twice(library: PluginLibrary, dtype: int, device: tuple[int, int]) -> None:
    for hidden in (1, 7, 8, 66, 1000, 2880, 4100, 7168, 8192, 8200, 16384, 33000, 100_000):
        for tokens in (0, 1, 3, 64, 1024, 2**31 - 1):
            found = tactics(library, tokens, hidden, device, dtype)
            assert found
            assert len(set(found)) == len(found)
            assert device[0] >= 90 or not set(CLUSTERS) & set(found)
            assert ("scalar" in found) == (hidden % (4 if dtype == FP32 else 8) != 0)


def test_case12_alignment_decides_too(library: PluginLibrary) -> None:
    assert tactics(library, 64, 64, row_stride=72) == ["cta_8"]
    assert tactics(library, 64, 64, row_stride=68) == ["scalar"]
    assert tactics(library, 64, 64, dtype=FP32, row_stride=68) == ["cta_8"]
    for name in ("gemm2_permuted", "shared_output", "residual", "gamma", "norm_out", "residual_out"):
        assert tactics(library, 64, 64, **{name: 1 << 20}) == ["cta_8"]
        assert tactics(library, 64, 64, **{name: (1 << 20) + 8}) == ["scalar"]


def test_the_list_ends_where_the_caller_has_no_room(library: PluginLibrary) -> None:
    params = MoEFinalizeParams(num_tokens=1, hidden_size=7168, row_stride=7168, dtype=BF16)
    few = (ctypes.c_int32 * 3)(-1, -1, -1)
    count = library.functions.moetrt_moe_finalize_tactics(ctypes.byref(params), ctypes.byref(Device(*H200)), few, 2)
    assert count == 5
    assert few[1] > 0
    assert few[2] == -1
    assert library.functions.moetrt_tactic_name(0) is None


# The plugin, around a launch that only remembers.


@pytest.fixture
def gpu(recording: Driver) -> Iterator[ctypes.CDLL]:
    """The recording library with an H200 that it pretends to have."""
    functions = ctypes.CDLL(None, handle=recording.library.value)
    functions.moetrt_tactic_name.restype = ctypes.c_char_p
    yield functions
    functions.moetrt_pretend_device(*H200)


NODE = make_node(hidden=7168, top_k=8)


def sizes(tokens: int) -> dict[str, int]:
    return {"T": tokens, "R": 8 * tokens}


def plugin_of(driver: Driver, node: Node = NODE, **attributes: int) -> Plugin:
    plugin = driver.create(node.spec.name, {**node.flags, **attributes}, node=node.name)
    assert plugin is not None
    return plugin


def configure(plugin: Plugin, tokens: int) -> list[int]:
    low, high = NODE.shape_list(sizes(1)), NODE.shape_list(sizes(tokens))
    assert plugin.configure(low, high, NODE.type_list())
    return plugin.tactics()


def launched(plugin: Plugin, functions: ctypes.CDLL, tokens: int, shift: int = 0) -> str:
    """The tactic of a launch; ``shift`` moves the residual by so many bytes."""
    addresses = [(1 + i) << 30 for i in range(7)]
    addresses[3] += shift
    assert plugin.enqueue(NODE.shape_list(sizes(tokens)), NODE.type_list(), addresses[:5], addresses[5:])
    return str(functions.moetrt_tactic_name(functions.moetrt_recorded_tactic()).decode())


def test_tensorrt_is_offered_the_tactics_of_the_shape_it_times(recording: Driver, gpu: ctypes.CDLL) -> None:
    plugin = plugin_of(recording)
    offered = configure(plugin, 8)
    assert [gpu.moetrt_tactic_name(tactic) for tactic in offered] == [
        b"cluster_8", b"cta_16", b"cta_32", b"cluster_2", b"cluster_4",
    ]  # fmt: skip
    assert plugin.clone().tactics() == offered
    assert [gpu.moetrt_tactic_name(tactic) for tactic in configure(plugin, 4096)] == [b"cta_32", b"cta_16"]


def test_without_a_gpu_no_tactic_is_offered(recording: Driver, gpu: ctypes.CDLL) -> None:
    gpu.moetrt_pretend_device(90, 0)
    assert configure(plugin_of(recording), 8) == []


def test_without_a_choice_the_default_follows_the_shape(recording: Driver, gpu: ctypes.CDLL) -> None:
    plugin = plugin_of(recording)
    assert [launched(plugin, gpu, tokens) for tokens in (1, 64, 128, 4096)] == [
        "cluster_8", "cluster_2", "cta_16", "cta_32",
    ]  # fmt: skip


def test_the_tactic_that_was_set_is_launched_and_kept_by_clones(recording: Driver, gpu: ctypes.CDLL) -> None:
    plugin = plugin_of(recording)
    for tactic in configure(plugin, 8):
        plugin.set_tactic(tactic)
        name = gpu.moetrt_tactic_name(tactic).decode()
        assert [launched(each, gpu, 8) for each in (plugin, plugin.clone(), plugin.attach())] == [name] * 3
    plugin.set_tactic(0)
    assert launched(plugin, gpu, 8) == "cluster_8"


def test_a_tactic_that_does_not_run_gives_way_to_the_default(recording: Driver, gpu: ctypes.CDLL) -> None:
    plugin = plugin_of(recording)
    plugin.set_tactic(configure(plugin, 8)[0])
    assert launched(plugin, gpu, 8, shift=2) == "scalar"
    gpu.moetrt_pretend_device(*A100)  # an engine that was built for later devices too
    assert launched(plugin.attach(), gpu, 8) == "cta_16"
    plugin.set_tactic(12345)  # of a later library
    assert launched(plugin, gpu, 8) == "cta_16"


def test_a_tactic_that_was_timed_at_another_size_gives_way_where_it_is_not_useful(
    recording: Driver, gpu: ctypes.CDLL
) -> None:
    plugin = plugin_of(recording)
    plugin.set_tactic(configure(plugin, 8)[0])
    assert [launched(plugin, gpu, tokens) for tokens in (8, 132, 133, 16384)] == [
        "cluster_8", "cluster_8", "cta_16", "cta_32",
    ]  # fmt: skip
    plugin.set_tactic(next(tactic for tactic in configure(plugin, 4096) if gpu.moetrt_tactic_name(tactic) == b"cta_32"))
    assert [launched(plugin, gpu, tokens) for tokens in (8, 16384)] == ["cta_32"] * 2


def test_a_clone_asks_anew_for_the_device_that_it_is_configured_on(recording: Driver, gpu: ctypes.CDLL) -> None:
    plugin = plugin_of(recording)
    offered = configure(plugin, 8)
    clone = plugin.clone()
    gpu.moetrt_pretend_device(90, 0)
    assert configure(clone, 8) == []
    gpu.moetrt_pretend_device(*H200)
    assert configure(clone.clone(), 8) == offered


def test_a_context_asks_for_its_device_once(recording: Driver, gpu: ctypes.CDLL) -> None:
    context = plugin_of(recording).attach()
    before = gpu.moetrt_questions()
    for tokens in (1, 2, 300):
        assert context.on_shape_change(NODE.shape_list(sizes(tokens)), NODE.type_list())
        launched(context, gpu, tokens)
    assert gpu.moetrt_questions() == before


def test_the_timing_cache_knows_library_kernel_and_attributes(recording: Driver, library: PluginLibrary) -> None:
    plugin = plugin_of(recording)
    assert plugin.timing_cache_id.startswith(f"moetrt {library.version} kernel 2 ")
    ids = {plugin_of(recording, **{name: value}).timing_cache_id
           for name in ("weight_before_cast", "apply_expert_weights", "programmatic_dependent_launch")
           for value in (0, 1)}  # fmt: skip
    assert len(ids) == 4
    assert plugin.clone().timing_cache_id == plugin.timing_cache_id


@pytest.mark.parametrize("spec", [FINALIZE_ADD_RMS_NORM, FINALIZE_ADD])
def test_programmatic_dependent_launch_is_the_attributes(recording: Driver, spec: object) -> None:
    node = make_node(spec)  # type: ignore[arg-type]
    functions = ctypes.CDLL(None, handle=recording.library.value)
    for value in (0, 1):
        inputs = [(1 + i) << 20 for i in range(len(node.inputs))]
        outputs = [(100 + i) << 20 for i in range(len(node.spec.outputs))]
        plugin = plugin_of(recording, node, programmatic_dependent_launch=value)
        assert plugin.enqueue(node.shape_list({"T": 2, "R": 8}), node.type_list(), inputs, outputs)
        params, stream = MoEFinalizeParams(), ctypes.c_void_p()
        functions.moetrt_recorded(ctypes.byref(params), ctypes.byref(stream))
        assert params.programmatic_dependent_launch == value


@pytest.mark.parametrize(("tactic", "name"), [(99, "99"), (-1, "-1"), (4, "cluster_2"), (1, "cta_8")])
def test_a_tactic_that_does_not_run_is_refused_by_name(gpu: ctypes.CDLL, tactic: int, name: str) -> None:
    gpu.moetrt_last_error.restype = ctypes.c_char_p
    gpu.moetrt_pretend_device(*A100)
    params = MoEFinalizeParams(
        num_tokens=1, top_k=1, num_rows=1, row_stride=7168, hidden_size=7168, dtype=BF16, weight_before_cast=1,
        gemm2_permuted=1 << 20, residual_out=2 << 20,
    )  # fmt: skip
    assert gpu.moetrt_moe_finalize_with_tactic(ctypes.byref(params), tactic, None) != 0
    assert gpu.moetrt_last_error().decode() == (
        f"moetrt_moe_finalize: tactic {name} does not run these params on this device, "
        "taken are those of moetrt_moe_finalize_tactics"
    )
    assert gpu.moetrt_moe_finalize_with_tactic(ctypes.byref(params), 2, None) == 0
