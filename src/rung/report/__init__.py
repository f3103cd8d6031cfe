"""What a comparison of strategies found, as a page, as Markdown and as JSON. Needs no torch, and measures nothing."""

from rung.report.data import FORMAT
from rung.report.markdown import as_markdown
from rung.report.page import as_page, write_page

__all__ = ["FORMAT", "as_markdown", "as_page", "write_page"]
