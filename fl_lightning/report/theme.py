"""Colors of the pages, light and dark, and how a Matplotlib figure takes them on.

A figure is drawn in stand-in colors, one for each name below; as it becomes a part of a page they turn into the
page's CSS variables, so that the same picture serves both schemes. Series are told apart in the usual kinds of color
blindness (after Okabe and Ito, "Color Universal Design", 2008) and have a contrast of at least 3 to 1 with the page;
text has 4.5.
"""

import math
import re
from collections.abc import Sequence
from zlib import crc32

#: CSS variable, color in the light scheme, color in the dark one.
COLORS: dict[str, tuple[str, str]] = {
    "page": ("#f6f7f9", "#14171c"),
    "card": ("#ffffff", "#1d2127"),
    "ink": ("#1c2128", "#e8eaed"),
    "faint": ("#5a6370", "#a3abb6"),
    "line": ("#dde1e6", "#353b44"),
    "shadow": ("#c3c9d1", "#050608"),
    "series-0": ("#0067a5", "#58b0f0"),
    "series-1": ("#c8500a", "#ff9a55"),
    "series-2": ("#00805c", "#35c79a"),
    "series-3": ("#a8478b", "#e58fc8"),
    "series-4": ("#8a6a00", "#e3bd3c"),
    "series-5": ("#4b5bc9", "#a3aef5"),
    "series-6": ("#7a4a2b", "#cfa183"),
    "series-7": ("#5a6370", "#a3abb6"),
    "good": ("#00714f", "#35c79a"),
    "warn": ("#8a5a00", "#e9b949"),
    "bad": ("#b3261e", "#ff8a80"),
}
NUM_SERIES = sum(name.startswith("series-") for name in COLORS)
#: Line styles, by which more series than colors are told apart.
_DASHES = ("-", "--", ":", "-.")
#: Methods that are often compared have a color each; others have one by their name.
_METHODS = ("FedAvg", "SCAFFOLD", "SheafRidge", "FedPer", "FedSheafHN", "FedOpt", "LocalAux", "Local")

_STAND_INS = {name: f"#0001{index:02x}" for index, name in enumerate(COLORS)}
_NAMES = {color: name for name, color in _STAND_INS.items()}


def stand_in(name: str) -> str:
    """The color to draw in, for a color of the page."""
    return _STAND_INS[name]


def series(index: int) -> str:
    """The color to draw a series in; they repeat after :data:`NUM_SERIES`, with another dash."""
    return _STAND_INS[f"series-{index % NUM_SERIES}"]


def dash(index: int) -> str:
    """The line style of a series."""
    return _DASHES[index // NUM_SERIES % len(_DASHES)]


def orders(labels: Sequence[str]) -> list[int]:
    """The series of each configuration, which follows from its method: the same in all pictures of all pages.

    Where two configurations would have the same, the later one has the next color and the next dash that are free.

    Example:
        >>> orders(["Local", "FedAvg"]), orders(["FedAvg, lr 0.1", "FedAvg, lr 0.2", "SCAFFOLD"])
        ([7, 0], [0, 9, 1])
    """
    number_of = NUM_SERIES * max(len(_DASHES), math.ceil(len(labels) / NUM_SERIES))
    methods = {label: label.partition(",")[0] for label in labels}
    first = {label: _METHODS.index(name) for label, name in methods.items() if name in _METHODS}
    taken: dict[int, str] = {}
    for label, order in first.items():
        taken.setdefault(order, label)
    for label in labels:
        if label in taken.values():
            continue
        order = first.get(label, crc32(methods[label].encode()) % number_of)
        places = ((order + step * count) % number_of for step in (NUM_SERIES + 1, 1) for count in range(number_of))
        order = next(place for place in places if place not in taken)
        taken[order] = label
    place = {label: order for order, label in taken.items()}
    return [place[label] for label in labels]


def variables(scheme: int) -> str:
    """The CSS declarations of the light (0) or the dark (1) scheme."""
    return " ".join(f"--{name}: {colors[scheme]};" for name, colors in COLORS.items())


def as_css(color: str) -> str:
    """A color as CSS: the page's variable for a stand-in, others as they are."""
    return f"var(--{_NAMES[color]})" if color in _NAMES else color


def contrast(first: str, second: str) -> float:
    """Contrast ratio of two colors ``#rrggbb``, 1 to 21 (WCAG 2.2).

    Example:
        >>> contrast("#ffffff", "#000000")
        21.0
    """
    light, dark = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(color: str) -> float:
    parts = [int(color[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    red, green, blue = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


#: What is taken out of Matplotlib's SVG, and what comes in its place.
_CLEANING = tuple(
    (re.compile(find, re.DOTALL), put)
    for find, put in (
        (r"^.*?(?=<svg)", ""),
        (r"<metadata>.*?</metadata>", ""),
        (r"<defs>\s*<style[^>]*>.*?</style>\s*</defs>", ""),  # its rule would hold for the whole page
        (r"<!--.*?-->", ""),
        (r"font-family:[^;\"]*;?\s*|font: (?=[\d.]+px)", ""),
        (r' transform="rotate\(-?0 [^"]*\)"', ""),
        (r"xlink:href=", "href="),
        (r"(?<=[\d.])(\s*\n\s*)(?=[A-Za-z])|(?<=[A-Za-z])\s*\n\s*(?=[\d-])", " "),
        (r">\s+<", "><"),
    )
)


def inline(svg: str, prefix: str, alt: str) -> str:
    """Matplotlib's SVG as a part of a page: the page's colors and font, no foreign names, ids of its own.

    Args:
        svg: With text as text (``svg.fonttype: none``).
        prefix: Unique within the page, for the ids.
        alt: What the picture shows, in words, free of markup.
    """
    for find, put in _CLEANING:
        svg = find.sub(put, svg)
    svg = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), svg)  # of coordinates, not of text
    referred = set(re.findall(r'(?:href="|url\()#([\w.-]+)', svg))
    svg = re.sub(r' id="([\w.-]+)"', lambda match: f' id="{prefix}-{match[1]}"' if match[1] in referred else "", svg)
    svg = re.sub(r'((?:href="|url\()#)(?=[\w.-])', rf"\1{prefix}-", svg)
    svg = re.sub(r"#0001[0-9a-f]{2}", lambda match: as_css(match[0]), svg)
    box = re.search(r'viewBox="([^"]*)"', svg)
    assert box is not None
    head = f'<svg viewBox="{box[1]}" role="img" aria-labelledby="{prefix}-alt"><title id="{prefix}-alt">{alt}</title>'
    return re.sub(r"<svg[^>]*>", lambda _: head, svg, count=1).strip()
