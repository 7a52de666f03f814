"""What torch and Transformers print while they load and export, and no user can act on, is kept back."""

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_LOGGERS = ("torch", "torch.onnx", "torch.export", "torch.fx", "transformers", "onnxscript", "onnx_ir", "onnxruntime")


@contextmanager
def quiet() -> Iterator[None]:
    """While the block runs, warnings and the libraries' log lines and progress bars are not printed.

    Errors are not touched: what the libraries raise passes through.
    """
    levels = [(logger, logger.level) for logger in map(logging.getLogger, _LOGGERS)]
    # Not imported for this: it is an extra, and who has not loaded it has nothing of it to silence.
    transformers = sys.modules.get("transformers")
    bars = transformers.utils.logging if transformers is not None else None
    had_bars = bars is not None and bars.is_progress_bar_enabled()
    try:
        for logger, _ in levels:
            # torch logs a failed export as errors before it raises; the exception says it all.
            logger.setLevel(logging.CRITICAL)
        if bars is not None:
            bars.disable_progress_bar()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels:
            logger.setLevel(level)
        if bars is not None and had_bars:
            bars.enable_progress_bar()
