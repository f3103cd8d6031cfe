"""Renders a comparison of strategies as an HTML page and as Markdown. Imports no torch and measures nothing."""

from rung.compare.report.data import FORMAT
from rung.compare.report.markdown import as_markdown
from rung.compare.report.page import as_page, write_page

__all__ = ["FORMAT", "as_markdown", "as_page", "write_page"]
