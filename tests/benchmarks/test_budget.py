"""The static budget: the built library keeps to it, and code that does not is found."""

import dataclasses
from pathlib import Path

import pytest

from benchmarks import budget
from benchmarks.budget import faults, innermost_loops, load_batches, resident_warps, size_faults
from benchmarks.cubins import Instruction, Kernel, read_kernels
from moetrt.errors import MoetrtError
from tests.plugins.host.host_build import KERNEL

ARCHITECTURES = [80, 86, 89, 90, 100, 120]


@pytest.fixture(scope="session")
def kernels(plugin_library: Path) -> list[Kernel]:
    return read_kernels(plugin_library)


def test_every_kernel_of_the_library_keeps_to_the_budget(kernels: list[Kernel], plugin_library: Path) -> None:
    assert sorted({kernel.architecture for kernel in kernels}) == ARCHITECTURES
    assert [fault for kernel in kernels for fault in faults(kernel)] == []
    assert size_faults(plugin_library) == []


def test_every_kernel_was_read(kernels: list[Kernel]) -> None:
    for kernel in kernels:
        opcodes = {item.name for item in kernel.instructions}
        if budget.is_empty(kernel):
            assert not {"LDG", "STG"} & opcodes
            continue
        assert {"LDG", "STG", "FFMA", "EXIT"} <= opcodes, kernel.name
        assert 0 < kernel.registers <= 255
        assert kernel.max_threads % 32 == 0
        wide = {item.bits for item in kernel.instructions if item.name == "LDG"}
        assert (128 in wide) == budget.is_wide(kernel), kernel.name
        assert resident_warps(kernel, kernel.max_threads) * 32 >= kernel.max_threads


def test_the_table_has_a_row_for_each_kernel(
    kernels: list[Kernel], plugin_library: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "read_kernels", lambda library: kernels)
    assert budget.main([str(plugin_library)]) == 0
    printed = capsys.readouterr().out
    assert f"{len(kernels)} kernels" in printed
    assert [f"sm_{number}" in printed for number in ARCHITECTURES] == [True] * len(ARCHITECTURES)
    assert "every rule holds" in printed
    spilling = dataclasses.replace(kernels[0], code=(*kernels[0].code, Instruction("STL.64", "[R1], R2")))
    monkeypatch.setattr(budget, "read_kernels", lambda library: [spilling])
    assert budget.main([str(plugin_library)]) == 1
    assert f"{spilling.name} sm_{spilling.architecture}: 1 spilling instructions" in capsys.readouterr().out


def code(text: str) -> tuple[Instruction | str, ...]:
    """One instruction or label a line; a line that ends in *n stands n times."""
    items: list[Instruction | str] = []
    for line in text.strip().splitlines():
        line, _, times = line.strip().partition(" *")
        item = line if line.startswith(".L") else Instruction(*(line.split(" ", 1) if " " in line else (line, "")))
        items += [item] * int(times or 1)
    return tuple(items)


GOOD = """
LDG.E R2, [R4.64]
.L_x_1
LDG.E.128 R8, [R40.64] *8
IMAD.U32 R20, R9, 0x10000
FFMA R30, R20, R50, R30
BRA `(.L_x_1)
LDG.E.128 R8, [R40.64] *2
PRMT R12, R10, 0x7632, R12
FADD R30, R30, R12
STG.E.128.STRONG.SM [R40.64], R8
EXIT
"""


def kernel(text: str = GOOD, name: str = "moeFinalizeKernel<bf16, true>", **changes: int) -> Kernel:
    sizes = {"registers": 96, "stack": 0, "local": 0, "shared": 900, "max_threads": 256} | changes
    return Kernel(name, architecture=sizes.pop("architecture", 90), code=code(text), **sizes)


