"""The test driver from Python: a plugin object with every method of IPluginV3 that TensorRT would call."""

import ctypes
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

DTYPES = {"float32": 0, "float16": 1, "int8": 2, "int32": 3, "bool": 4, "uint8": 5, "bfloat16": 7, "int64": 8}
"""nvinfer1::DataType."""

FIELD_TYPES = {"float16": 0, "float32": 1, "float64": 2, "int8": 3, "int16": 4, "int32": 5, "char": 6, "int64": 10}
"""nvinfer1::PluginFieldType."""

_PACKING = {"float32": "f", "float64": "d", "int8": "b", "int16": "h", "int32": "i", "int64": "q", "float16": "e"}
_MAX_DIMS = 8

Shape = Sequence[int]


class Field(ctypes.Structure):
    """driver_field."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("type", ctypes.c_int32),
        ("length", ctypes.c_int32),
    )


class FieldValue:
    """An attribute with the type that it is given as; a plain int or float stands for int32 and float32."""

    def __init__(self, kind: str, *values: float) -> None:
        self.kind = kind
        self.count = len(values)
        self.bytes = struct.pack(f"={len(values)}{_PACKING[kind]}", *values)


def field_value(value: "FieldValue | int | float") -> FieldValue:
    if isinstance(value, FieldValue):
        return value
    return FieldValue("int32" if isinstance(value, int) else "float32", value)


class Driver:
    """libmoetrt_driver.so with one plugin library open in it."""

    def __init__(self, driver: Path, library: Path) -> None:
        self.functions = ctypes.CDLL(str(driver))
        for name in ("driver_open", "driver_create", "driver_clone", "driver_attach"):
            getattr(self.functions, name).restype = ctypes.c_void_p
        for name in ("driver_log", "driver_identity", "driver_timing_cache_id"):
            getattr(self.functions, name).restype = ctypes.c_char_p
        self.library = ctypes.c_void_p(self.functions.driver_open(str(library).encode()))
        assert self.library.value is not None

    @property
    def headers_major(self) -> int:
        return int(self.functions.driver_headers_major())

    def set_logger(self, major: int) -> None:
        """Plays a TensorRT of that major version that hands out a logger; 0 takes it away."""
        self.functions.driver_set_logger(self.library, major)

    def log(self) -> str:
        return str(self.functions.driver_log().decode())

    def create(
        self,
        operator: str,
        attributes: Mapping[str, FieldValue | int | float] | Sequence[tuple[str, FieldValue | int | float]] = (),
        *,
        node: str = "node",
        runtime: bool = False,
    ) -> "Plugin | None":
        """The plugin, None where the creator refuses."""
        pairs = list(attributes.items()) if isinstance(attributes, Mapping) else list(attributes)
        values = [(name, field_value(value)) for name, value in pairs]
        buffers = [ctypes.create_string_buffer(value.bytes, max(len(value.bytes), 1)) for _, value in values]
        fields = (Field * max(len(values), 1))(
            *(
                Field(name.encode(), ctypes.addressof(buffer), FIELD_TYPES[value.kind], value.count)
                for (name, value), buffer in zip(values, buffers, strict=True)
            )
        )
        return self._plugin(
            self.functions.driver_create(
                self.library, operator.encode(), node.encode(), fields, len(values), int(runtime)
            )
        )

    def _plugin(self, handle: int | None) -> "Plugin | None":
        return None if handle is None else Plugin(self, handle)


class Plugin:
    """One IPluginV3. Shapes are sequences of sizes; a negative size is a symbol."""

    def __init__(self, driver: Driver, handle: int) -> None:
        self.driver = driver
        self.handle = ctypes.c_void_p(handle)

    def __del__(self) -> None:
        self.driver.functions.driver_destroy(self.handle)

    def clone(self) -> "Plugin":
        return Plugin(self.driver, self.driver.functions.driver_clone(self.handle))

    def attach(self) -> "Plugin":
        return Plugin(self.driver, self.driver.functions.driver_attach(self.handle))

    @property
    def identity(self) -> str:
        return str(self.driver.functions.driver_identity(self.handle).decode())

    @property
    def outputs(self) -> int:
        return int(self.driver.functions.driver_outputs(self.handle))

    def serialize(self) -> dict[str, int | float]:
        fields = (Field * 64)()
        count = self.driver.functions.driver_serialize(self.handle, fields, 64)
        values: dict[str, int | float] = {}
        for field in fields[:count]:
            kind = next(kind for kind, number in FIELD_TYPES.items() if number == field.type)
            assert field.length == 1
            code = _PACKING[kind]
            values[field.name.decode()] = struct.unpack(
                f"={code}", ctypes.string_at(field.data, struct.calcsize(f"={code}"))
            )[0]
        return values

    def output_types(self, types: Sequence[str]) -> list[str] | None:
        """The outputs' dtypes, None where the plugin refuses."""
        outputs = (ctypes.c_int32 * 8)()
        if self.driver.functions.driver_output_types(self.handle, _types(types), len(types), outputs) != 0:
            return None
        names = {number: name for name, number in DTYPES.items()}
        return [names[number] for number in outputs[: self.outputs]]

    def output_shapes(self, shapes: Sequence[Shape]) -> list[tuple[int, ...]] | None:
        """The outputs' shapes, None where the plugin refuses."""
        ranks, rows = (ctypes.c_int32 * 8)(), (ctypes.c_int64 * 64)()
        if self.driver.functions.driver_output_shapes(self.handle, *_rows(shapes), len(shapes), ranks, rows) != 0:
            return None
        return [tuple(rows[i * _MAX_DIMS : i * _MAX_DIMS + ranks[i]]) for i in range(self.outputs)]

    def supports(self, position: int, types: Sequence[str], formats: Sequence[int], inputs: int) -> bool:
        return bool(
            self.driver.functions.driver_supports(
                self.handle, position, _types(types), (ctypes.c_int32 * len(formats))(*formats), inputs, self.outputs
            )
        )

    def configure(self, low: Sequence[Shape], high: Sequence[Shape], types: Sequence[str]) -> bool:
        ranks, rows = _rows(low)
        return bool(
            self.driver.functions.driver_configure(self.handle, ranks, rows, _rows(high)[1], _types(types), len(types))
            == 0
        )

    def tactics(self) -> list[int]:
        """The custom tactics for the shapes it was configured with last."""
        tactics = (ctypes.c_int32 * 16)()
        count = self.driver.functions.driver_tactics(self.handle, tactics, 16)
        assert 0 <= count <= 16
        return list(tactics[:count])

    def set_tactic(self, tactic: int) -> None:
        assert self.driver.functions.driver_set_tactic(self.handle, tactic) == 0

    @property
    def timing_cache_id(self) -> str:
        return str(self.driver.functions.driver_timing_cache_id(self.handle).decode())

    def on_shape_change(self, shapes: Sequence[Shape], types: Sequence[str]) -> bool:
        return bool(
            self.driver.functions.driver_on_shape_change(self.handle, *_rows(shapes), _types(types), len(types)) == 0
        )

    def enqueue(
        self,
        shapes: Sequence[Shape],
        types: Sequence[str],
        inputs: Sequence[int],
        outputs: Sequence[int],
        stream: int | None = None,
    ) -> bool:
        """``inputs`` and ``outputs`` are addresses on the GPU, ``stream`` a CUDA stream's handle."""
        return bool(
            self.driver.functions.driver_enqueue(
                self.handle,
                *_rows(shapes),
                _types(types),
                len(types),
                (ctypes.c_void_p * len(inputs))(*inputs),
                (ctypes.c_void_p * len(outputs))(*outputs),
                ctypes.c_void_p(stream),
            )
            == 0
        )


def _types(types: Sequence[str]) -> "ctypes.Array[ctypes.c_int32]":
    return (ctypes.c_int32 * max(len(types), 1))(*(DTYPES[name] for name in types))


def _rows(shapes: Sequence[Shape]) -> "tuple[ctypes.Array[ctypes.c_int32], ctypes.Array[ctypes.c_int64]]":
    ranks = (ctypes.c_int32 * max(len(shapes), 1))(*(len(shape) for shape in shapes))
    rows = (ctypes.c_int64 * (max(len(shapes), 1) * _MAX_DIMS))()
    for i, shape in enumerate(shapes):
        for d, size in enumerate(shape):
            rows[i * _MAX_DIMS + d] = size
    return ranks, rows
