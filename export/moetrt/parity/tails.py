"""The tails of a mapped file, each run by itself: by the file's own function, by the kernel, and by the definition."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from moetrt.errors import InputError
from moetrt.library import KernelLibrary
from moetrt.onnx_op import make_model, named_inputs, operator_of, read_attributes
from moetrt.parity.runners import KernelRunner, OrtRunner, Results, TorchRunner, session_of, side_by_side
from moetrt.parity.twins import TORCH_DTYPES, to_torch
from moetrt.parity.verdict import GOLD, KERNEL, ORT, PYTORCH
from moetrt.reference import reference
from moetrt.spec import Operand, OperatorSpec


@dataclass(frozen=True, eq=False)
class Tail:
    """One operator node of a file.

    Attributes:
        index: its place among the file's tails, from 0.
        node: the node.
        spec: which operator it is.
        functions: the file's own body of it first, then what that calls; empty where the file has none.
        inputs: the values that it reads, by the operator's names.
        opset: of the file.
    """

    index: int
    node: ir.Node
    spec: OperatorSpec
    functions: tuple[ir.Function, ...]
    inputs: Mapping[str, ir.Value]
    opset: int

    @property
    def name(self) -> str:
        """The node's name."""
        return self.node.name or str(self.node.outputs[0].name)

    @cached_property
    def attributes(self) -> dict[str, float | int]:
        """The node's attributes, defaults filled in."""
        return read_attributes(self.node)

    def input_names(self) -> dict[str, str]:
        """The names of the values that it reads, by the operator's names."""
        return {name: value.name or "" for name, value in self.inputs.items()}


def tails_of(model: ir.Model) -> list[Tail]:
    """The tails of a model in the order of its graph."""
    nodes = [node for node in model.graph if operator_of(node) is not None]
    opset = model.graph.opset_imports[""]
    return [
        Tail(index, node, spec, tuple(_called(node, model.functions)), named_inputs(node), opset)
        for index, node in enumerate(nodes)
        if (spec := operator_of(node)) is not None
    ]


def _called(node: ir.Node, functions: Mapping[ir.OperatorIdentifier, ir.Function]) -> Iterator[ir.Function]:
    """The function that a node calls, then those that it calls itself."""
    seen = set()
    pending = [node]
    while pending:
        identifier = pending.pop().op_identifier()
        if identifier in functions and identifier not in seen:
            seen.add(identifier)
            yield functions[identifier]
            pending += functions[identifier].all_nodes()


def operands_from(tail: Tail, values: Mapping[str, torch.Tensor], data: ir.DataType) -> dict[str, torch.Tensor]:
    """A tail's inputs in their own dtypes, from the values of a run that may have been in wider ones.

    Args:
        tail: the tail.
        values: values of the graph by name; weights are the file's own.
        data: the dtype of an input whose dtype the file does not say.

    Raises:
        InputError: an input is neither among the values nor a weight.
    """
    operands = {}
    for name, value in tail.inputs.items():
        found = values.get(value.name or "")
        if found is None and value.const_value is None:
            raise InputError(f"'{value.name}', {name} of {tail.name}, was not computed; the tail is not compared")
        tensor = found if found is not None else to_torch(value.const_value.numpy())  # type: ignore[union-attr]
        operands[name] = tensor.to(TORCH_DTYPES[value.dtype or data])
    return operands


class _Definition(torch.nn.Module):
    """The operator's definition as a module of plain tensors."""

    def __init__(self, tail: Tail) -> None:
        super().__init__()
        self._spec, self._names, self._attributes = tail.spec, list(tail.inputs), tail.attributes

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return reference(self._spec, dict(zip(self._names, tensors, strict=True)), self._attributes)


def run_tail(tail: Tail, operands: Mapping[str, torch.Tensor], folder: Path, kernel: KernelLibrary | None) -> Results:
    """Runs one tail by itself.

    Args:
        tail: the tail.
        operands: its inputs by the operator's names.
        folder: where a file of it may be written.
        kernel: what runs the kernel's host build; None leaves it out.

    Returns:
        Of the definition in PyTorch, as it is and in float64, of ONNX Runtime and of the kernel: the outputs by name.
    """
    known = {
        name: Operand(str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in operands.items()
    }
    model = make_model(tail.spec, known, tail.attributes, opset=tail.opset)
    if tail.functions:
        # The file's own function is what is on trial.
        model.functions.clear()
        for function in tail.functions:
            model.functions[function.identifier()] = function
            model.opset_imports.update({**function.opset_imports, **model.opset_imports})
        next(iter(model.graph)).overload = tail.functions[0].overload
    for output in model.graph.outputs:
        if output.shape is None:
            output.shape = ir.Shape([operands["expert_weights"].shape[0], None])
    session = session_of(model, folder / "tail.onnx", f"the function of {tail.name}")
    definition = _Definition(tail)
    runners: list[Any] = [
        TorchRunner(definition, operands, tail.spec.outputs, name=PYTORCH),
        TorchRunner(definition, operands, tail.spec.outputs, float64=True, name=GOLD),
        OrtRunner(session, name=ORT),
    ]
    if kernel is not None:
        runners.append(KernelRunner(kernel, tail.spec, operands, tail.attributes, name=KERNEL))
    return side_by_side(runners, operands)


def outputs_of(tail: Tail, known: Mapping[str, ir.Value]) -> dict[str, str]:
    """The names under which ``known``, the values of the graph before mapping, has the outputs of a tail.

    A mapped tail's outputs keep the names of what they replace; where the graph reshapes a sum after its last addition,
    the mapper does so behind the node, and the name is of the reshaped value.
    """
    found = {}
    for output, name in zip(tail.node.outputs, tail.spec.outputs, strict=True):
        value = next((v for v in through_reshapes(output) if v.name in known), None)
        if value is not None:
            found[name] = value.name or ""
    return found


def through_reshapes(value: ir.Value) -> Iterator[ir.Value]:
    """``value``, then what mere changes of its shape make of it."""
    pending = [value]
    while pending:
        current = pending.pop(0)
        yield current
        pending += [
            use.node.outputs[0]
            for use in current.uses()
            if use.node.op_type in ("Reshape", "Squeeze", "Unsqueeze", "Flatten") and use.idx == 0
        ]
