"""The HTML report: one file that needs no network."""

from eplb_cli.report.data import ModelFacts, NamedPlan, Report, make_report
from eplb_cli.report.page import render

__all__ = ["ModelFacts", "NamedPlan", "Report", "make_report", "render"]
