"""The operators on CUDA tensors: the plugin library's kernel, the very one that an engine runs.

Where the library is missing the reference computes the same, slower, and one warning says so.
"""

import warnings
from collections.abc import Mapping
from functools import cache

import torch

from moetrt.errors import InputError
from moetrt.library import KernelLibrary, MoEFinalizeParams, PluginLibrary, load_plugin_library
from moetrt.reference import check_tensors, reference
from moetrt.spec import DATA_DTYPES, OperatorSpec

KERNEL_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""``moetrt_dtype`` of plugins/include/moetrt/moe_finalize.h."""


def run_on_cuda(
    spec: OperatorSpec, tensors: Mapping[str, torch.Tensor | None], attributes: Mapping[str, object]
) -> tuple[torch.Tensor, ...]:
    """Computes an operator on the current CUDA stream of the rows' device, without waiting for it.

    Args, returns, errors: as of `moetrt.reference.reference`. float64 rows are computed by the reference.

    Raises:
        InputError: CUDA could not start the kernel.
    """
    rows = tensors["gemm2_permuted"]
    assert rows is not None
    library = None if rows.dtype == torch.float64 else _library()
    if library is None:
        return reference(spec, tensors, attributes)
    with torch.cuda.device(rows.device):
        return launch(spec, tensors, attributes, library, torch.cuda.current_stream().cuda_stream)


def launch(
    spec: OperatorSpec,
    tensors: Mapping[str, torch.Tensor | None],
    attributes: Mapping[str, object],
    library: KernelLibrary,
    stream: int,
) -> tuple[torch.Tensor, ...]:
    """Checks the operands, allocates the outputs and starts the library's kernel on a stream.

    Args:
        spec, tensors, attributes: as of `moetrt.reference.reference`, on the device that the library computes on.
        library: what runs it.
        stream: a CUDA stream's handle, 0 for the default stream.

    Returns:
        As of `moetrt.reference.reference`.

    Raises:
        InputTypeError, InputError: an operand or attribute is not taken, or the kernel could not be started.
    """
    complete = spec.complete(attributes)
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    check_tensors(spec, given, data_dtypes=DATA_DTYPES)
    # Kept by name until the launch: a copy must outlive the call that reads it.
    dense = {name: tensor.contiguous() for name, tensor in given.items() if name != "gemm2_permuted"}
    rows = dense["gemm2_permuted"] = _with_dense_rows(given["gemm2_permuted"])
    like = next((dense[name] for name in ("residual", "shared_output") if name in dense), None)
    shape = (len(dense["expert_weights"]), _hidden_size(dense)) if like is None else like.shape
    outputs = {name: rows.new_empty(shape) for name in spec.outputs}
    with library.errors_kept():
        library.moe_finalize(kernel_params(spec, dense, complete, outputs), stream)
    return tuple(outputs.values())


def kernel_params(
    spec: OperatorSpec,
    tensors: Mapping[str, torch.Tensor],
    attributes: Mapping[str, float | int],
    outputs: Mapping[str, torch.Tensor],
) -> MoEFinalizeParams:
    """What the library's C interface is given; it points into the tensors and keeps none of them alive.

    Args:
        spec: the operator.
        tensors: its inputs by name, absent ones left out, checked; dense, but for the stride of ``gemm2_permuted``.
        attributes: all of them, as `OperatorSpec.complete` returns them.
        outputs: its outputs by name, dense.
    """
    rows, weights = tensors["gemm2_permuted"], tensors["expert_weights"]
    params = MoEFinalizeParams(
        num_tokens=weights.shape[0],
        top_k=weights.shape[1],
        num_rows=rows.shape[0],
        # Nobody asks where the next row begins when there is only one.
        row_stride=max(rows.stride(0), rows.shape[1]),
        hidden_size=_hidden_size(tensors),
        dtype=KERNEL_DTYPES[rows.dtype],
        weights_dtype=KERNEL_DTYPES[weights.dtype],
        gate_dtype=KERNEL_DTYPES[tensors.get("shared_gate", rows).dtype],
        gamma_dtype=KERNEL_DTYPES[tensors.get("gamma", rows).dtype],
        **{"residual_scale": 1.0, "weight_before_cast": 1, **attributes},
    )
    for name, tensor in tensors.items():
        setattr(params, name, tensor.data_ptr())
    params.norm_out = outputs["norm_out"].data_ptr() if "norm_out" in outputs else None
    params.residual_out = outputs[spec.outputs[-1]].data_ptr()
    return params


def _hidden_size(tensors: Mapping[str, torch.Tensor]) -> int:
    names = ("gamma", "residual", "shared_output", "gemm2_permuted")
    return next(tensors[name].shape[-1] for name in names if name in tensors)


def _with_dense_rows(rows: torch.Tensor) -> torch.Tensor:
    """Rows may lie apart, as the kernel takes a stride from one to the next; a row's elements lie side by side."""
    apart = rows.stride(1) == 1 and rows.stride(0) >= rows.shape[1]
    return rows if apart else rows.contiguous()


@cache
def _library() -> PluginLibrary | None:
    try:
        return load_plugin_library()
    except InputError as error:
        warnings.warn(f"moetrt: the operators run as PyTorch code, not as one kernel: {error}", stacklevel=2)
        return None
