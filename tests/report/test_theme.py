import re

import numpy as np
import pytest

from fl_lightning.report.figures import Curve
from fl_lightning.report.pictures import Album
from fl_lightning.report.theme import COLORS, NUM_SERIES, contrast, orders, series, stand_in


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_and_series_can_be_reported_from_the_page(scheme: int) -> None:
    for ground in ("page", "card"):
        for name in ("ink", "faint", "good", "warn", "bad", "series-0"):
            assert contrast(COLORS[name][scheme], COLORS[ground][scheme]) >= 4.5, (name, ground)
        for index in range(NUM_SERIES):
            assert contrast(COLORS[f"series-{index}"][scheme], COLORS[ground][scheme]) >= 3, index


def test_stand_ins_differ() -> None:
    assert len({stand_in(name) for name in COLORS}) == len(COLORS)
    assert series(0) == series(NUM_SERIES) == stand_in("series-0")


def test_a_method_has_one_color_whatever_it_is_compared_with() -> None:
    assert orders(["FedAvg", "Local"]) == orders(["Local", "FedAvg"])[::-1]
    many = [f"method {index}" for index in range(50)]
    assert len(set(orders(many))) == 50
    mine, theirs = orders(["My method", "FedPer"]), orders(["FedPer", "Another", "My method"])
    assert mine == [theirs[2], theirs[0]]


def test_a_picture_takes_on_the_page() -> None:
    album = Album()
    x = np.arange(4.0)
    curves = [Curve(label="one", x=x, y=0.002 * x), Curve(label="two", x=x, y=-0.001 * x)]
    first, second = (
        album.curves(curves, title="A < B", x_label="round", y_label="acc", mark=(2.0, "chosen")) for _ in range(2)
    )
    ids = [set(re.findall(r' id="([^"]+)"', picture.svg)) for picture in (first, second)]
    assert ids[0]
    assert not ids[0] & ids[1]
    assert "#0001" not in first.svg
    assert "var(--series-0)" in first.svg
    assert "font-family" not in first.svg
    assert "http" not in first.svg
    assert "A &lt; B" in first.svg
    assert ">0.004<" in first.svg, "numbers keep their digits"
    assert "one from 0 to 0.006;" in first.svg
    assert [key.label for key in first.keys] == ["one", "two", "chosen"]


def test_the_mark_looks_like_no_curve() -> None:
    """The broken gray line of a reference was that of the best round, too."""
    x = np.arange(4.0)
    curves = [Curve(label=str(order), x=x, y=x, order=order) for order in range(4 * NUM_SERIES)]
    keys = Album().curves(curves, title="T", x_label="round", y_label="acc", mark=(2.0, "best round 2")).keys
    looks = [(COLORS[key.color.removeprefix("var(--").rstrip(")")], key.dash) for key in keys]
    assert len(set(looks)) == len(keys) == len(curves) + 1


def test_pictures_of_nothing_and_of_one_value() -> None:
    album = Album()
    nan = np.full(3, np.nan)
    empty = album.curves([Curve(label="one", x=np.arange(3.0), y=nan)], title="T", x_label="round", y_label="acc")
    assert "nothing is known" in empty.svg
    heat = album.heat(np.full((2, 2), np.nan), ["a", "b"], title="T", x_label="j", y_label="i", limits=(0.0, 1.0))
    assert "data:image/png" in heat.svg
    bars = album.bars(["only"], np.array([0.5]), title="T", x_label="acc")
    assert "from 0.5000 to 0.5000" in bars.svg
    lone = album.network(np.zeros((1, 1)), ["only"], title="T")
    assert "1 client, 0 edges" in lone.svg
