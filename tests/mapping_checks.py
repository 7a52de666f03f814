"""What the tests of mapping ask of every graph: what became of its tail, and that the numbers stay."""

import onnx
import onnx_ir as ir

from moetrt.mapping import inference_problem, map_model
from moetrt.mapping_report import MappingReport, Site
from moetrt.onnx_op import operator_of
from tests.equivalence import compare_models
from tests.mapping_graphs import Graph, feeds

RELATIVE = {"float32": 2e-6, "float16": 4e-3}
"""How far a mapped graph may be from the graph before, as a part of the largest value: a few roundings of its dtype."""


def mapped(model: ir.Model) -> tuple[ir.Model, MappingReport]:
    """A mapped copy of ``model``, checked by onnx.checker and strict shape inference."""
    copy = ir.from_proto(ir.to_proto(model))
    report = map_model(copy)
    assert inference_problem(copy) is None
    onnx.checker.check_model(ir.to_proto(copy))
    return copy, report


def assert_same_numbers(before: ir.Model, after: ir.Model, dtype: str = "float32") -> None:
    for seed in range(2):
        for difference in compare_models(before, after, feeds(before, seed)):
            assert difference.relative <= RELATIVE[dtype], str(difference)


def only(report: MappingReport) -> Site:
    assert report.found == 1
    return report.sites[0]


def matched(graph: Graph) -> Site:
    """Maps the graph, compares the numbers, and returns its one site, which has its norm."""
    model = graph.model()
    after, report = mapped(model)
    site = only(report)
    assert site.operator == "MoEFinalizeAddRMSNorm", site.reason
    assert site.matched
    assert site.reason is None
    assert_same_numbers(model, after, graph.dtype)
    return site


def declined(graph: Graph, words: str) -> Site:
    """Maps the graph, compares the numbers, and returns its one site, which became MoEFinalizeAdd for a reason."""
    model = graph.model()
    after, report = mapped(model)
    site = only(report)
    assert site.operator == "MoEFinalizeAdd"
    assert not site.matched
    assert site.reason is not None
    assert words in site.reason, site.reason
    assert "\n" not in site.reason
    assert not report.complete
    assert_same_numbers(model, after, graph.dtype)
    return site


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph if operator_of(node)]
