"""Make ``report.png``: the quickstart in a terminal, and the page that it leaves, side by side.

``python docs/pictures/make.py`` trains for a few seconds and needs Chromium (Debian's package ``chromium``).
"""

import html
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMAND = "fl-train fit --config configs/quickstart.yaml"
WIDTH, HEIGHT = 1720, 980
_PAGE = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 0; padding: 28px; display: flex; gap: 28px; background: #e9ecf1; height: 100vh;
  box-sizing: border-box; }}
pre {{ margin: 0; padding: 22px; flex: none; align-self: flex-start; background: #14171c; color: #e8eaed;
  border-radius: 10px; font: 13.5px/1.55 "DejaVu Sans Mono", monospace; }}
b {{ color: #58b0f0; }}
iframe {{ flex: 1; border: 1px solid #c9cfd8; border-radius: 10px; background: white; zoom: 0.8; }}
</style><pre>{text}</pre><iframe src="file://{report}"></iframe>"""


def main() -> int:
    """Train, put both on one page, and take its picture."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        sys.stderr.write("there is no Chromium: install Debian's package chromium\n")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "configs", Path(folder) / "configs")
        program = str(Path(sys.executable).parent / "fl-train")
        environment = {**os.environ, "COLUMNS": "76"}
        run = subprocess.run(
            [program, *COMMAND.split()[1:]], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        shown = "\n".join(line.rstrip() for line in run.stdout.splitlines()).strip()
        report = next(Path(folder).glob("runs/quickstart/version_*/report.html"))
        page = Path(folder) / "picture.html"
        page.write_text(_PAGE.format(text=f"<b>$ {COMMAND}</b>\n\n{html.escape(shown)}", report=report))
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--allow-file-access-from-files"]
        options += [f"--window-size={WIDTH},{HEIGHT}", f"--user-data-dir={folder}/profile"]
        picture = Path(__file__).with_name("report.png")
        command = [chromium, *options, f"--screenshot={picture}", f"file://{page}"]
        subprocess.run(command, stderr=subprocess.DEVNULL, check=True)
        sys.stdout.write(f"{picture}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
