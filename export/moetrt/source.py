"""What a user names as a model, a folder or a factory, becomes a module with named tensors going in and out."""

import dataclasses
import importlib
import inspect
import operator
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NoReturn, SupportsIndex

import torch
from torch._subclasses.fake_tensor import FakeTensor

from moetrt.errors import InputError, InputTypeError, MoetrtError
from moetrt.files import is_text
from moetrt.nested import flatten, names_of
from moetrt.quiet import quiet

DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}

_SEEDS = range(-(2**63), 2**64)
"""What torch's generators take."""

_TAKEN = "a Hugging Face folder or 'package.module:factory' is taken"


@dataclass(frozen=True)
class Source:
    """A model as the exporter and the parity check see it.

    Attributes:
        module: takes the tensors of ``example_inputs`` in their order, by position; returns a tensor or a tuple of
            tensors, in the order of ``output_names``.
        example_inputs: tensors by name: what the graph is traced with, and whose dtypes and ranks it keeps. A dimension
            that is to be dynamic must be at least 2 here.
        dynamic_shapes: the symbols of an input's dynamic dimensions, ``{"input_ids": {0: "batch", 1: "seq"}}``. Equal
            symbols are equal sizes.
        output_names: one for each output.
        tails_expected: how many MoE layers end in a tail, as far as the model itself says; None where it does not.
        description: the model in a few words, for messages.
        random_inputs: makes inputs for a seed and sizes by symbol; None draws them like the examples.
    """

    module: torch.nn.Module
    example_inputs: Mapping[str, torch.Tensor]
    dynamic_shapes: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    output_names: Sequence[str] = ("output",)
    tails_expected: int | None = None
    description: str = "the module"
    random_inputs: Callable[[int, Mapping[str, int]], Mapping[str, torch.Tensor]] | None = None

    def __post_init__(self) -> None:
        """Checks the types of all of them.

        Raises:
            InputTypeError: one line that names the attribute, what it was and what is taken.
            InputError: as of `check_dynamic`.
        """
        _check_type("the module of a source", self.module, torch.nn.Module, "a torch.nn.Module")
        _check_type("the example inputs of a source", self.example_inputs, Mapping, "a dict of tensors by name")
        for name, tensor in self.example_inputs.items():
            _check_name("the name of an example input", name)
            _check_type(f"example input '{name}'", tensor, torch.Tensor, "a tensor")
        _check_type("the output names of a source", self.output_names, tuple | list, "a sequence of names")
        for name in self.output_names:
            _check_name("the name of an output", name)
        _check_type("tails_expected of a source", self.tails_expected, int | None, "an int or None")
        _check_type("the description of a source", self.description, str, "a str")
        if self.random_inputs is not None and not callable(self.random_inputs):
            _refuse_type("random_inputs of a source", self.random_inputs, "a function of seed and sizes, or None,")
        check_dynamic(self.dynamic_shapes, self.example_inputs)

    @property
    def input_names(self) -> tuple[str, ...]:
        return tuple(self.example_inputs)

    @property
    def example_sizes(self) -> dict[str, int]:
        """The size of each symbol in the example inputs."""
        return {
            symbol: self.example_inputs[name].shape[dim]
            for name, dims in self.dynamic_shapes.items()
            for dim, symbol in dims.items()
        }

    def make_inputs(self, seed: int = 0, **sizes: int) -> dict[str, torch.Tensor]:
        """Draws inputs in range: the same seed and sizes give the same tensors.

        Args:
            seed: of the generator.
            sizes: by symbol of ``dynamic_shapes``; the example's where left out.

        Returns:
            Tensors by name, in order. Without a ``random_inputs`` of its own, integers lie between the smallest and the
            largest of the example, and floating-point values have its mean and deviation.

        Raises:
            InputError: an unknown symbol, a size below 1, a seed that torch does not take, or inputs that could not be
                made: the sizes need too much memory, or ``random_inputs`` raised.
            InputTypeError: a seed or a size that is no whole number.
        """
        _check_type("the seed", seed, SupportsIndex, "a whole number")
        seed = operator.index(seed)
        if seed not in _SEEDS:
            raise InputError(f"the seed was {seed}; {_SEEDS.start} to {_SEEDS.stop - 1} is taken")
        complete = self.example_sizes
        for symbol, size in sizes.items():
            _check_type(f"the size '{symbol}'", size, SupportsIndex, "a whole number")
            if symbol not in complete:
                known = ", ".join(complete) or "none: every dimension is fixed"
                raise InputError(f"'{symbol}' is not a dynamic size of {self.description}; there are {known}")
            if size < 1:
                raise InputError(f"the size '{symbol}' was {size}; at least 1 is taken")
            complete[symbol] = operator.index(size)
        try:
            return self._draw_inputs(seed, complete)
        except MoetrtError:
            raise
        except (Exception, SystemExit) as error:
            asked = "".join(f", {symbol}={size}" for symbol, size in complete.items())
            raise InputError(
                f"inputs of {self.description} with seed={seed}{asked} cannot be made: {_said(error)}"
            ) from error

    def _draw_inputs(self, seed: int, complete: Mapping[str, int]) -> dict[str, torch.Tensor]:
        if self.random_inputs is not None:
            return dict(self.random_inputs(seed, complete))
        generator = torch.Generator().manual_seed(seed)
        drawn = {}
        for name, example in self.example_inputs.items():
            dims = self.dynamic_shapes.get(name, {})
            shape = [complete[dims[dim]] if dim in dims else size for dim, size in enumerate(example.shape)]
            drawn[name] = _draw(example, shape, generator)
        return drawn

    def sizes_of(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """The sizes by symbol that give the inputs these shapes; inputs that are not named keep what follows from them.

        Raises:
            InputError: an unknown input, another rank, another size in a fixed dimension, or two sizes for one symbol.
            InputTypeError: not a dict of shapes by input.
        """
        _check_type("the shapes", shapes, Mapping, "a dict of shapes by input")
        sizes: dict[str, int] = {}
        for name, shape in shapes.items():
            _check_type(f"the shape of input '{name}'", shape, tuple | list, "a sequence of sizes")
            if name not in self.example_inputs:
                raise InputError(f"there is no input '{name}'; there are {', '.join(self.example_inputs)}")
            example = tuple(self.example_inputs[name].shape)
            if len(shape) != len(example):
                raise InputError(f"input '{name}' was given {len(shape)} dimensions; {len(example)} are taken")
            for dim, size in enumerate(shape):
                symbol = self.dynamic_shapes.get(name, {}).get(dim)
                if symbol is None and size != example[dim]:
                    raise InputError(f"dimension {dim} of input '{name}' was {size}; it is fixed at {example[dim]}")
                if symbol is not None and sizes.setdefault(symbol, size) != size:
                    raise InputError(
                        f"dimension {dim} of input '{name}' was {size}, but '{symbol}' is {sizes[symbol]} already"
                    )
        return sizes


def check_dynamic(dynamic: Mapping[str, Mapping[int, str]], inputs: Mapping[str, torch.Tensor]) -> None:
    """Checks dynamic dimensions against the inputs they are of.

    Raises:
        InputError: an unknown input, a dimension it does not have, or a symbol that is not an identifier.
        InputTypeError: not a dict of symbols by dimension by input.
    """
    taken = 'a dict such as {"input_ids": {0: "batch"}}'
    _check_type("the dynamic dimensions", dynamic, Mapping, taken)
    for name, dims in dynamic.items():
        _check_type(f"the dynamic dimensions of input '{name}'", dims, Mapping, taken)
        if name not in inputs:
            raise InputError(f"dynamic dimensions name the input '{name}'; there are {', '.join(inputs)}")
        rank = inputs[name].dim()
        for dim, symbol in dims.items():
            _check_type(f"dynamic dimension {dim!r} of input '{name}'", dim, int, "an int")
            _check_type(f"the name of dynamic dimension {dim} of input '{name}'", symbol, str, "a str")
            if not 0 <= dim < rank:
                raise InputError(f"dynamic dimension {dim} of input '{name}'; it has {rank}, counted from 0")
            if not symbol.isidentifier():
                raise InputError(f"dynamic dimension {dim} of input '{name}' was called '{symbol}'; a name is taken")


def _check_type(what: str, value: object, kind: Any, taken: str) -> None:
    if not isinstance(value, kind):
        _refuse_type(what, value, taken)


def _check_name(what: str, name: object) -> None:
    _check_type(what, name, str, "a str")
    if not is_text(str(name)):
        raise InputError(f"{what} was {name!r}; text in UTF-8 is taken")


def _refuse_type(what: str, value: object, taken: str) -> NoReturn:
    raise InputTypeError(f"{what} was of type {type(value).__name__}; {taken} is taken")


def check_source(source: object) -> None:
    """Checks that a function which takes a `Source` was given one.

    Raises:
        InputTypeError: it is of another type, such as the text that `load_source` takes.
        InputError: as of `check_numbers`.
    """
    if not isinstance(source, Source):
        _refuse_type("the source", source, "a moetrt.source.Source, which load_source and as_source give,")
    check_numbers(source.module, source.example_inputs, source.description)


def check_numbers(module: torch.nn.Module, inputs: Mapping[str, torch.Tensor], where: str) -> None:
    """Checks that a model's tensors have numbers.

    Raises:
        InputError: a weight, a buffer or an example input is on the meta device, or stands for a tensor in a trace.
    """
    from moetrt.huggingface import CausalLM

    inner = module.module if isinstance(module, CausalLM | FlatModule) else module
    named = {f"weight '{name}'": tensor for name, tensor in [*inner.named_parameters(), *inner.named_buffers()]}
    named |= {f"example input '{name}'": tensor for name, tensor in inputs.items()}
    for name, tensor in named.items():
        if tensor.is_meta or isinstance(tensor, FakeTensor):
            kind = "a FakeTensor" if isinstance(tensor, FakeTensor) else "on the meta device"
            raise InputError(f"{name} of {where} is {kind}, without numbers; a tensor that has them is taken")


def _draw(example: torch.Tensor, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    if example.dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if example.is_floating_point():
        # A dtype of 16 bits is drawn in float32 and rounded, so that every dtype sees the same numbers.
        values = torch.randn(shape, generator=generator)
        if example.numel() > 1:
            values = values * example.float().std() + example.float().mean()
        return values.to(example.dtype)
    low, high = (int(example.min()), int(example.max())) if example.numel() else (0, 0)
    return torch.randint(low, high + 1, shape, generator=generator).to(example.dtype)


def load_source(text: str | os.PathLike[str], *, dtype: str | torch.dtype | None = None) -> Source:
    """Loads the model that ``text`` names; nothing is fetched from a network.

    Args:
        text: a Hugging Face folder (``config.json`` and ``*.safetensors`` of a causal language model), or
            ``package.module:factory``: a function without arguments, importable from the current folder or the
            installation, that returns what `as_source` takes.
        dtype: what the weights become, such as ``"bf16"``; as they are where None. What a Transformers model keeps in
            float32 stays so. With a module, its floating-point example inputs follow.

    Raises:
        InputError, InputTypeError: one line that says what was wrong with the folder or the factory.
    """
    chosen = _dtype(dtype)
    if isinstance(text, os.PathLike):
        text = os.fspath(text)
    _check_type("source", text, str, "a str or a path")
    if not text:
        raise InputError(f"source was ''; {_TAKEN}")
    if not is_text(text):
        raise InputError(f"source was {text!r}; text in UTF-8 is taken")
    path = Path(text)
    try:
        is_folder, is_file = path.is_dir(), path.exists()
    except OSError as error:
        raise InputError(f"source '{text}' cannot be read: {error.strerror or error}") from error
    if is_folder:
        from moetrt.huggingface import from_folder

        return from_folder(path, chosen)
    if is_file:
        raise InputError(f"source '{text}' is a file; {_TAKEN}")
    module_name, colon, attribute = text.partition(":")
    parts = [*module_name.split("."), *attribute.split(".")]
    if colon and all(part.isidentifier() for part in parts):
        source = as_source(_cast(_from_factory(module_name, attribute), chosen), f"source '{text}'")
        source.module.eval()
        return source
    if colon and "/" not in text:
        raise InputError(f"source was '{text}'; {_TAKEN}")
    raise InputError(f"source folder '{text}' does not exist; {_TAKEN}")


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None or dtype in DTYPES.values():
        return dtype  # type: ignore[return-value]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise InputError(f"the dtype was {str(dtype)!r}; one of {', '.join(DTYPES)} is taken")
    return DTYPES[dtype]


def as_source(value: Any, where: str = "the model") -> Source:
    """Makes a `Source` of a model in memory.

    Args:
        value: a Transformers causal language model (``input_ids`` go in, ``logits`` come out, batch and sequence are
            dynamic); a `Source`, which is returned as it is; or ``(module, example_inputs)``: a tensor, a tuple for
            positional or a dict for keyword arguments, with dataclasses, tuples, lists and dicts of tensors in it. An
            input is named after its parameter or field. Every dimension is fixed, but for those that a third entry
            names: ``{"residual": {0: "tokens"}}``.
        where: what to call it in messages.

    Raises:
        InputTypeError: another type.
        InputError: a model without MoE, or no tensor among the example inputs.
    """
    from moetrt.experts import is_transformers_model
    from moetrt.huggingface import causal_lm

    if isinstance(value, Source):
        return value
    if is_transformers_model(value):
        return causal_lm(value, where)
    if _is_module_with_inputs(value):
        return _module_source(*value, where=where)
    if isinstance(value, torch.nn.Module):
        raise InputTypeError(
            f"{where} gave the module {type(value).__name__} without inputs; (module, example_inputs) is taken"
        )
    raise InputTypeError(
        f"{where} gave an object of type {type(value).__name__}; a Transformers model, a moetrt.source.Source or "
        "(module, example_inputs) is taken"
    )


def _is_module_with_inputs(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) in (2, 3) and isinstance(value[0], torch.nn.Module)


@contextmanager
def _current_folder_importable() -> Iterator[None]:
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        if here in sys.path:
            sys.path.remove(here)


def module_files(name: str) -> list[str]:
    """The files of the module ``name`` and of the packages around it, as a factory's would be found; none is run."""
    files: list[str] = []
    places = [os.getcwd(), *sys.path]
    for part in name.split("."):
        spec = PathFinder.find_spec(part, places) if part.isidentifier() else None
        if spec is None:
            break
        if spec.has_location and spec.origin:
            files.append(spec.origin)
        places = list(spec.submodule_search_locations or ())
    return files


def _from_factory(module_name: str, attribute: str) -> Any:
    text = f"{module_name}:{attribute}"
    with _current_folder_importable(), quiet():
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
                raise InputError(
                    f"source '{text}': there is no module '{error.name}' in the current folder or the installation"
                ) from error
            raise InputError(f"source '{text}': importing '{module_name}' raised {_said(error)}") from error
        except (Exception, SystemExit) as error:
            raise InputError(f"source '{text}': importing '{module_name}' raised {_said(error)}") from error
        for part in attribute.split("."):
            if not hasattr(found, part):
                raise InputError(f"source '{text}': '{getattr(found, '__name__', found)}' has no '{part}'")
            found = getattr(found, part)
        if isinstance(found, Source):
            return found
        if not callable(found) or isinstance(found, torch.nn.Module):
            raise InputTypeError(
                f"source '{text}' is of type {type(found).__name__}; a function without arguments is taken"
            )
        try:
            return found()
        except MoetrtError:
            raise
        except (Exception, SystemExit) as error:
            raise InputError(f"source '{text}' raised {_said(error)}") from error


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_sentence(error)}"


def first_sentence(error: BaseException) -> str:
    """The first paragraph of what an exception says, on one line, at most 300 characters."""
    paragraph = str(error).strip().split("\n\n")[0]
    line = " ".join(paragraph.split()) or type(error).__name__
    return line if len(line) <= 300 else f"{line[:297]}..."


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    """What a factory returned, in ``dtype``."""
    if dtype is None:
        return value
    if isinstance(value, Source):
        inputs = {name: _cast_tensor(tensor, dtype) for name, tensor in value.example_inputs.items()}
        draw = value.random_inputs

        def cast_draw(seed: int, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
            assert draw is not None
            return {name: _cast_tensor(tensor, dtype) for name, tensor in draw(seed, sizes).items()}

        return dataclasses.replace(
            value,
            module=_cast_module(value.module, dtype),
            example_inputs=inputs,
            random_inputs=None if draw is None else cast_draw,
        )
    if isinstance(value, torch.nn.Module):
        return _cast_module(value, dtype)
    if _is_module_with_inputs(value):
        leaves, rebuild = flatten(value[1])
        return _cast_module(value[0], dtype), rebuild([_cast_tensor(tensor, dtype) for _, tensor in leaves]), *value[2:]
    return value


def _cast_tensor(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _cast_module(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Casts parameters and stored buffers; what is computed when a module is made, such as RoPE frequencies, stays."""
    patterns = set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        patterns |= set(getattr(module, "_keep_in_fp32_modules", None) or ())
    kept = re.compile("|".join(rf"(^|\.){re.escape(pattern)}($|\.)" for pattern in sorted(patterns)) or "$^")
    for name, tensor in module.state_dict(keep_vars=True).items():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if kept.search(name) else dtype)
    return module


class FlatModule(torch.nn.Module):
    """A module whose nested arguments and results are passed as plain tensors, in order."""

    def __init__(self, module: torch.nn.Module, rebuild: Callable[[Sequence[torch.Tensor]], Any]) -> None:
        super().__init__()
        self.module = module
        self.rebuild = rebuild
        self.training = module.training

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves, _ = flatten(self.call(*tensors))
        return tuple(tensor for _, tensor in leaves)

    def call(self, *tensors: torch.Tensor) -> Any:
        """The module's own result."""
        arguments = self.rebuild(tensors)
        return self.module(**arguments) if isinstance(arguments, dict) else self.module(*arguments)


def _module_source(
    module: torch.nn.Module, inputs: Any, dynamic: Mapping[str, Mapping[int, str]] | None = None, *, where: str
) -> Source:
    if isinstance(inputs, torch.Tensor) or dataclasses.is_dataclass(inputs):
        inputs = (inputs,)
    if isinstance(inputs, list):
        inputs = tuple(inputs)
    if not isinstance(inputs, tuple | dict):
        raise InputTypeError(f"{where} gave example inputs of type {type(inputs).__name__}; a tuple or a dict is taken")
    if isinstance(inputs, tuple):
        inputs = _by_parameter(module, inputs)
    leaves, rebuild = flatten(inputs)
    if not leaves:
        raise InputError(f"{where} gave example inputs without a tensor")
    flat = FlatModule(module, rebuild)
    tensors = [tensor for _, tensor in leaves]
    check_numbers(module, dict(zip(names_of([path for path, _ in leaves]), tensors, strict=True)), where)
    training = module.training
    try:
        with torch.no_grad(), _plain_attributes_kept(module):
            module.eval()
            results, _ = flatten(flat.call(*tensors))
    except MoetrtError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"{where}: the module called with its example inputs raised {_said(error)}") from error
    finally:
        module.train(training)
    return Source(
        module=flat,
        example_inputs=dict(zip(names_of([path for path, _ in leaves]), tensors, strict=True)),
        dynamic_shapes=dynamic or {},
        output_names=names_of([path for path, _ in results], single="output"),
        description=type(module).__name__,
    )


@contextmanager
def _plain_attributes_kept(module: torch.nn.Module) -> Iterator[None]:
    """What a module keeps of its first call, such as a length, is forgotten: its first call is the one that counts."""
    plain = (int, float, str, type(None))
    before = {part: {k: v for k, v in vars(part).items() if isinstance(v, plain)} for part in module.modules()}
    try:
        yield
    finally:
        for part, attributes in before.items():
            for name in [name for name, value in vars(part).items() if isinstance(value, plain)]:
                if name not in attributes:
                    del vars(part)[name]
            vars(part).update(attributes)


def _by_parameter(module: torch.nn.Module, inputs: tuple[Any, ...]) -> dict[str, Any] | tuple[Any, ...]:
    """Positional arguments by the names of forward's parameters, which then name the graph's inputs."""
    try:
        signature = inspect.signature(module.forward)
        given = signature.bind(*inputs).arguments
    except (TypeError, ValueError):
        return inputs  # calling the module says better what does not fit
    kinds = {signature.parameters[name].kind for name in given}
    return dict(given) if kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD} else inputs
