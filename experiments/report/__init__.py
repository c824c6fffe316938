"""The answer of a comparison for people: `report.json`, one offline page, and a few lines for the terminal."""

from experiments.report.build import PairSeries, report_of
from experiments.report.page import write_report
from experiments.report.terminal import print_report

__all__ = ["PairSeries", "print_report", "report_of", "write_report"]