def test_loads_are_followed_through_conversions() -> None:
    good = kernel()
    assert faults(good) == []
    assert [loads for loads, _ in load_batches(good)] == [8, 2]
    assert [good.code[position] for _, position in load_batches(good)] == [
        Instruction("FFMA", "R30, R20, R50, R30"),
        Instruction("FADD", "R30, R30, R12"),
    ]
    # An FFMA on other numbers ends no batch; a register that was written over is the load's no more.
    for before in ("FFMA R30, R31, R32, R33", "MOV R9, R70\nFFMA R30, R9, R50, R30"):
        moved = GOOD.replace("IMAD.U32", f"{before}\nLDG.E.128 R8, [R40.64]\nIMAD.U32")
        assert [loads for loads, _ in load_batches(kernel(moved))] == [9, 2]
    # FFMA2 reads pairs: R10 is the second of R9.
    pairs = GOOD.replace("IMAD.U32 R20, R9, 0x10000\nFFMA R30, R20, R50, R30", "FFMA2 R30, R7, R50, R30")
    assert [loads for loads, _ in load_batches(kernel(pairs))] == [8, 2]


def test_a_loop_is_innermost_where_none_lies_within() -> None:
    nested = kernel(".L_a\n.L_b\nIADD3 R1, R1, R2\n@P0 BRA `(.L_b)\nBRA `(.L_a)".replace("@P0 ", ""))
    assert innermost_loops(nested) == [range(1, 4)]


SINKING = GOOD.replace(" *8", " *3").replace(
    "BRA `(.L_x_1)", "LDG.E.128 R8, [R40.64] *5\nFFMA R30, R8, R50, R30\nBRA `(.L_x_1)", 1
)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (kernel(stack=16), "16 bytes of stack"),
        (kernel(local=8), "8 bytes of local memory"),
        (kernel(GOOD + "LDL R3, [R1]"), "1 spilling instructions"),
        (kernel(GOOD.replace("STG.E.128.STRONG.SM", "STG.E.64")), "STG.E.64 on the vector path"),
        (kernel(GOOD.replace(".L_x_1\n", ".L_x_1\nLDG.E.U16 R3, [R4.64]\n")), "a load of 16 bits in a loop that"),
        (kernel(GOOD.replace(" *8", " *7")), "0 of 1 batches load 8 rows before the first is added"),
        (
            kernel(name="moeFinalizeKernel<bf16, true, 16, false>"),
            "1 of 2 batches load 8 rows before the first is added",
        ),
        (
            kernel(name="moeFinalizeKernel<float, true, 8, true>"),
            "1 of 2 batches load 8 rows before the first is added",
        ),
        (kernel(SINKING), "0 of 1 batches load 8 rows before the first is added"),
        (kernel(name="moeFinalizeKernel<bf16, false>"), "an access of 128 bits on the scalar path"),
        (kernel(architecture=130), "its multiprocessor's limits are not known"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_code_that_breaks_a_rule_is_found(bad: Kernel, message: str) -> None:
    assert any(fault.startswith(f"{bad.name} sm_{bad.architecture}: {message}") for fault in faults(bad))


def test_warps_are_what_registers_threads_and_shared_memory_allow() -> None:
    # 64 registers: 2,048 a warp, 32 warps; 65: 2,304, 28 warps, which hold one CTA of 512 threads or seven of 128.
    assert resident_warps(kernel(registers=64), 512) == 32
    assert [resident_warps(kernel(registers=65), threads) for threads in (128, 512)] == [28, 16]
    # 32 registers: the most that there are, and no more CTAs than 32.
    assert [resident_warps(kernel(registers=32), threads) for threads in (32, 128, 1024)] == [32, 64, 64]
    assert resident_warps(kernel(registers=32, architecture=86), 1024) == 32
    # 60 KB of 228 KB: three CTAs; before sm_90 the system's 1 KB is not in the number: two of 54 KB would fit 108 KB.
    assert resident_warps(kernel(registers=32, shared=60 * 1024), 128) == 12
    assert resident_warps(kernel(registers=32, shared=54 * 1024, architecture=80), 128) == 8


def test_a_file_without_machine_code_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert budget.main([str(tmp_path / "none.so")]) == 2
    assert "none.so" in capsys.readouterr().err
    with pytest.raises(MoetrtError):
        read_kernels(KERNEL / "moe_finalize.cu")


def test_a_library_that_is_too_large_is_found(tmp_path: Path) -> None:
    library = tmp_path / "libmoetrt_plugins.so"
    with library.open("wb") as file:
        file.truncate(8_000_000)
    assert size_faults(library) == ["libmoetrt_plugins.so: 8,000,000 bytes; less than 8,000,000 is held"]
