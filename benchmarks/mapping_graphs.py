"""ONNX files as deep as the real models, for the mapping benchmark: few layers are exported, the last is repeated.

An export takes seconds a layer; repeating nodes takes none. A repeated layer is node for node what the exporter wrote
for the last one, which must be what it wrote for the one before.
"""

import io
import re
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path

import onnx
import onnx_ir as ir
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.initialization import no_init_weights

from moetrt.capture import DEFAULT_OPSET, capture
from moetrt.errors import InputError
from moetrt.mapping import TAILS_EXPECTED
from moetrt.onnx_files import SMALL_TENSOR_BYTES
from moetrt.quiet import quiet
from moetrt.source import as_source

CAPTURED = "moetrt"
"""`moetrt export`."""
FOREIGN = "torch"
"""torch.onnx alone, experts written by Transformers' "batched_mm": no operator of ours in the file."""

_LAYER = re.compile(r"\blayers\.(\d+)\b")
_SCOPES = ("module", "pkg.torch.onnx.name_scopes")
_ALIGNMENT = 4096


@dataclass(frozen=True)
class Widths:
    """The sizes that the number of nodes does not depend on: hidden size, an expert's, and the number of experts."""

    hidden: int = 64
    expert: int = 32
    experts: int = 128

    @property
    def layer_bytes(self) -> int:
        """The bytes of one layer's routed experts: gate, up and down projection in bf16."""
        return 3 * self.hidden * self.expert * self.experts * 2


@dataclass(frozen=True)
class DeepModel:
    """A model that the benchmark maps.

    Attributes:
        name: what the table calls it.
        tails: how many MoE layers it has.
        dense: how many layers come before them.
        experts: how many routed experts a layer has; 8 are chosen.
        config: the Transformers config with so many MoE layers.
        model_class: its class.
    """

    name: str
    tails: int
    dense: int
    experts: int
    config: Callable[[int, Widths], PreTrainedConfig]
    model_class: type[PreTrainedModel]

    @property
    def layers(self) -> int:
        """How many there are, dense ones too."""
        return self.dense + self.tails


def _qwen3(moe_layers: int, widths: Widths) -> PreTrainedConfig:
    return Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=widths.hidden,
        intermediate_size=64,
        moe_intermediate_size=widths.expert,
        num_hidden_layers=moe_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=widths.experts,
        num_experts_per_tok=8,
        norm_topk_prob=True,
    )


_DENSE = 3


def _deepseek_v3(moe_layers: int, widths: Widths) -> PreTrainedConfig:
    return DeepseekV3Config(
        vocab_size=256,
        hidden_size=widths.hidden,
        intermediate_size=64,
        moe_intermediate_size=widths.expert,
        num_hidden_layers=_DENSE + moe_layers,
        first_k_dense_replace=_DENSE,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=widths.experts,
        num_experts_per_tok=8,
        n_group=8,
        topk_group=4,
        n_shared_experts=1,
        routed_scaling_factor=2.5,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
    )


MODELS = (
    DeepModel("Qwen3-235B", 94, 0, 128, _qwen3, Qwen3MoeForCausalLM),
    DeepModel("DeepSeek-V3", 58, _DENSE, 256, _deepseek_v3, DeepseekV3ForCausalLM),
)

_EXPORTED_MOE_LAYERS = 3
"""The first holds what the exporter shares among all; the other two show what differs from layer to layer."""


def exported(model: DeepModel, exporter: str, widths: Widths) -> onnx.ModelProto:
    """The graph of ``model`` with `_EXPORTED_MOE_LAYERS` MoE layers, its weights named in a data file but not written.

    Args:
        model: the model, in bf16.
        exporter: ``CAPTURED`` or ``FOREIGN``.
        widths: its sizes. The weights are memory that is never written to, so large ones cost nothing.
    """
    with no_init_weights(), quiet():
        config = model.config(_EXPORTED_MOE_LAYERS, widths)
        module = model.model_class._from_config(config, dtype=torch.bfloat16).eval()
    graph = capture(as_source(module)) if exporter == CAPTURED else _torch_export(module)
    for value in graph.graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and tensor.nbytes > SMALL_TENSOR_BYTES:
            value.const_value = ir.ExternalTensor(
                "weights.bin", 0, tensor.nbytes, tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), name=value.name
            )
    return ir.to_proto(graph)


