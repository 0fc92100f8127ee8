"""The report of a comparison: a document of plain data, and the one HTML page that shows it."""

from leanbayes.report.assessed import assessed, run_of
from leanbayes.report.collect import document_of
from leanbayes.report.document import (
    Cell,
    Column,
    Document,
    Gallery,
    MethodFigure,
    Picture,
    Png,
    Row,
    Section,
    Table,
    merge,
)
from leanbayes.report.page import render, write
from leanbayes.report.runs import AssessedRun

__all__ = [
    "AssessedRun",
    "Cell",
    "Column",
    "Document",
    "Gallery",
    "MethodFigure",
    "Picture",
    "Png",
    "Row",
    "Section",
    "Table",
    "assessed",
    "document_of",
    "merge",
    "render",
    "run_of",
    "write",
]
