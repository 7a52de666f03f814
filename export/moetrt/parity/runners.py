"""Polygraphy runners: PyTorch, also in float64; ONNX Runtime with bfloat16; the kernel; TensorRT where a GPU is."""

import contextlib
import copy
import ctypes
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moetrt.backends import choose, gpus, resolve, switch_polygraphy
from moetrt.cuda_op import launch
from moetrt.errors import InputError, MoetrtError
from moetrt.files import existing_file
from moetrt.library import KernelLibrary
from moetrt.onnx_files import save_model
from moetrt.source import FlatModule
from moetrt.spec import OperatorSpec

# Polygraphy fixes which TensorRT it uses when it is imported. Parity on a CPU needs none at all: what is wrong with it,
# `moetrt.backends.choose` says to those who do.
with contextlib.suppress(InputError):
    switch_polygraphy(resolve())

from polygraphy.backend.base import BaseRunner
from polygraphy.backend.onnxrt import OnnxrtRunner
from polygraphy.common import TensorMetadata
from polygraphy.datatype import DataType

_ONNX_BFLOAT16 = 16


def _metadata(examples: Mapping[str, torch.Tensor]) -> TensorMetadata:
    metadata = TensorMetadata()
    for name, example in examples.items():
        dtype = DataType.from_dtype(example.dtype, "torch")
        metadata.add(name, dtype=dtype, shape=(None,) * example.dim())
    return metadata


class TorchRunner(BaseRunner):
    """Runs a PyTorch module whose inputs and outputs are named tensors."""

    def __init__(
        self,
        module: torch.nn.Module,
        example_inputs: Mapping[str, torch.Tensor],
        output_names: Sequence[str],
        *,
        float64: bool = False,
        experts_implementation: str | None = None,
        mode: TorchDispatchMode | None = None,
        name: str = "pytorch",
    ) -> None:
        """Makes a runner.

        Args:
            module: takes the tensors by position, in the order of ``example_inputs``; gives a tensor or several, in the
                order of ``output_names``.
            example_inputs: names, dtypes and ranks of the inputs; every dimension may have another size.
            output_names: one for each output.
            float64: run a copy of the module with all floating-point numbers in float64, those included that the module
                itself asks to be in float32. Inputs are taken in the dtypes of ``example_inputs``.
            experts_implementation: what the experts of Transformers models run while this runner is active, such as
                "eager" or "grouped_mm"; what they are set to where None.
            mode: is on while the module runs.
            name: the runner's name in Polygraphy's results.
        """
        super().__init__(name=name, prefix="pytorch")
        self._module = module
        self._examples = example_inputs
        self._output_names = output_names
        self._float64 = float64
        self._experts = experts_implementation
        self._mode = mode

    def activate_impl(self) -> None:
        """Makes the float64 copy where one is asked for, else sets the experts' implementation.

        Raises:
            InputError: the module has no Transformers model whose experts have implementations, or not this one.
        """
        self._active = float64_copy(self._module) if self._float64 else self._module
        self._until_deactivated = contextlib.ExitStack()
        if self._experts is not None and not self._float64:
            self._until_deactivated.enter_context(experts_set_to(self._module, self._experts))

    def get_input_metadata_impl(self) -> TensorMetadata:
        """Names, dtypes and ranks; every dimension is dynamic."""
        return _metadata(self._examples)

    def infer_impl(self, feed_dict: Mapping[str, Any]) -> "OrderedDict[str, torch.Tensor]":
        """Runs the module; gives tensors on the CPU.

        Raises:
            InputError: the module raised, or gives another number of outputs than there are names.
        """
        tensors = [torch.as_tensor(feed_dict[name]) for name in self._examples]
        module = self._active
        training = module.training
        started = time.perf_counter()
        try:
            module.eval()
            with torch.no_grad(), contextlib.ExitStack() as modes:
                if self._float64:
                    tensors = [t.double() if t.is_floating_point() else t for t in tensors]
                    modes.enter_context(Float64Mode())
                if self._mode is not None:
                    modes.enter_context(self._mode)
                outputs = module(*tensors)
        except MoetrtError:
            raise
        except (Exception, SystemExit) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InputError(f"{self.name} failed with {type(error).__name__}: {reason}") from error
        finally:
            module.train(training)
        self.inference_time = time.perf_counter() - started
        if isinstance(outputs, torch.Tensor):
            outputs = (outputs,)
        if len(outputs) != len(self._output_names):
            raise InputError(
                f"the module gave {len(outputs)} outputs; {len(self._output_names)} are named: "
                f"{', '.join(self._output_names)}"
            )
        return OrderedDict((name, t.detach().cpu()) for name, t in zip(self._output_names, outputs, strict=True))

    def deactivate_impl(self) -> None:
        """Lets go of the copy, and sets the experts back."""
        self._until_deactivated.close()
        del self._active


