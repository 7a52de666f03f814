"""Reads the machine code in the built library: resources and instructions of every kernel for every architecture.

It takes NVIDIA's cuobjdump and nvdisasm, from the packages nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm or from a
toolkit on PATH, and c++filt of binutils. No GPU and no driver.
"""

import re
import shutil
import subprocess
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from moetrt.errors import MoetrtError

_FUNCTION = re.compile(r"^\s*Function (\S+):$")
_ARCHITECTURE = re.compile(r"^arch = sm_(\d+)", re.MULTILINE)
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_TEXT_SECTION = re.compile(r"^\.text\.(\S+):$")
_LABEL = re.compile(r"^(\.L_\S+):$")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?(?:U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_MAX_THREADS = re.compile(r"^\.nv\.info\.(\S+)$|EIATTR_MAX_THREADS\n.*\n\s*Value:\s*(0x[0-9a-f]+)", re.MULTILINE)


@dataclass(frozen=True)
class Instruction:
    """One instruction: its opcode with suffixes, such as LDG.E.128, and its operands as they are printed."""

    opcode: str
    operands: str

    @property
    def name(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def bits(self) -> int:
        """How wide a load or store is."""
        parts = self.opcode.split(".")[1:]
        for width in ("256", "128", "64"):
            if width in parts:
                return int(width)
        return 16 if {"U16", "S16"} & set(parts) else 8 if {"U8", "S8"} & set(parts) else 32


@dataclass(frozen=True)
class Kernel:
    """One kernel as it was compiled for one architecture.

    Attributes:
        name: its C++ name with template arguments, without namespace and parameters; types as bf16, fp16 and fp32.
        architecture: 90 for sm_90.
        registers: of a thread.
        stack, local, shared: bytes; the stack and local memory of a thread, static shared memory of a CTA.
        max_threads: of a CTA, by its launch bounds.
        code: instructions in the order of their addresses; a str is a label.
    """

    name: str
    architecture: int
    registers: int
    stack: int
    local: int
    shared: int
    max_threads: int
    code: tuple[Instruction | str, ...]

    @property
    def instructions(self) -> list[Instruction]:
        return [item for item in self.code if isinstance(item, Instruction)]


def read_kernels(library: Path) -> list[Kernel]:
    """Every kernel in a library or object file, by architecture and name.

    Raises:
        MoetrtError: a program is missing or fails, or there is no machine code in the file.
    """
    cuobjdump, nvdisasm = _program("cuobjdump"), _program("nvdisasm")
    kernels = []
    with tempfile.TemporaryDirectory() as folder:
        _run([cuobjdump, "-xelf", "all", str(library.absolute())], cwd=folder)
        for cubin in sorted(Path(folder).glob("*.cubin")):
            usage = _run([cuobjdump, "-res-usage", str(cubin)])
            threads = _max_threads(_run([cuobjdump, "-elf", str(cubin)]))
            code = _functions(_run([nvdisasm, "-c", str(cubin)]))
            found = re.search(r"\.sm_(\d+)", cubin.name) or _ARCHITECTURE.search(usage)
            if found is None:
                raise MoetrtError(f"'{library}': the architecture of {cubin.name} cannot be read")
            for mangled, numbers in _resources(usage).items():
                registers, stack, shared, local = numbers
                kernels.append(
                    Kernel(
                        _plain_name(mangled),
                        int(found[1]),
                        registers,
                        stack,
                        local,
                        shared,
                        threads[mangled],
                        code[mangled],
                    )
                )
    if not kernels:
        raise MoetrtError(f"'{library}' holds no machine code for a GPU")
    return sorted(kernels, key=lambda kernel: (kernel.architecture, kernel.name))


def _resources(usage: str) -> dict[str, tuple[int, int, int, int]]:
    found, function = {}, ""
    for line in usage.splitlines():
        if header := _FUNCTION.match(line):
            function = header[1]
        elif function and (numbers := _USAGE.search(line)):
            found[function] = (int(numbers[1]), int(numbers[2]), int(numbers[3]), int(numbers[4]))
            function = ""
    return found


def _max_threads(elf: str) -> dict[str, int]:
    found, function = {}, ""
    for match in _MAX_THREADS.finditer(elf):
        if match[1]:
            function = match[1]
        else:
            found[function] = int(match[2], 16)
    return found


def _functions(listing: str) -> dict[str, tuple[Instruction | str, ...]]:
    found: dict[str, list[Instruction | str]] = {}
    code: list[Instruction | str] = []
    for line in listing.splitlines():
        if section := _TEXT_SECTION.match(line):
            code = found.setdefault(section[1], [])
        elif label := _LABEL.match(line):
            code.append(label[1])
        elif instruction := _INSTRUCTION.search(line):
            code.append(Instruction(instruction[1], instruction[2]))
    return {name: tuple(code) for name, code in found.items()}


def _plain_name(mangled: str) -> str:
    name = _run(["c++filt", mangled]).strip()
    # A template's name begins with its return type; the parameters are those of every kernel here.
    name = re.sub(r"\([^()]*\)$", "", name.removeprefix("void ")).replace("moetrt::", "")
    for long, short in (("__nv_bfloat16", "bf16"), ("__half", "fp16"), ("float", "fp32")):
        name = re.sub(rf"\b{long}\b", short, name)
    return name


def _program(name: str) -> str:
    packages = Path(sysconfig.get_paths()["purelib"], "nvidia")
    for candidate in sorted(packages.glob(f"*/bin/{name}")):
        return str(candidate)
    found = shutil.which(name)
    if found is None:
        raise MoetrtError(f"{name} is not on PATH and no package has it: pip install nvidia-cuda-{name}")
    return found


def _run(command: list[str], cwd: str | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
    if done.returncode != 0:
        reason = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
        raise MoetrtError(f"{Path(command[0]).name} failed: {reason[-1]}")
    return done.stdout
