"""Traces of the operators of a run, signatures of their values, and the first operators at which two runs differ."""

from crossframe.operators.match import Finding, find
from crossframe.operators.request import TRACE, Request
from crossframe.operators.signature import Signature, signature_of
from crossframe.operators.trace import Judged, Operator, SourceLine, Trace

__all__ = [
    "TRACE",
    "Finding",
    "Judged",
    "Operator",
    "Request",
    "Signature",
    "SourceLine",
    "Trace",
    "find",
    "signature_of",
]
