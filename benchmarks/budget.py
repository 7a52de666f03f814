"""What every kernel takes of a multiprocessor and how it loads, read from the machine code of the built library.

    make budget          or    python -m benchmarks.budget [libmoetrt_plugins.so]

A row of the table is one kernel on one architecture; its number is how many elements of the hidden state a thread
holds. "loads" counts the 128-bit global loads that are issued before the first arithmetic on one of them, in batches,
the largest first: 8x4 is four batches of eight. What was planned in the source is of no use where the compiler moved
loads behind the adds, so this is read, not believed. "warps" is how many warps a multiprocessor holds with CTAs of 128
threads and, where it is another number, of the kernel's most, of how many it can.

Held are, for every kernel: no stack, no local memory and no instruction that spills. On the vector path: every store to
global memory and every load in a row's loop is one of 128 bits, and all 8 rows of a whole batch are loaded before the
first is added, for each 16 bytes of a row that a thread holds (smaller batches end a number of routes that is no
multiple of 8). On the scalar path: no access is wider than an element. Kernels of clusters are empty before sm_90. The
library is smaller than 8 MB.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from benchmarks.cubins import Instruction, Kernel, read_kernels
from moetrt.console import Output
from moetrt.errors import MoetrtError
from moetrt.files import existing_file
from moetrt.library import find_plugin_library

LARGEST_LIBRARY = 8_000_000
"""Bytes."""

WIDE_BITS = 128
ROWS_IN_FLIGHT = 8
"""Rows that a vector kernel loads before it adds the first: kRowsInFlight of the source."""
OTHER_OPERANDS = 2
"""shared_output and residual, which may be loaded along with the rows."""

_SPILLS = ("LDL", "STL")
_ARITHMETIC = ("FFMA", "FADD", "FMUL")

# Per multiprocessor: warps, CTAs, bytes of shared memory. Registers are 65,536 everywhere.
_LIMITS = {
    80: (64, 32, 164 * 1024),
    86: (48, 16, 100 * 1024),
    89: (48, 24, 100 * 1024),
    90: (64, 32, 228 * 1024),
    100: (64, 32, 228 * 1024),
    120: (48, 24, 100 * 1024),
}
_REGISTERS = 65_536
_RESERVED_SHARED = 1024
# From here on the compiler counts what the system takes of a CTA's shared memory.
_RESERVED_IS_COUNTED = 90


def is_wide(kernel: Kernel) -> bool:
    """Whether it is an instantiation of the vector path, which its second template argument says."""
    return kernel.name.split(", ")[1].removesuffix(">") == "true"


def is_empty(kernel: Kernel) -> bool:
    """Whether it is a kernel of clusters on an architecture without them, where it is never launched."""
    return kernel.architecture < 90 and re.search(r", true, \d+, true>", kernel.name) is not None


def packs(kernel: Kernel) -> int:
    """How many times 16 bytes of a row a thread of the vector path holds, 1 where the name does not say."""
    said = re.search(r"<(\w+), true, (\d+)", kernel.name)
    return 1 if said is None else int(said[2]) * (4 if said[1] in ("float", "fp32") else 2) // 16


def load_batches(kernel: Kernel) -> list[tuple[int, int]]:
    """The 128-bit global loads before the first arithmetic on one of them, batch after batch.

    What a load brings is followed through conversions and moves, in the order of the code.

    Returns:
        For each batch how many loads it has, and the position in ``kernel.code`` of the arithmetic that ends it.
    """
    batches, loads, loaded = [], 0, set[int]()
    for position, item in enumerate(kernel.code):
        if isinstance(item, str):
            continue
        registers = [int(number) for number in re.findall(r"\bR(\d+)\b", item.operands)]
        writes = item.operands.startswith("R") and bool(registers)
        if item.name == "LDG" and item.bits >= WIDE_BITS:
            loads += 1
            loaded |= set(range(registers[0], registers[0] + item.bits // 32))
            continue
        sources = registers[1:] if writes else registers
        if item.name.endswith("2"):  # two numbers at once, from pairs of registers
            sources = sources + [number + 1 for number in sources]
        # The address of a load is no use of the number that it was computed from.
        reads = item.name not in ("LDG", "LDS") and any(number in loaded for number in sources)
        if reads and item.name.startswith(_ARITHMETIC):
            batches.append((loads, position))
            loads, loaded = 0, set()
        elif writes:
            (loaded.add if reads else loaded.discard)(registers[0])
    return batches


def innermost_loops(kernel: Kernel) -> list[range]:
    """The positions in ``kernel.code`` of every loop that has no loop within."""
    labels = {item: position for position, item in enumerate(kernel.code) if isinstance(item, str)}
    loops = []
    for position, item in enumerate(kernel.code):
        if isinstance(item, Instruction) and item.name == "BRA":
            target = re.search(r"\.L_\w+", item.operands)
            if target and labels.get(target[0], position) < position:
                loops.append(range(labels[target[0]], position + 1))
    return [loop for loop in loops if not any(_lies_within(other, loop) for other in loops)]


def _lies_within(inner: range, outer: range) -> bool:
    return inner != outer and outer.start <= inner.start and inner.stop <= outer.stop


def resident_warps(kernel: Kernel, threads: int) -> int:
    """How many warps a multiprocessor holds at once, in CTAs of that many threads."""
    most_warps, most_ctas, shared = _LIMITS[kernel.architecture]
    warps = -(-threads // 32)
    registers_of_warp = -(-kernel.registers * 32 // 256) * 256
    by_registers = _REGISTERS // registers_of_warp // 4 * 4 // warps
    taken = kernel.shared + (0 if kernel.architecture >= _RESERVED_IS_COUNTED else _RESERVED_SHARED)
    return warps * min(most_ctas, most_warps // warps, by_registers, shared // taken)


def faults(kernel: Kernel) -> list[str]:
    """Which of the rules do not hold for a kernel, one line each."""
    where = f"{kernel.name} sm_{kernel.architecture}"
    found = [f"{where}: {what}" for what in (*_memory_faults(kernel), *_access_faults(kernel))]
    if kernel.architecture not in _LIMITS:
        found.append(f"{where}: its multiprocessor's limits are not known")
    return found


def _memory_faults(kernel: Kernel) -> Iterator[str]:
    for what, size in (("stack", kernel.stack), ("local memory", kernel.local)):
        if size:
            yield f"{size} bytes of {what}"
    spills = sum(item.name in _SPILLS for item in kernel.instructions)
    if spills:
        yield f"{spills} spilling instructions"


def _access_faults(kernel: Kernel) -> Iterator[str]:
    if is_empty(kernel):
        return
    accesses = [item for item in kernel.instructions if item.name in ("LDG", "STG")]
    if not is_wide(kernel):
        element = max((item.bits for item in accesses), default=0)
        if element > 32:
            yield f"an access of {element} bits on the scalar path"
        return
    for item in accesses:
        if item.name == "STG" and item.bits < WIDE_BITS:
            yield f"{item.opcode} on the vector path"
    for loop in innermost_loops(kernel):
        loads = [item for item in map(kernel.code.__getitem__, loop) if isinstance(item, Instruction)]
        widths = {item.bits for item in loads if item.name == "LDG"}
        if max(widths, default=0) >= WIDE_BITS > min(widths):
            yield f"a load of {min(widths)} bits in a loop that loads rows"
    whole = [loads for loads, _ in load_batches(kernel) if ROWS_IN_FLIGHT <= loads <= ROWS_IN_FLIGHT + OTHER_OPERANDS]
    if len(whole) < packs(kernel):
        yield f"{len(whole)} of {packs(kernel)} batches load {ROWS_IN_FLIGHT} rows before the first is added"


def size_faults(library: Path) -> list[str]:
    """One line where the library is too large."""
    size = library.stat().st_size
    return [] if size < LARGEST_LIBRARY else [f"{library.name}: {size:,} bytes; less than {LARGEST_LIBRARY:,} is held"]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; exit code 1 where a rule does not hold, 2 where nothing could be read."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.budget", description="What every kernel takes.")
    parser.add_argument("library", nargs="?", help="the library to read; the installed one when left out")
    options = parser.parse_args(arguments)
    try:
        named = options.library
        library = find_plugin_library() if named is None else existing_file(named, "plugin library")
        kernels = read_kernels(library)
    except MoetrtError as error:
        print(f"moetrt: error: {error}", file=sys.stderr)
        return 2
    output = Output()
    output.line(f"{library.name}: {library.stat().st_size:,} bytes, {len(kernels)} kernels")
    for architecture, group in groupby(kernels, key=lambda kernel: kernel.architecture):
        output.line()
        output.heading(f"sm_{architecture}")
        columns = ["kernel", "regs", "shared", "local", "spills", "loads", "warps"]
        output.table(columns, [_row(kernel) for kernel in group])
    broken = size_faults(library) + [fault for kernel in kernels for fault in faults(kernel)]
    output.line()
    for fault in broken or ["every rule holds: see the head of benchmarks/budget.py"]:
        output.line(fault)
    return 1 if broken else 0


def _row(kernel: Kernel) -> list[object]:
    spills = sum(item.name in _SPILLS for item in kernel.instructions)
    batches = Counter(size for size, _ in load_batches(kernel))
    loads = " ".join(f"{size}x{count}" for size, count in sorted(batches.items(), reverse=True))
    held = dict.fromkeys(
        resident_warps(kernel, threads) for threads in (min(128, kernel.max_threads), kernel.max_threads)
    )
    warps = f"{', '.join(map(str, held))} of {_LIMITS[kernel.architecture][0]}"
    return [_title(kernel), kernel.registers, kernel.shared, kernel.local, spills, loads or "-", warps]


def _title(kernel: Kernel) -> str:
    parts = re.search(r"<(\w+), (true|false), (\d+), (true|false)>", kernel.name)
    if parts is None:
        return kernel.name
    path = "scalar" if parts[2] == "false" else "cluster" if parts[4] == "true" else "vector"
    return f"{parts[1]} {path} {parts[3]}"


if __name__ == "__main__":
    sys.exit(main())
