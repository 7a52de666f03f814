"""What torch and Transformers print while they load and export, and no user can act on, is kept back."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_LOGGERS = ("torch", "torch.onnx", "torch.export", "torch.fx", "transformers", "onnxscript", "onnx_ir")


@contextmanager
def quiet() -> Iterator[None]:
    """While the block runs, warnings and the libraries' log lines and progress bars are not printed.

    Errors are not touched: what the libraries raise passes through.
    """
    from transformers.utils import logging as transformers_logging

    levels = [(logger, logger.level) for logger in map(logging.getLogger, _LOGGERS)]
    bars = transformers_logging.is_progress_bar_enabled()
    try:
        for logger, _ in levels:
            # torch logs a failed export as errors before it raises; the exception says it all.
            logger.setLevel(logging.CRITICAL)
        transformers_logging.disable_progress_bar()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels:
            logger.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()
