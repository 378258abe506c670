"""The settings of the run."""

from fl_lightning.report.document import Section
from fl_lightning.report.figures import Table
from fl_lightning.report.folder import Recorded
from fl_lightning.report.wording import setting


def section(run: Recorded) -> Section:
    """The section "Settings"."""
    flat = run.flat_settings
    if not flat:
        return Section(anchor="settings", title="Settings", empty="There is no config.yaml, and no settings were kept.")
    groups: dict[str, list[list[str]]] = {}
    for name, value in flat.items():
        group, _, rest = name.partition(".")
        groups.setdefault(group, []).append([rest or name, setting(value)])
    order = [name for name in ("strategy", "model", "data", "trainer") if name in groups]
    loose = [[name, rows[0][1]] for name, rows in groups.items() if name not in order and len(rows) == 1]
    many = [name for name, rows in groups.items() if name not in order and len(rows) > 1]
    folded = [Table(title=name, columns=["setting", "value"], rows=groups[name]) for name in [*order, *many]]
    if loose:
        folded.append(Table(title="others", columns=["setting", "value"], rows=loose))
    sources = run.result.get("config_sources") or []
    notes = [f"From {', '.join(sources)}." if sources else "", f"Saved as {run.result.get('config')}."]
    return Section(
        anchor="settings",
        title="Settings",
        folded=folded,
        notes=[note for note in notes if note and "None" not in note and note != "Saved as ."],
    )
