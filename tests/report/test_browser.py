"""The pages in a real browser: nothing is refused, nothing is asked for, every picture is there, nothing is cut off."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from run_folders import record, write_run

from fl_lightning.report import compare, write

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on this machine: pages are checked by a parser only"
)

#: Measures the page in a frame of a phone's or a desktop's width, and shows what it found.
_PROBE = """<!doctype html><body><iframe id="frame" src="{page}" style="width:{width}px;height:900px;border:0"></iframe>
<pre id="found"></pre><script>
document.getElementById("frame").onload = event => {{
  const page = event.target.contentDocument;
  page.querySelectorAll("details").forEach(each => each.open = true);
  const sized = each => {{ const box = each.getBoundingClientRect(); return box.width > 100 && box.height > 30; }};
  const pictures = [...page.querySelectorAll("figure > svg")];
  document.getElementById("found").textContent = JSON.stringify({{
    pictures: pictures.length,
    shown: pictures.filter(sized).length,
    images: [...page.querySelectorAll("image")].length,
    loaded: [...page.querySelectorAll("image")].filter(each => each.getBBox().width > 0).length,
    width: page.documentElement.scrollWidth,
    smallest: Math.min(...[...page.querySelectorAll("svg text")].map(each => each.getBoundingClientRect().height)),
  }});
}};
</script>"""


def browse(path: Path, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    command += ["--disable-component-update", "--no-first-run", f"--user-data-dir={folder / 'profile'}", *options]
    command += ["--enable-logging=stderr", "--allow-file-access-from-files", "--virtual-time-budget=5000"]
    actual = subprocess.run([*command, "--dump-dom", f"file://{path}"], capture_output=True, text=True, timeout=120)
    assert actual.returncode == 0, actual.stderr
    return actual


@pytest.fixture(scope="module", params=["run", "comparison"])
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pages")
    run = write_run(root / "FedAvg" / "version_0")
    if request.param == "run":
        return write(run)
    other = write_run(
        root / "Local" / "version_0", run_record=record((0.4, 0.6, 0.9), strategy="Local"), strategy="Local"
    )
    return compare([run, other]).write(root / "comparison.html")


def requests_of(page: Path, folder: Path) -> tuple[set[str], str]:
    """Addresses that a page (not the browser by itself) asked for, and what the browser's console said."""
    log = folder / "net.json"
    run_record = browse(page, folder, f"--log-net-log={log}", "--host-resolver-rules=MAP * ~NOTFOUND").stderr
    events = [event.get("params", {}) for event in json.loads(log.read_text())["events"]]
    of_pages = [event for event in events if event.get("initiator", "not an origin") != "not an origin"]
    return {event["url"] for event in of_pages if "url" in event} - {f"file://{page}"}, run_record


def test_no_errors_and_no_requests(page: Path, tmp_path: Path) -> None:
    asked, run_record = requests_of(page, tmp_path)
    assert not {url for url in asked if not url.startswith("data:")}
    assert "CONSOLE" not in run_record


def test_a_page_that_asks_for_more_would_be_found(page: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    html = page.read_text().replace("</main>", '<img src="http://elsewhere.invalid/picture.png" alt="a"></main>')
    bad.write_text(html)
    assert "CONSOLE" in requests_of(bad, tmp_path)[1], "the page's own policy refuses it"
    bad.write_text(re.sub("<meta http-equiv[^>]*>", "", html))
    assert "http://elsewhere.invalid/picture.png" in requests_of(bad, tmp_path)[0]


@pytest.mark.parametrize("width", [390, 1280])
def test_every_picture_is_there_and_nothing_is_cut_off(page: Path, width: int, tmp_path: Path) -> None:
    probe = tmp_path / "probe.html"
    probe.write_text(_PROBE.format(page=f"file://{page}", width=width))
    actual = browse(probe, tmp_path)
    run_record = re.search(r'<pre id="found">(.*?)</pre>', actual.stdout)
    assert run_record is not None
    assert run_record[1], actual.stderr
    measured = json.loads(run_record[1])
    assert measured["pictures"] == measured["shown"] == page.read_text().count("<figure ") > 3
    assert measured["images"] == measured["loaded"]
    assert measured["width"] <= width, "the page does not scroll sideways"
    assert measured["smallest"] >= 8


@pytest.mark.full
def test_long_tables_of_results_are_sorted_and_folded(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "docs" / "_static" / "sort.js"
    rows = "".join(f"<tr><td>method {place}</td><td>{place % 30}.5 ± 1.0</td></tr>" for place in range(7, 37))
    table = "<table><thead><tr><th>method</th><th>{}</th></tr></thead><tbody>{}</tbody></table>"
    names = re.sub(r"<td>\d+\.5 ± 1\.0", "<td>words", rows)
    path = tmp_path / "page.html"
    path.write_text(f"""<script src="file://{script}"></script>
        <article>{table.format("Cora", rows)}{table.format("meaning", names)}</article>""")
    shown = browse(path, tmp_path).stdout
    first, second = re.findall(r"<tbody>(.*?)</tbody>", shown, flags=re.DOTALL)
    assert re.findall(r"<tr>.*?>(\d+\.5) ", first) == [f"{29 - place}.5" for place in range(12)]
    assert first.count('<tr hidden="">') == 18
    assert "hidden" not in second
    assert shown.count("Show all 30 rows") == 1