def _torch_export(module: PreTrainedModel) -> ir.Model:
    module.set_experts_implementation("batched_mm")
    source = as_source(module)
    shapes = tuple(dict(source.dynamic_shapes[name]) for name in source.input_names)
    with torch.no_grad(), quiet(), redirect_stderr(io.StringIO()):
        program = torch.onnx.export(
            source.module,
            tuple(source.example_inputs.values()),
            input_names=list(source.input_names),
            output_names=list(source.output_names),
            opset_version=DEFAULT_OPSET,
            dynamic_shapes=shapes,
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    return program.model


@dataclass
class _Layer:
    """The last layer of a graph, as what is to be copied.

    Attributes:
        number: which layer it is.
        nodes: its nodes in their order.
        made: the values that its nodes make.
        weights: the initializers that it alone reads.
        carried: the values of the layer before that it reads, each with the value of its own that is that one's like.
    """

    number: int
    nodes: list[onnx.NodeProto]
    made: set[str] = field(default_factory=set)
    weights: set[str] = field(default_factory=set)
    carried: dict[str, str] = field(default_factory=dict)


def deepened(model: onnx.ModelProto, layers: int) -> onnx.ModelProto:
    """A copy of ``model`` with ``layers`` layers: the last one is repeated until there are so many.

    Raises:
        InputError: it has more layers than that, or its last two do not consist of the same nodes.
    """
    deep = onnx.ModelProto()
    deep.CopyFrom(model)
    graph = deep.graph
    last = _last_layer(graph)
    extra = layers - last.number - 1
    if extra < 0:
        raise InputError(f"the graph has {last.number + 1} layers; as many as that, or more, are taken, not {layers}")
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    infos = {info.name: info for info in graph.value_info}
    position = 1 + max(index for index, node in enumerate(graph.node) if node.name == last.nodes[-1].name)
    before, after = list(graph.node[:position]), list(graph.node[position:])
    latest = {name: name for name in last.made}
    for number in range(last.number + 1, layers):
        names = {name: _renumbered(name, last.number, number) for name in last.made | last.weights}
        names |= {carried: latest[twin] for carried, twin in last.carried.items()}
        before += [_copied(node, names, last.number, number) for node in last.nodes]
        for source, kept in ((initializers, graph.initializer), (infos, graph.value_info)):
            for name in sorted((last.made | last.weights) & source.keys()):
                kept.add().CopyFrom(source[name])
                kept[-1].name = names[name]
        latest = {name: names[name] for name in last.made}
    for node in after:
        node.input[:] = [latest.get(name, name) for name in node.input]
    del graph.node[:]
    graph.node.extend(before + after)
    for entry in deep.metadata_props:
        if entry.key == TAILS_EXPECTED:
            entry.value = str(int(entry.value) + extra)
    return deep


def _last_layer(graph: onnx.GraphProto) -> _Layer:
    of_layer: dict[int, list[onnx.NodeProto]] = {}
    made_in: dict[str, int] = {}
    for node in graph.node:
        number = _layer_of(node)
        if number is None and not _scope_of(node):
            # The exporter's own, such as a Split: where its inputs are from.
            number = max((made_in[name] for name in node.input if name in made_in), default=None)
        if number is not None:
            of_layer.setdefault(number, []).append(node)
            made_in.update(dict.fromkeys(node.output, number))
    deepest = max(of_layer, default=0)
    last, one_before = _Layer(deepest, of_layer.get(deepest, [])), of_layer.get(deepest - 1, [])
    if [node.op_type for node in last.nodes] != [node.op_type for node in one_before] or not last.nodes:
        raise InputError(f"layers {deepest - 1} and {deepest} of the graph differ in their nodes; equal ones are taken")
    last.made = {name for node in last.nodes for name in node.output}
    twins = {
        earlier: later
        for node, other in zip(one_before, last.nodes, strict=True)
        for earlier, later in zip(node.output, other.output, strict=True)
    }
    weights = {tensor.name for tensor in graph.initializer}
    for node, other in zip(one_before, last.nodes, strict=True):
        for earlier, later in zip(node.input, other.input, strict=True):
            if later == earlier or later in last.made:
                continue
            if later in weights:
                last.weights.add(later)
            elif later in twins:
                last.carried[later] = twins[later]
            else:
                raise InputError(f"'{other.name}' reads '{later}', which neither its layer nor the one before makes")
    return last


def _scope_of(node: onnx.NodeProto) -> str:
    return "".join(entry.value for entry in node.metadata_props if entry.key in _SCOPES)


def _layer_of(node: onnx.NodeProto) -> int | None:
    found = _LAYER.search(_scope_of(node))
    return int(found[1]) if found else None


def _renumbered(name: str, old: int, new: int) -> str:
    renamed = name.replace(f"layers.{old}.", f"layers.{new}.")
    return renamed if renamed != name else f"{name}/layers.{new}"


def _copied(node: onnx.NodeProto, names: Mapping[str, str], old: int, new: int) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.name = _renumbered(node.name, old, new)
    copy.input[:] = [names.get(name, name) for name in node.input]
    copy.output[:] = [names[name] for name in node.output]
    for entry in copy.metadata_props:
        entry.value = entry.value.replace(f"layers.{old}.", f"layers.{new}.")
    return copy


def write(model: onnx.ModelProto, path: Path) -> int:
    """Writes ``model``, and beside it ``weights.bin``: as long as the weights are, and all hole.

    Returns:
        the data file's length in bytes.
    """
    end = 0
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            fields = {entry.key: entry for entry in tensor.external_data}
            fields["offset"].value = str(end)
            end += -(-int(fields["length"].value) // _ALIGNMENT) * _ALIGNMENT
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.SerializeToString())
    with path.with_name("weights.bin").open("wb") as file:
        file.truncate(end)
    return end
