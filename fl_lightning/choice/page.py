"""The page of an answer: the sentence, one picture of the finalists between Local and Pooled, and the numbers."""

import numpy as np

from fl_lightning.choice.answer import Answer
from fl_lightning.choice.candidates import CEILING, FLOOR
from fl_lightning.counts import count
from fl_lightning.report.axes import draw_rows, new_axes
from fl_lightning.report.document import Document, Fact, Section
from fl_lightning.report.drawing import in_lines
from fl_lightning.report.figures import Key, Picture, Table
from fl_lightning.report.pictures import Album
from fl_lightning.report.theme import as_css, series, stand_in
from fl_lightning.report.wording import duration, number, size


class _Finalists(Album):
    """The one picture."""

    def between(self, answer: Answer) -> Picture:
        """A dot and an interval for each finalist, between lines at Local and at Pooled."""
        names = [each.method for each in answer.standings]
        tests = [answer.test_of(each) for each in answer.standings]
        middle = np.array([test.mean for test in tests])
        low = np.array([test.mean if test.low != test.low else test.low for test in tests])
        high = np.array([test.mean if test.high != test.high else test.high for test in tests])
        keys = []
        with self._drawing():
            beside, height, left = in_lines(names)
            figure, axes = new_axes(height, left=left)
            place = np.arange(len(names), dtype=np.float64)
            for name, color, dash in ((FLOOR, "faint", "--"), (CEILING, "good", ":")):
                if name in names and np.isfinite(middle[names.index(name)]):
                    axes.axvline(middle[names.index(name)], color=stand_in(color), lw=1.2, ls=dash)
                    keys.append(Key(label=name, color=as_css(stand_in(color)), dash=dash))
            axes.hlines(place, low, high)
            axes.collections[0].set(color=series(0), lw=2.4)
            axes.plot(middle, place, "o", ms=6, color=series(0))
            taken = names.index(answer.method)
            axes.plot(middle[taken], taken, "o", ms=9, mec=series(1), mfc=series(1))
            keys.append(Key(label=f"{answer.method} is taken", color=as_css(series(1))))
            draw_rows(axes, beside, answer.metric)
            summary = "; ".join(
                f"{name} {number(test.mean)}, {number(test.low)} to {number(test.high)}"
                for name, test in zip(names, tests, strict=True)
            )
            svg = self._finish(figure, f"Finalists, {answer.metric}: {summary}.")
        note = "Means over seeds that took no part in the search, with 95 % intervals (Student's t). "
        note += "The intervals of two methods may overlap although the paired difference is clear."
        if not answer.found.has_new_seeds:
            note = "Validation of the seed of the search: none was trained with a new one."
        return Picture(title="Between training alone and training on all data", svg=svg, note=note, keys=keys)


def document(answer: Answer) -> Document:
    """The page."""
    found, row = answer.found, answer.results.set_index("method").loc[answer.method]
    seeds = int(row["seeds"])
    facts = [
        Fact(name="take", value=answer.method, more=str(row["setting"]) or "its defaults"),
        Fact(name=answer.metric, value=number(row[answer.metric]), more=f"mean over {count(seeds, 'seed')}"),
        Fact(name="worst client", value=number(row["worst_client"]), more="mean over seeds"),
        Fact(name="communication", value=size(row["bytes"]), more=f"in {count(found.num_rounds, 'round')}"),
        Fact(name="time", value=duration(row["seconds"]), more="of a run"),
    ]
    dropped = [[str(each.arm), str(each.rounds), number(each.value), each.why] for each in found.dropped]
    left_out = [[name, "0", "–", why] for name, why in found.left_out.items()]
    table = Table(title="Dropped", columns=["method", "after rounds", "validation", "why"], rows=[*left_out, *dropped])
    sections = [
        Section(anchor="finalists", title="Finalists", pictures=[_Finalists().between(answer)], tables=[answer.table]),
        Section(
            anchor="dropped",
            title="What was dropped, and when",
            text="Settings were compared by their validation metric, on a seed that is not reported.",
            tables=[table] if table.rows else [],
            empty="" if table.rows else "Nothing was.",
        ),
    ]
    return Document(
        title="Which method for these data",
        subtitle=answer.sentence,
        alerts=answer.notes,
        facts=facts,
        sections=sections,
        footer=[
            f"The search took {found.took}.",
            f"Train it with: {answer.command} --config {answer.config}",
        ],
    )
