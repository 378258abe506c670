"""A few of the clients' graphs, where these are the examples."""

from itertools import groupby

from fl_lightning.report.document import Section
from fl_lightning.report.folder import Recorded
from fl_lightning.report.pictures import Album


def section(run: Recorded, album: Album) -> Section | None:
    """The section "Example graphs"; None where there are none to be drawn."""
    record = run.record
    if record is None or not (record.graphs or record.left_out("drawn")):
        return None
    pictures = [
        album.graphs(list(of_client), title=record.names[client])
        for client, of_client in groupby(record.graphs, key=lambda graph: graph.client)
    ]
    return Section(
        anchor="graphs",
        title="Example graphs",
        text="A few graphs of some clients, chosen at random, with their targets. A client's nodes of one color are of "
        "one kind, the first of their features that is largest; blue is the most frequent.",
        pictures=pictures,
        notes=record.left_out("drawn"),
    )
