"""The report: one page on a model, of what the other commands left in a folder."""

from moetrt.report.assembly import make_report
from moetrt.report.pages import write_report

__all__ = ["make_report", "write_report"]
