"""Rendering: a page in a real browser, a trace, Markdown, the terminal."""

from __future__ import annotations

import gzip
import json
import random
import re
import shutil
import struct
import subprocess
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.profile.conftest import made_up
from warpline.profile import tree
from warpline.profile.compare import compare
from warpline.profile.render import console, markdown, picture, roofchart
from warpline.profile.render.chrome import trace
from warpline.profile.render.html import page
from warpline.profile.session import Moment, Session, dumps, loads, write

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def browse(html: Path, *arguments: str) -> str:
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *arguments, html.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "Uncaught" not in done.stderr, done.stderr
    return done.stdout


def brightness_of(png: Path) -> float:
    """Return the brightness of the picture's first pixel: the page's background."""
    data, at, packed = png.read_bytes(), 8, b""
    while at < len(data):
        (length,), kind = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        body = data[at + 8 : at + 8 + length]
        packed += body if kind == b"IDAT" else b""
        at += 12 + length
    return sum(zlib.decompress(packed)[1:4]) / 3  # the first pixel is stored unchanged by every filter


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
def test_page_in_a_browser(tmp_path: Path, recorded: Session) -> None:
    path = tmp_path / "page.html"
    path.write_text(page(recorded, gpu="t4"))
    dom = browse(path, "--dump-dom", "--virtual-time-budget=2000")
    assert 'data-ready="yes"' in dom  # the script ran to its end
    brightness = {}
    for name, scheme in (("dark", 0), ("light", 1)):
        shot = tmp_path / f"{name}.png"
        browse(
            path, f"--screenshot={shot}", f"--blink-settings=preferredColorScheme={scheme}", "--window-size=1200,1800"
        )
        brightness[name] = brightness_of(shot)
        assert shot.stat().st_size > 30_000
    assert brightness["dark"] < 60 < 200 < brightness["light"]


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
def test_tables_sort_and_tips_show(tmp_path: Path) -> None:
    """The test's own script clicks, hovers and writes what it sees into the title."""
    probe = """<script>{
    const table = [...document.querySelectorAll("table.sortable")].pop(), head = table.querySelectorAll("th")[5];
    const column = () => [...table.tBodies[0].rows].map((r) => parseFloat(r.cells[5].textContent.replace(/,/g, "")));
    head.click(); const down = column(); head.click(); const up = column();
    const dot = document.querySelector("svg.roof circle");
    dot.dispatchEvent(new MouseEvent("mousemove", { clientX: 5, clientY: 5 }));
    const tip = document.getElementById("tip");
    const canvas = document.querySelector("canvas.timeline");
    const drawn = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.some((v) => v);
    document.title = JSON.stringify({ down, up, tip: tip.style.display + tip.textContent.slice(0, 9), drawn });
    }</script></body>"""
    path = tmp_path / "page.html"
    path.write_text(page(made_up(gap=1.0)).replace("</body>", probe))
    dom = browse(path, "--dump-dom", "--virtual-time-budget=2000")
    found = re.search(r"<title>(.+?)</title>", dom)
    assert found is not None
    seen = json.loads(found[1].replace("&quot;", '"'))
    assert seen["down"] == sorted(seen["down"], reverse=True)
    assert seen["up"] == sorted(seen["up"])
    assert seen["tip"].startswith("block")
    assert seen["drawn"]


def test_page_needs_nothing_from_elsewhere(recorded: Session) -> None:
    for session in (recorded, made_up(gap=2.0, title="<script>alert('&')</script>")):
        text = page(session)
        assert not re.search(r"https?://|src=|@import|url\(", text)
        assert "<script>alert" not in text


def test_trace(tmp_path: Path, recorded: Session) -> None:
    """The format that both viewers read: complete events with begin and duration, names for the tracks."""
    write(tmp_path / "t.json.gz", trace(recorded))
    raw = json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))
    events = raw["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["ph"] for event in events} == {"X", "M"}
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans)
    names = {event["name"] for event in spans if event["cat"] == "module"}
    assert "h.0 / attention / scores" in names
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} >= {"modules", "host"}
    assert {event["pid"] for event in spans} == {1, 2}
    begun = [event["ts"] for event in spans if event["name"] == "h.0 / ln_1" and event["pid"] == 2]
    assert len(begun) == 2  # a few steps
    assert (tmp_path / "t.json.gz").stat().st_size < 100_000


