"""The bytes model, against numbers that were worked out by hand."""

import pytest

from benchmarks.models import MODELS, ModelSize
from benchmarks.traffic import main, tail_of
from moetrt.errors import InputError
from moetrt.traffic import Tail, bytes_moved, floor_seconds, ways

# Each figure is written as rows of H elements, then what the router and gamma add.
BY_HAND = [
    # DeepSeek-V3: K rows, shared and residual in, two out, 2*7168 bytes each: 172,032 bytes a token.
    # The map takes 4*8 bytes, float32 weights 4*8; gamma is read once, 2*7168.
    (tail_of(MODELS["deepseek-v3"], 1), "fused", 172_032 + 32 + 32 + 14_336),
    (tail_of(MODELS["deepseek-v3"], 1000), "fused", 1000 * (172_032 + 64) + 14_336),
    # finalize 8 + 1, shared add 3, add + RMSNorm 2 + 2: 16 rows of 14,336 bytes.
    (tail_of(MODELS["deepseek-v3"], 1), "separate", 16 * 14_336 + 64 + 14_336),
    # the gather reads and writes 8; the rest reads 8, shared, residual and writes 2: 28 rows.
    (tail_of(MODELS["deepseek-v3"], 1), "gathered", 28 * 14_336 + 64 + 14_336),
    # gather 16, weights 16, sum 9, factor 2, shared add 3, residual add 3: 49 rows; norm in float32 (2 rows each):
    # to float32 1 + 2, square 4, mean 2, times rsqrt 4, from float32 2 + 1, times gamma 2: 18. Scalars a token:
    # mean 4, add eps 8, rsqrt 8, times rsqrt 4.
    (tail_of(MODELS["deepseek-v3"], 1), "eager", 67 * 14_336 + 64 + 24 + 14_336),
    # Qwen3: 8 rows and residual in, two out, 11 rows of 8,192 bytes; map 32, bf16 weights 16.
    (tail_of(MODELS["qwen3-235b"], 2), "fused", 2 * (11 * 8_192 + 48) + 8_192),
    (tail_of(MODELS["qwen3-235b"], 2), "separate", 2 * (13 * 8_192 + 48) + 8_192),
    # gpt-oss: 4 + 1 + 2 = 7 rows of 5,760 bytes; map 16, weights 8.
    (tail_of(MODELS["gpt-oss"], 1), "fused", 7 * 5_760 + 24 + 5_760),
    # Mixtral: 2 + 1 + 2 = 5 rows of 8,192 bytes; map 8, weights 4.
    (tail_of(MODELS["mixtral"], 1), "fused", 5 * 8_192 + 12 + 8_192),
    # Qwen3-Next: 10 + 1 + 1 + 2 = 14 rows of 4,096 bytes; map 40, weights 20, gate 2.
    (tail_of(MODELS["qwen3-next"], 1), "fused", 14 * 4_096 + 62 + 4_096),
    # gather 20, weights 20, sum 11, times gate 2, shared add 3, residual add 3, norm 18: 77 rows; the gate is read and
    # written by the sigmoid and read once more.
    (tail_of(MODELS["qwen3-next"], 1), "eager", 77 * 4_096 + 60 + 6 + 24 + 4_096),
    # MoEFinalizeAdd in float32 without a map: 2 rows in, one out, 8 elements of 4 bytes; weights 8.
    (Tail(1, 2, 8, "fp32", "fp32", "fp32", "fp32", mapped=False, residual=False, norm=False), "fused", 3 * 32 + 8),
    (Tail(1, 2, 8, "fp32", "fp32", "fp32", "fp32", mapped=False, residual=False, norm=False), "separate", 3 * 32 + 8),
    # A quarter of the routes on this rank: the map and weights are read in full, one row in four.
    (Tail(4, 4, 8, routes=4), "fused", (4 + 3 * 4) * 16 + 4 * 4 * (4 + 2) + 16),
    # fp32 gamma with bf16 rows.
    (Tail(1, 1, 8, gamma_dtype="fp32"), "fused", 4 * 16 + 4 + 2 + 32),
    (Tail(0, 8, 7168), "fused", 0),
]


@pytest.mark.parametrize(("tail", "way", "wanted"), BY_HAND)
def test_bytes_by_hand(tail: Tail, way: str, wanted: int) -> None:
    assert bytes_moved(ways(tail)[way]) == wanted


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_nothing_moves_less_than_the_fused_kernel(model: ModelSize) -> None:
    moved = {name: bytes_moved(way) for name, way in ways(tail_of(model, 4096)).items()}
    assert moved["fused"] < min(moved["separate"], moved["gathered"])
    assert max(moved["separate"], moved["gathered"]) < moved["eager"]


def test_the_fused_kernel_moves_three_quarters_of_separate_kernels_for_deepseek() -> None:
    way = ways(tail_of(MODELS["deepseek-v3"], 16384))
    assert bytes_moved(way["separate"]) / bytes_moved(way["fused"]) == pytest.approx(4 / 3, rel=1e-3)


def test_time_is_bytes_over_bandwidth() -> None:
    way = ways(tail_of(MODELS["deepseek-v3"], 1000))["fused"]
    assert floor_seconds(way, 4.8e12) == pytest.approx((1000 * 172_096 + 14_336) / 4.8e12)
    with pytest.raises(InputError, match="bandwidth was 0"):
        floor_seconds(way, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": -1}, "tokens was -1; 0 or more is taken"),
        ({"hidden": 0}, "hidden was 0; 1 or more is taken"),
        ({"dtype": "fp8"}, "dtype was 'fp8'; bf16 or fp16 or fp32 is taken"),
        ({"gamma_dtype": "fp16"}, "gamma_dtype was 'fp16'; bf16 or fp32 is taken"),
        ({"gate": True}, "gate was given without shared, which it gates"),
        ({"norm": False}, "residual was given without norm; MoEFinalizeAdd has no residual"),
        ({"routes": 9}, "routes was 9; 0 to T*K = 8 is taken"),
    ],
    ids=str,
)
def test_what_is_no_tail_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as refused:
        Tail(**({"tokens": 4, "top_k": 2, "hidden": 8} | changes))  # type: ignore[arg-type]
    assert str(refused.value) == message


def test_the_command_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "deepseek-v3", "--tokens", "1000", "--bandwidth", "4.8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "T=1000 K=8 H=7168 bf16: map, shared, residual, norm"
    assert lines[2].split() == ["fused", "1", "172,110,336", "172,110", "1.00", "35.86", "us"]
    assert [line.split()[0] for line in lines[2:]] == ["fused", "separate", "gathered", "eager"]
    assert main(["-T", "1", "-K", "8", "-H", "7168", "--shared", "--weights-dtype", "fp32", "--kernels"]) == 0
    assert "  shared add" in capsys.readouterr().out


def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "deepseek-v4"]) == 2
    assert main(["--bandwidth", "-1"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "moetrt: error: model was 'deepseek-v4'; one of deepseek-v3, qwen3-235b, gpt-oss, mixtral, qwen3-next is taken",
        "moetrt: error: --bandwidth was -1; 1e-06 to 1e+06 is taken",
    ]
