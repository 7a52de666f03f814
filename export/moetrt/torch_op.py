"""The operators as torch.library ops, made from the table.

``torch.ops.moetrt.moe_finalize_add_rms_norm`` and ``torch.ops.moetrt.moe_finalize_add`` exist so that torch.export
keeps a tail as one node. On CUDA tensors they run the plugin library's kernel, elsewhere the reference; they are for
inference and carry no gradient.
"""

from collections.abc import Callable

import torch

from moetrt.cuda_op import run_on_cuda
from moetrt.reference import check_tensors, reference
from moetrt.spec import DOMAIN, OPERATORS, AttributeSpec, OperatorSpec


def schema(spec: OperatorSpec) -> str:
    """The op's torch schema without its name.

    Inputs come in the table's order, an absent one is None; attributes are keyword-only, flags are bools.
    """
    inputs = [f"Tensor{'?' if entry.optional else ''} {entry.name}" for entry in spec.inputs]
    attributes = [_argument(entry) for entry in spec.attributes]
    returns = ", ".join("Tensor" for _ in spec.outputs)
    return f"({', '.join([*inputs, '*', *attributes])}) -> ({returns})"


def _argument(entry: AttributeSpec) -> str:
    if entry.kind == "FLAG":
        return f"bool {entry.name}={bool(entry.default)}"
    return f"float {entry.name}={entry.default}"


def _implementation(spec: OperatorSpec, compute: Callable[..., tuple[torch.Tensor, ...]]) -> Callable[..., object]:
    def run(*inputs: torch.Tensor | None, **attributes: object) -> object:
        outputs = compute(spec, _by_name(spec, inputs), attributes)
        return outputs if len(outputs) > 1 else outputs[0]

    return run


def _fake(spec: OperatorSpec) -> Callable[..., object]:
    def run(*inputs: torch.Tensor | None, **attributes: object) -> object:
        # A scalar that torch.compile keeps open has no value yet; the implementation checks it.
        spec.complete({name: value for name, value in attributes.items() if isinstance(value, int | float)})
        given = {name: tensor for name, tensor in _by_name(spec, inputs).items() if tensor is not None}
        check_tensors(spec, given)
        rows, weights = given["gemm2_permuted"], given["expert_weights"]
        like = given.get("residual", given.get("shared_output"))
        shape = like.shape if like is not None else (weights.shape[0], given.get("gamma", rows).shape[-1])
        outputs = tuple(rows.new_empty(shape) for _ in spec.outputs)
        return outputs if len(outputs) > 1 else outputs[0]

    return run


def _by_name(spec: OperatorSpec, inputs: tuple[torch.Tensor | None, ...]) -> dict[str, torch.Tensor | None]:
    return {entry.name: tensor for entry, tensor in zip(spec.inputs, inputs, strict=False)}


for _spec in OPERATORS.values():
    _name = f"{DOMAIN}::{_spec.torch_name}"
    torch.library.define(_name, schema(_spec))
    torch.library.impl(_name, "CompositeExplicitAutograd")(_implementation(_spec, reference))
    torch.library.impl(_name, "CUDA")(_implementation(_spec, run_on_cuda))
    torch.library.register_fake(_name)(_fake(_spec))