def check_nesting(text: str) -> None:
    """Check that any two events of a thread are disjoint or nested, to the nanosecond."""
    threads: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in json.loads(text)["traceEvents"]:
        if event["ph"] == "X":
            begin = round(1000 * event["ts"])
            threads.setdefault((event["pid"], event["tid"]), []).append((begin, begin + round(1000 * event["dur"])))
    for moments in threads.values():
        inside: list[int] = []
        for begin, end in sorted(moments, key=lambda moment: (moment[0], -moment[1])):
            while inside and inside[-1] <= begin:
                inside.pop()
            assert not inside or end <= inside[-1]
            inside.append(end)


def test_parts_never_outlast_their_whole(recorded: Session) -> None:
    """Begins and ends anywhere between two nanoseconds, also after the session was stored in a file."""
    dice = random.Random(5)
    moments, at = [Moment("step", "step 1", (), 0.0, 1e5)], 0.0
    for _ in range(300):
        whole = dice.random() * 9
        inner = whole * dice.random()
        deep = inner * dice.random()
        moments += [Moment("module", "h.0", ("h.0",), at, whole), Moment("module", "h.0", ("h.0",), at, inner)]
        moments += [Moment("module", "a", ("h.0", "a"), at + inner - deep, deep)]
        at += whole
    session = made_up()
    session = replace(session, phases=(replace(session.phases[0], timeline=tuple(moments)),))
    for one in (session, recorded):
        check_nesting(trace(one))
        check_nesting(trace(loads(dumps(one))))


def test_kernels_that_overlap_have_threads_of_their_own() -> None:
    session = made_up()
    moments = [Moment("gpu", f"k{i}", (), 4.0 * i, 7.0) for i in range(6)]
    overlapping = replace(session, phases=(replace(session.phases[0], timeline=tuple(moments)),))
    text = trace(overlapping)
    check_nesting(text)
    titles = [e["args"]["name"] for e in json.loads(text)["traceEvents"] if e["name"] == "thread_name"]
    assert titles == ["GPU 1", "GPU 2"]


def boxes(svg: str) -> list[roofchart.Box]:
    found = re.findall(r"<text class='number' x='([\d.]+)' y='([\d.]+)'[^>]*>(\d+)</text>", svg)
    return [roofchart.Box(float(x) - 3.5 * len(n), float(y) - 9, 7.0 * len(n), 10) for x, y, n in found]


def test_numbers_of_the_roofline_do_not_cover_each_other(recorded: Session) -> None:
    for session in (recorded, made_up(), made_up(gap=3.0), made_up(scale=90.0), made_up(scale=0.05)):
        for phase in session.phases:
            svg = roofchart.roofline(session, phase)
            found = boxes(svg)
            names = re.findall(r"<li>(.+?)</li>", svg)
            assert len(found) == len(names) == svg.count("<circle") > 10
            assert "whole step" in names
            assert not any(a.meets(b) for i, a in enumerate(found) for b in found[:i])


SIDE = st.floats(0, 30, width=16)


@given(x=SIDE, y=SIDE, others=st.lists(st.tuples(SIDE, SIDE), min_size=1, max_size=5))
def test_boxes_meet_where_both_their_sides_do(x: float, y: float, others: list[tuple[float, float]]) -> None:
    box = roofchart.Box(x, y, 10.0, 6.0)
    for other in (roofchart.Box(*place, 14.0, 4.0) for place in others):
        apart = other.x >= x + 10 or x >= other.x + 14 or other.y >= y + 6 or y >= other.y + 4
        assert box.meets(other) == other.meets(box) == (not apart)


@pytest.mark.parametrize("corner", [(64.0, 10.0), (890.0, 10.0), (64.0, 376.0), (890.0, 376.0), (450.0, 200.0)])
def test_dots_in_one_place_have_numbers_in_many(corner: tuple[float, float]) -> None:
    found = roofchart.place([(*corner, 8.0)] * 25)
    assert all(box.inside for box in found)
    assert not any(a.meets(b) for i, a in enumerate(found) for b in found[:i])


