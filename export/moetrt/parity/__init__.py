"""Parity: a mapped file's numbers against PyTorch's, as a whole and tail by tail, and why they differ."""

from moetrt.parity.comparison import ParityReport, compare
from moetrt.parity.verdict import OutputParity

__all__ = ["OutputParity", "ParityReport", "compare"]