class Float64Mode(TorchDispatchMode):
    """While it is on, whoever asks for a floating-point dtype gets float64.

    ``module.double()`` alone is no float64 run: models cast to float32 inside their norms and routers.
    """

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs one operator with its ``dtype`` raised."""
        asked = dict(kwargs or {})
        dtype = asked.get("dtype")
        if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
            asked["dtype"] = torch.float64
        return func(*args, **asked)


EXPERTS_IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
"""Transformers' own; what it registers besides needs kernels of others."""


@contextlib.contextmanager
def experts_set_to(module: torch.nn.Module, implementation: str) -> Iterator[None]:
    """While the block runs, the experts of the Transformers models in ``module`` run ``implementation``.

    Raises:
        InputError: it is none of `EXPERTS_IMPLEMENTATIONS`, or the module has no experts to set.
    """
    if implementation not in EXPERTS_IMPLEMENTATIONS:
        taken = ", ".join(EXPERTS_IMPLEMENTATIONS)
        raise InputError(f"the experts implementation was '{implementation}'; {taken} are taken")
    switched = [part for part in module.modules() if callable(getattr(part, "set_experts_implementation", None))][:1]
    if not switched:
        # The user's own module, not the one that takes its tensors apart.
        own = module.module if isinstance(module, FlatModule) else module
        raise InputError(
            f"{type(own).__name__} is no Transformers model: it has no experts to run as '{implementation}'"
        )
    model: Any = switched[0]
    before = model.get_experts_implementation()
    try:
        model.set_experts_implementation(implementation)
        yield
    finally:
        model.set_experts_implementation(before)


def float64_copy(module: torch.nn.Module) -> torch.nn.Module:
    """A copy of ``module`` in float64, with the experts of Transformers models in their plain form."""
    double = copy.deepcopy(module).double()
    for part in double.modules():
        switch = getattr(part, "set_experts_implementation", None)
        if callable(switch):
            # Grouped GEMMs are not there in float64.
            switch("eager")
            break
    return double


class OrtRunner(OnnxrtRunner):
    """Polygraphy's ONNX Runtime runner, with tensors fed and read as OrtValues: numpy has no bfloat16."""

    def infer_impl(self, feed_dict: Mapping[str, Any]) -> "OrderedDict[str, torch.Tensor]":
        """Takes torch tensors or numpy arrays, gives torch tensors."""
        # The tensors back the OrtValues' memory until the run has ended.
        tensors = {name: torch.as_tensor(value).contiguous() for name, value in feed_dict.items()}
        values = {name: _to_ort(tensor) for name, tensor in tensors.items()}
        started = time.perf_counter()
        try:
            outputs = self.sess.run_with_ort_values(None, values)
        except Exception as error:  # its exceptions have no common base of their own
            raise InputError(f"ONNX Runtime failed: {' '.join(str(error).split())}") from error
        self.inference_time = time.perf_counter() - started
        names = [node.name for node in self.sess.get_outputs()]
        return OrderedDict((name, _from_ort(value)) for name, value in zip(names, outputs, strict=True))


def _to_ort(tensor: torch.Tensor) -> Any:
    if tensor.dtype == torch.bfloat16:
        bits = tensor.view(torch.int16).numpy().view(np.uint16)
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, _ONNX_BFLOAT16)
    return onnxruntime.OrtValue.ortvalue_from_numpy(tensor.numpy())


def _from_ort(value: Any) -> torch.Tensor:
    if value.element_type() != _ONNX_BFLOAT16:
        return torch.from_numpy(value.numpy())
    shape = tuple(value.shape())
    count = int(np.prod(shape))
    if count == 0:
        return torch.empty(shape, dtype=torch.bfloat16)
    memory = (ctypes.c_uint16 * count).from_address(value.data_ptr())
    return torch.frombuffer(memory, dtype=torch.bfloat16).reshape(shape).clone()


class KernelRunner(BaseRunner):
    """Runs one tail by the kernel's host build."""

    def __init__(
        self,
        library: KernelLibrary,
        spec: OperatorSpec,
        example_inputs: Mapping[str, torch.Tensor],
        attributes: Mapping[str, object],
        *,
        name: str = "kernel-host",
    ) -> None:
        """Makes a runner.

        Args:
            library: the host build.
            spec: the operator.
            example_inputs: names, dtypes and ranks of the inputs.
            attributes: the node's.
            name: the runner's name in Polygraphy's results.
        """
        super().__init__(name=name, prefix="kernel")
        self._library = library
        self._spec = spec
        self._examples = example_inputs
        self._attributes = attributes

    def get_input_metadata_impl(self) -> TensorMetadata:
        """Names, dtypes and ranks; every dimension is dynamic."""
        return _metadata(self._examples)

    def infer_impl(self, feed_dict: Mapping[str, Any]) -> "OrderedDict[str, torch.Tensor]":
        """Runs the kernel on CPU tensors.

        Raises:
            InputError: the kernel does not take them.
        """
        tensors = {name: torch.as_tensor(feed_dict[name]) for name in self._examples}
        started = time.perf_counter()
        outputs = launch(self._spec, tensors, self._attributes, self._library, 0)
        self.inference_time = time.perf_counter() - started
        return OrderedDict(zip(self._spec.outputs, outputs, strict=True))