def test_markdown() -> None:
    text = markdown.whole(made_up(gap=1.0), gpu="t4", most=5)
    assert "### Verdict" in text
    assert "| transformer blocks |" in text
    assert "A projection, not a measurement" in text
    for block in text.split("\n\n"):
        if block.startswith("|"):
            assert len({line.count(" | ") for line in block.splitlines()}) == 1
    assert "ln_1" in markdown.comparison(compare(made_up(gap=1.0), made_up()))


def test_console(capsys: pytest.CaptureFixture[str]) -> None:
    console.show(made_up(gap=1.0, notes=("a note",)), gpu="a100", merge=False)
    out = capsys.readouterr().out
    for word in (
        "h.11",
        "Verdict",
        "Classes",
        "Roofline",
        "Projected onto",
        "note: a note",
        "GPU busy",
        "without them",
    ):
        assert word in out
    console.show_comparison(compare(made_up(), made_up(gap=1.0)))
    assert "after/before" in capsys.readouterr().out


def test_picture() -> None:
    """The parts of a bar sum to an unrecorded step, and the longest bar is the longest step."""
    slow, fast = made_up(gap=5.0), made_up()
    for session in (slow, fast):
        phase = session.phases[0]
        assert sum(picture.shares(phase).values()) == pytest.approx(phase.free_us)
    assert picture.shares(slow.phases[0])["waiting"] == pytest.approx(slow.phases[0].gap_us)
    text = picture.bars([slow, fast], "decode")
    widths = [float(width) for width in re.findall(r'width="([\d.]+)" height="22"', text)]
    parts = sum(us > 0 for us in picture.shares(slow.phases[0]).values())
    assert sum(widths[:parts]) == pytest.approx(860 - 150 - 100, abs=1)
    assert sum(widths[parts:]) < sum(widths[:parts])
    assert "exchanges" not in text


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
@pytest.mark.parametrize("width", [400, 1280])
def test_page_fits_a_phone_and_is_searched(tmp_path: Path, width: int) -> None:
    """Nothing is wider than the window; a search sums what it finds; a click shows a box alone."""
    probe = """<script>{
    const field = document.querySelector("input.search"), frame = document.querySelector(".flame");
    field.value = "MLP"; field.dispatchEvent(new Event("input"));
    const found = document.querySelector("output").textContent, dim = frame.querySelectorAll(".dim").length;
    const box = [...frame.children].find((one) => one.textContent === "LM head");
    const before = box.getBoundingClientRect().width; box.click();
    const now = [...frame.children].find((one) => one.textContent === "LM head").getBoundingClientRect().width;
    const wide = document.documentElement.scrollWidth;
    const legend = document.querySelectorAll(".kind").length;
    document.title = JSON.stringify({ found, dim, before, now, wide, inner: innerWidth, legend });
    }</script></body>"""
    path = tmp_path / "page.html"
    path.write_text(page(made_up(gap=1.0)).replace("</body>", probe))
    frame = tmp_path / "frame.html"  # a window is at least 500 wide, a frame is not
    frame.write_text(f"<iframe src='{path.name}' style='width:{width}px;height:900px;border:0'></iframe><script>"
                     "onload = () => { document.title = frames[0].document.title; };</script>")  # fmt: skip
    dom = browse(frame, "--dump-dom", "--virtual-time-budget=3000", "--allow-file-access-from-files",
                 "--window-size=1400,1000")  # fmt: skip
    found = re.search(r"<title>(.+?)</title>", dom)
    assert found is not None
    seen = json.loads(found[1].replace("&quot;", '"'))
    assert seen["wide"] <= seen["inner"] == width
    assert seen["now"] > 3 * seen["before"]
    assert seen["dim"] > 0
    assert seen["legend"] >= 3
    session = made_up(gap=1.0)
    root = tree.build(session.phases[0])
    mlp = root.find("transformer blocks", "MLP")
    assert mlp is not None
    assert seen["found"].startswith(f"{mlp.us:,.1f}".removesuffix(".0"))
