"""Reports of comparisons: a document of plain data, and the HTML page that shows it."""

from leanbayes.report.collect import document_of
from leanbayes.report.document import (
    Cell,
    Column,
    Document,
    MethodFigure,
    Row,
    Section,
    Table,
    Verdict,
    merge,
)
from leanbayes.report.evaluated_run import EvaluatedRun
from leanbayes.report.evaluating import evaluate_for_report, evaluated
from leanbayes.report.gallery import Gallery, GalleryImage, Png
from leanbayes.report.model_card import model_card
from leanbayes.report.page import render, write

__all__ = [
    "Cell",
    "Column",
    "Document",
    "EvaluatedRun",
    "Gallery",
    "GalleryImage",
    "MethodFigure",
    "Png",
    "Row",
    "Section",
    "Table",
    "Verdict",
    "document_of",
    "evaluate_for_report",
    "evaluated",
    "merge",
    "model_card",
    "render",
    "write",
]