Results = dict[str, dict[str, torch.Tensor]]
"""Runner's name -> its outputs by name."""


def at_each(
    runners: Sequence[BaseRunner], feeds: Sequence[Mapping[str, torch.Tensor]]
) -> list[tuple[Results, dict[str, InputError]]]:
    """Runs all on each of several inputs, and goes on where one does not take them.

    Returns:
        For each: the outputs, and by runner's name why there are none.
    """
    from polygraphy.exception import PolygraphyException
    from polygraphy.logger import G_LOGGER

    found: list[tuple[Results, dict[str, InputError]]] = [({}, {}) for _ in feeds]
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL + 1):
        for runner in runners:
            with runner:
                for feed, (results, failures) in zip(feeds, found, strict=True):
                    try:
                        outputs = runner.infer(dict(feed))
                    except InputError as error:
                        failures[runner.name] = error
                    except PolygraphyException as error:
                        failures[runner.name] = InputError(
                            f"{runner.name} could not be compared: {' '.join(str(error).split())}"
                        )
                    else:
                        results[runner.name] = {name: torch.as_tensor(value) for name, value in outputs.items()}
    return found


def side_by_side(runners: Sequence[BaseRunner], feed: Mapping[str, torch.Tensor]) -> Results:
    """Runs all on the same inputs, by Polygraphy's Comparator.

    Raises:
        InputError: a runner does not take what it was given; one line says which.
    """
    from polygraphy.comparator import Comparator
    from polygraphy.exception import PolygraphyException
    from polygraphy.logger import G_LOGGER

    with G_LOGGER.verbosity(G_LOGGER.CRITICAL + 1):
        try:
            results = Comparator.run(list(runners), data_loader=[dict(feed)])
        except PolygraphyException as error:
            names = ", ".join(runner.name for runner in runners)
            raise InputError(f"{names} could not be compared: {' '.join(str(error).split())}") from error
        return {
            name: {output: torch.as_tensor(value) for output, value in iterations[0].items()}
            for name, iterations in results
        }


def ort_session(path: str | os.PathLike[str], name: str | None = None) -> Callable[[], onnxruntime.InferenceSession]:
    """A loader of a CPU session for `OrtRunner`.

    Args:
        path: the ONNX file.
        name: what to call it in messages; the path by default.

    Raises:
        InputError: when it is called: ONNX Runtime does not take the file.
    """

    def load() -> onnxruntime.InferenceSession:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # the exception says the same, once
        try:
            return onnxruntime.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # its exceptions have no common base of their own
            # The file may be one of ours; the message names the user's.
            reason = " ".join(str(error).replace(f"Load model from {os.fspath(path)} failed:", "").split())
            raise InputError(f"ONNX Runtime does not take {name or repr(str(Path(path)))}: {reason}") from error

    return load


def session_of(model: ir.Model, path: Path, name: str) -> Callable[[], onnxruntime.InferenceSession]:
    """As `ort_session`, of a model that is made for the run alone.

    Args:
        model: the model.
        path: where its file goes for as long as it is run.
        name: what to call it in messages: the user knows nothing of ``path``.

    Raises:
        InputError: the model is not valid, or its file cannot be written.
    """
    try:
        return ort_session(save_model(model, path), name)
    except MoetrtError as error:
        place = f"'{path.parent}'"
        said = str(error).replace(f"'{path}'", name).replace(f"'{path}.data'", f"of {name}").replace(place, "for it")
        raise type(error)(said.replace(f"ONNX model {name}", name, 1)) from error


def tensorrt_runner(
    engine_path: str | os.PathLike[str],
    *,
    plugin_library: str | os.PathLike[str] | None,
    backend: str | None = None,
    name: str = "tensorrt",
) -> BaseRunner:
    """A runner of an engine on this machine's GPU.

    Args:
        engine_path: built for this GPU by this backend.
        plugin_library: the library that the engine was built with; None where it was built without.
        backend: as for `moetrt.backends.choose`.
        name: the runner's name in Polygraphy's results.

    Raises:
        InputError: a file is missing, there is no GPU, or the backend is not to be had.
    """
    engine = existing_file(engine_path, "engine")
    library = None if plugin_library is None else existing_file(plugin_library, "plugin library")
    if not gpus():
        raise InputError(f"engine '{engine}' runs on a GPU and none is to be seen")
    trt = choose(backend).module
    from polygraphy.backend.common import BytesFromPath
    from polygraphy.backend.trt import EngineFromBytes, TrtRunner

    if library is not None:
        registry = trt.get_plugin_registry()
        known = {creator.plugin_namespace for creator in registry.all_creators}
        from moetrt.spec import PLUGIN_NAMESPACE

        if PLUGIN_NAMESPACE not in known and registry.load_library(str(library)) is None:
            raise InputError(f"plugin library '{library}' cannot be loaded into {trt.__name__}")
    return TrtRunner(EngineFromBytes(BytesFromPath(str(engine))), name=name)
