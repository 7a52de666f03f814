"""docs/families.md: the table of families, and what its columns mean."""

from collections.abc import Sequence

from moetrt.families import DTYPES, SHAPES, Family

COLUMNS = (
    "family",
    "layers",
    "MoE",
    "mapped",
    "norm",
    "ONNX Runtime",
    "plugin",
    "optional inputs",
    "attributes",
)

_PAGE = """\
<!-- Written by `make families` (moetrt families --page docs/families.md) from moetrt/families_page.py. -->

# MoE families

Each row is a model of Transformers' own classes, or of the contract alone, small and with random weights, with the
family's own routing, gates, scales and norms: `moetrt.models:NAME`. `make families` takes each through `moetrt export`
(batch and sequence dynamic), `map`, `compare` and `build`, in {dtypes}, and ends with exit code 1 where a row is not
as it should be.

{table}

| column | what it says |
|---|---|
| layers, MoE | how many layers the model's config says it has, and how many of them are MoE layers |
| mapped | tails that became a plugin node, as many as MoE layers; the graph is not asked how many there should be |
| norm | the residual add and RMSNorm are in the node; what a model has in their place stays TensorRT's own |
| ONNX Runtime | against PyTorch by the rule of `moetrt compare`, batch and seq being {shapes}; see below |
| plugin | plugin layers in TensorRT-RTX's network of the file, with the plugin library and without it |
| optional inputs | of the plugin node |
| attributes | of the node in 16 bits that are not the operator's defaults; eps is not shown |

A cell that is not the same in {dtypes} names each. The models are exported with an example of one token, again and
again. The tokens that are compared hit, in every MoE layer, experts that the example missed: a graph that had kept the
example's choice would give other numbers.

## Lengths

`moetrt families --lengths` exports each of these in fp32, and five more that work through a sequence in chunks or
windows (`moetrt.chunked_models`: DeepSeek-V4 with compression, Nemotron-3, Granite 4, MiniMax-01, Kimi-Linear), and
holds each file in ONNX Runtime against PyTorch at 1, 2, 8, 63 to 65, 127 to 129, 255 to 257, 300 and 600 tokens. It ends
with exit code 1 where one is wrong. A file whose model has a branch on a length states the sizes at which it is right;
the table leaves others out.

## A family that is not here

It needs no code where its graph is of a form that is known, whatever the model is called:

- Its experts go through Transformers' experts interface, or the module is written against `moetrt.MoEOutput`. What lies
  outside both is exported by the files of `moetrt/rewrites`, each for one thing that torch.onnx does not take.
- After the weighted sum over experts come, in any order, the routed scale, a shared expert's output (with or without a
  sigmoid gate), the residual and scales of both. The mapper reads them from the graph.
- The next norm is an RMSNorm, with gamma as it is or as 1 + gamma, multiplied before or after the rounding to 16 bits.
  With any other norm the sum is still mapped, as `MoEFinalizeAdd`.

`moetrt map` lists each tail with the first reason why something was left out of its node. To have a family in this
table, add a function that returns its model to `moetrt/models.py`.
"""


def cells(row: Family) -> tuple[str, ...]:
    """A row's cells, in the order of `COLUMNS`."""
    variants = row.variants
    # In 16 bits, where there are any: float32 has no rounding before gamma.
    shown = next((variant for dtype, variant in variants.items() if dtype != "fp32"), variants.get("fp32"))
    return (
        row.name,
        str(row.layers),
        str(row.moe_layers),
        _each({dtype: str(variant.mapped) for dtype, variant in variants.items()}),
        row.other_norm or "in the node",
        _each({dtype: "agrees" if variant.agrees else "DIFFERS" for dtype, variant in variants.items()}),
        _each({dtype: f"{v.plugin_layers} / {v.native_plugin_layers}" for dtype, v in variants.items()}),
        ", ".join(shown.inputs) if shown else "",
        ", ".join(shown.attributes) if shown else "",
    )


def _each(by_dtype: dict[str, str]) -> str:
    """The value, or each dtype's where they differ."""
    values = set(by_dtype.values())
    return values.pop() if len(values) == 1 else ", ".join(f"{dtype} {value}" for dtype, value in by_dtype.items())


def table_lines(rows: Sequence[Family]) -> list[str]:
    """The table in Markdown."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *map(cells, sorted(rows, key=lambda row: row.name))]
    return [f"| {' | '.join(line)} |" for line in lines]


def page(rows: Sequence[Family]) -> str:
    """The page in Markdown."""
    dtypes = f"{', '.join(DTYPES[:-1])} and {DTYPES[-1]}"
    shapes = " and ".join("x".join(map(str, shape)) for shape in SHAPES)
    return _PAGE.format(dtypes=dtypes, shapes=shapes, table="\n".join(table_lines(rows)))
