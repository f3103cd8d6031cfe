"""The page in a real browser: Debian's Chromium, driven by Playwright. It is opened as a file, without a network."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rung.compare.report import as_markdown, write_page
from tests.comparison import sample

playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs a browser: apt-get install chromium")

WIDTHS = (390, 1280)
CHARTS = {"experts", "throughput", "memory", "messages", "losses", "timeline", "micro-batches", "predictions", "slow"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_page(sample(), path)
    return path


class _Opened:
    """A page, and what it said and asked for."""

    def __init__(self, browser: Any, file: Path, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(file.as_uri())

    def __enter__(self) -> Any:
        return self.page

    def __exit__(self, *failure: Any) -> None:
        self.context.close()
        if failure[0] is None:
            assert self.said == []
            assert len([url for url in self.asked if not url.startswith("blob:")]) == 1  # the file itself


@pytest.fixture
def page(browser: Any, file: Path) -> Iterator[Any]:
    with _Opened(browser, file, viewport={"width": 1280, "height": 900}, accept_downloads=True) as opened:
        yield opened


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_fits_its_width_and_can_be_read(browser: Any, file: Path, width: int, scheme: str) -> None:
    """Nothing hangs over the edge of the document, and every text stands out from its ground."""
    with _Opened(browser, file, viewport={"width": width, "height": 844}, color_scheme=scheme) as page:
        assert page.evaluate("document.documentElement.scrollWidth") == width
        ground, worst = page.evaluate(_CONTRAST)
        assert (ground < 0.05) == (scheme == "dark")
        assert worst[0] >= 4.5, f"{worst[1]!r} has a contrast of {worst[0]:.2f}"
        assert page.locator("h1").inner_text() == sample()["verdict"]["sentence"]
        assert {figure.get_attribute("id") for figure in page.locator("figure").all()} == CHARTS
        regions = page.locator(".scroll:visible")
        wider = [region.evaluate("e => e.scrollWidth > e.clientWidth + 1") for region in regions.all()]
        assert any(wider) == (width == 390)  # what is too wide scrolls inside its own region, also by keyboard
        assert all(region.get_attribute("tabindex") == "0" for region in regions.all())


_CONTRAST = """() => {
  const parse = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => parse(colour).slice(0, 3).map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (parse(colour)[3] !== 0) return light(colour);
    }
    return 1;
  };
  let worst = [99, ""];
  for (const element of document.querySelectorAll("body *:not(script)")) {
    const words = [...element.childNodes].filter((n) => n.nodeType === 3).map((n) => n.textContent.trim()).join("");
    if (!words || !element.checkVisibility() || element.matches(".number")) continue;
    const style = getComputedStyle(element);
    const own = light(element.namespaceURI.endsWith("svg") ? style.fill : style.color);
    const [a, b] = [own, ground(element)];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < worst[0]) worst = [contrast, words];
  }
  return [ground(document.body), worst];
}"""


def test_marks_are_those_of_the_data(page: Any) -> None:
    rows = [row for row in sample()["rows"] if row["status"] == "ok"]

    def count(chart: str, what: str = ".mark") -> int:
        return int(page.locator(f"#{chart} {what}").count())

    spans = [span for row in rows for lane in row["timeline"]["ranks"] for span in lane["spans"]]
    numbered = [span for span in spans if span["micro_batch"] is not None and span["what"] != "communication"]
    assert count("throughput") == len(rows)
    assert count("memory") == sum(value > 0 for row in rows for m in row["memory"] for value in m["kinds"].values())
    assert count("messages") == sum(len({m["collective"] for m in row["messages"]}) for row in rows)
    assert count("losses") == len(rows)
    points = page.locator("#losses polyline.mark").evaluate_all("all => all.map((one) => one.points.numberOfItems)")
    assert points == [len(row["losses"]) for row in rows]
    assert count("timeline") == len(spans)
    assert count("timeline", ".t-communication.mark") == sum(span["what"] == "communication" for span in spans)
    assert count("micro-batches") == len(numbered) > 0
    assert page.locator("#micro-batches .number").all_text_contents() == [str(span["micro_batch"]) for span in numbered]
    assert count("predictions") == 2 * 3 * sum(row["predicted"] is not None for row in rows)
    assert count("slow", "li") == sum(len(row["slow"]) for row in rows)


@pytest.mark.parametrize(("width", "media"), [(390, "screen"), (1280, "screen"), (720, "print")])
def test_lengths_are_those_of_the_data(page: Any, width: int, media: str) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(media=media)
    rows = [row for row in sample()["rows"] if row["status"] == "ok"]
    right = (
        "all => all.map((svg) => [...svg.querySelectorAll('.mark')].map((mark) => mark.getBBox()))"
        ".map((boxes) => Math.max(...boxes.map((box) => box.x + box.width)))"
    )
    for chart, values in (
        ("throughput", [row["samples_per_second"]["median"] for row in rows]),
        ("memory", [max(memory["peak_bytes"] for memory in row["memory"]) for row in rows]),
        ("messages", [row["bytes_per_step"] for row in rows if row["messages"]]),
        ("timeline", [row["timeline"]["seconds"] for row in rows]),
    ):
        ends = page.locator(f"#{chart} svg.picture").evaluate_all(right)
        assert max(ends) > width / 10
        assert ends == pytest.approx([max(ends) * value / max(values) for value in values], rel=0.01), chart


def _names(page: Any, where: str) -> list[str]:
    return [words.split()[0] for words in page.locator(where).all_inner_texts()]


def test_sorts_by_click_and_by_keyboard(page: Any) -> None:
    rows = sample()["rows"]
    ok = [row for row in rows if row["status"] == "ok"]
    by_speed = [row["strategy"] for row in sorted(ok, key=lambda row: -row["samples_per_second"]["median"])]
    head = page.get_by_role("columnheader", name="samples/s")
    head.get_by_role("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    assert _names(page, "#strategies tbody th") == [*by_speed, "tp2"]
    assert _names(page, "#memory .name") == by_speed  # the charts follow
    assert "samples/s, descending" in page.locator("#sorted").text_content()
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "ascending"
    assert _names(page, "#strategies tbody th") == [*reversed(by_speed), "tp2"]
    page.get_by_role("button", name="strategy", exact=True).focus()
    page.keyboard.press("Space")
    assert _names(page, "#strategies tbody th") == [*sorted(by_speed), "tp2"]
    assert page.locator("[aria-sort=ascending], [aria-sort=descending]").count() == 1


def test_what_is_focused_can_be_seen_and_the_table_comes_first(page: Any) -> None:
    page.keyboard.press("Tab")
    skip = page.locator(".skip")
    assert skip.evaluate("e => e === document.activeElement && e.getBoundingClientRect().left >= 0")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "strategy"
    assert page.evaluate("parseFloat(getComputedStyle(document.activeElement).outlineWidth)") >= 2


def test_a_strategy_can_be_left_out_of_the_charts(page: Any) -> None:
    page.get_by_role("checkbox", name="ddp").press("Space")
    shown = page.locator("#throughput .name:visible").all_inner_texts()
    assert shown == ["single", "zero1", "zero3", "pp2", "ps-async"]
    assert page.locator("#losses .dashes:visible").count() == 5
    assert page.locator("#strategies tbody tr:visible").count() == 7


def test_the_largest_of_those_shown_takes_the_whole_width(page: Any) -> None:
    width = "e => e.getBoundingClientRect().width"
    before = page.locator("#memory .strip[data-row='1'] .picture").evaluate(width)
    page.get_by_role("checkbox", name="single").uncheck()
    after = page.locator("#memory .strip[data-row='1'] .picture").evaluate(width)
    assert after == pytest.approx(before * 165 / 135, rel=0.01)


def test_steps_can_have_a_scale_of_their_own(page: Any) -> None:
    lanes = page.locator("#timeline .lanes")
    widths = lanes.evaluate_all("all => all.map((one) => one.getBoundingClientRect().width)")
    seconds = [row["timeline"]["seconds"] for row in sample()["rows"] if row["status"] == "ok"]
    assert widths == pytest.approx([widths[0] * time / seconds[0] for time in seconds], rel=0.01)
    page.locator("#scale").click()
    assert len(set(lanes.evaluate_all("all => all.map((one) => one.getBoundingClientRect().width)"))) == 1


def test_a_mark_tells_its_figures(page: Any) -> None:
    page.locator("#memory .mark").first.hover()
    assert page.locator("#tip").inner_text() == "rank 0: parameters 24 MiB of 165 MiB"


def test_data_can_be_saved_copied_and_unfolded(page: Any) -> None:
    for button, wanted in (("Save as JSON", sample()), ("Save as Markdown", as_markdown(sample()))):
        with page.expect_download() as waiting:
            page.get_by_role("button", name=button).click()
        saved = Path(waiting.value.path()).read_text()
        assert (json.loads(saved) if "JSON" in button else saved) == wanted
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy Markdown").click()
    playwright.expect(page.locator("#done")).to_have_text("Copied.")
    assert page.evaluate("navigator.clipboard.readText()") == as_markdown(sample())
    page.locator("#memory summary").click()
    cells = page.locator("#memory .figures tbody tr").first.locator("th, td").all_inner_texts()
    assert cells == ["single", "0", "165 MiB", "24 MiB", "24 MiB", "48 MiB", "60 MiB", "9 MiB"]


def test_a_screen_reader_has_all_of_it(page: Any) -> None:
    pictures = page.locator("svg[role=img]")
    assert pictures.count() > 0
    assert all(pictures.evaluate_all("all => all.map((one) => one.getAttribute('aria-label').length > 10)"))
    unnamed = "all => all.filter((one) => !one.textContent.trim()).length"
    assert page.locator("button, summary, figcaption h2, figcaption p, caption").evaluate_all(unnamed) == 0
    assert page.locator("figure").evaluate_all("all => all.every((f) => f.querySelector('figcaption p'))")
    assert (
        page.evaluate("new Set([...document.querySelectorAll('[id]')].map((e) => e.id)).size")
        == page.locator("[id]").count()
    )


def test_prints_in_light_without_tools(browser: Any, file: Path) -> None:
    with _Opened(browser, file, viewport={"width": 720, "height": 1000}, color_scheme="dark") as page:
        page.emulate_media(media="print", color_scheme="dark")
        ground, worst = page.evaluate(_CONTRAST)
        assert ground > 0.9 and worst[0] >= 4.5, worst
        assert page.locator("button.tool:visible, #choice:visible, details:visible").count() == 0
        assert page.locator("figure:visible").count() == len(CHARTS)
        assert page.evaluate("document.documentElement.scrollWidth") == 720  # a sheet of A4 with its margins
        assert page.locator(".scroll").evaluate_all("all => all.every((e) => getComputedStyle(e).overflowX !== 'auto')")


def test_without_a_script_all_is_shown(browser: Any, file: Path) -> None:
    with _Opened(browser, file, viewport={"width": 1280, "height": 900}, java_script_enabled=False) as page:
        assert page.locator("figure:visible").count() == len(CHARTS)
        assert page.locator("button.tool:visible").count() == 0
