"""Sets of molecules of the Open Graph Benchmark.

Source: Hu et al., "Open Graph Benchmark: Datasets for Machine Learning on Graphs", NeurIPS 2020.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fl_lightning.data.graph_sets import LoadedGraphs
from fl_lightning.data.settings import check_flag
from fl_lightning.data.sources.array_file import reading
from fl_lightning.data.sources.converted import open_dataset
from fl_lightning.data.sources.graph_sets import GraphSetSource
from fl_lightning.data.sources.molecules import table_in
from fl_lightning.data.sources.ogb import (
    check_classes,
    download,
    no_version_check,
    official_split,
    released_folder,
    table,
    tamed_reader,
)
from fl_lightning.data.sources.ogb_links import allow_pickled_arrays
from fl_lightning.data.sources.smiles import Molecules, graphs_of
from fl_lightning.data.split import GivenSplit, Role, Splitter

#: The sets whose targets are numbers.
_OF_NUMBERS = ("ogbg-molesol", "ogbg-molfreesolv", "ogbg-mollipo")


class OgbGraphSource(GraphSetSource):
    """A set of molecules of OGB with its official split by scaffolds, which is the splitter unless another is given.

    Atoms have OGB's features, one-hot (174), so that the largest sets (``ogbg-molpcba``, ``ogbg-molchembl``) need some
    gigabytes. A single task that is a classification has classes, several have labels with gaps.

    Args:
        name: For example ``ogbg-molhiv`` or ``ogbg-moltox21``.
        bonds: Whether edges have OGB's features of bonds, one-hot (13), as ``edge_attr``, for nets that read them.

    Raises:
        ValueError: It is no such set.
    """

    names = (
        "ogbg-molbace",
        "ogbg-molbbbp",
        "ogbg-molchembl",
        "ogbg-molclintox",
        "ogbg-molesol",
        "ogbg-molfreesolv",
        "ogbg-molhiv",
        "ogbg-mollipo",
        "ogbg-molmuv",
        "ogbg-molpcba",
        "ogbg-molsider",
        "ogbg-moltox21",
        "ogbg-moltoxcast",
    )

    def __init__(self, name: str = "ogbg-molhiv", bonds: bool = False) -> None:
        super().__init__()
        if name not in self.names:
            raise ValueError(
                f"OgbGraphSource.name is {name!r}, no set of molecules: give one of {', '.join(self.names)}"
            )
        check_flag("bonds", bonds)
        self.name, self.bonds = name, bonds

    def __str__(self) -> str:
        """The name of the set."""
        return self.name

    @property
    def default_splitter(self) -> Splitter:
        """OGB's split."""
        return GivenSplit()

    def identity(self) -> dict[str, Any]:  # noqa: D102
        return {**super().identity(), "name": self.name, "bonds": self.bonds}

    def new_graphs(self, given: Path | Sequence[str]) -> LoadedGraphs:
        """Molecules by their SMILES, or of a table with a column ``smiles``."""
        if isinstance(given, Path):
            table = table_in(given, "smiles")
            if "smiles" not in table:
                raise ValueError(f"{given} has no column 'smiles'; it has {', '.join(table)}")
            given = table["smiles"]
        return LoadedGraphs(graphs=graphs_of(given, bonds=self.bonds), names=tuple(given))

    def load(self, root: Path, cache_dir: Path | None = None) -> LoadedGraphs:  # noqa: D102
        folder = released_folder(root, self.name)
        with no_version_check():
            from ogb.graphproppred import PygGraphPropPredDataset
        with tamed_reader():
            arguments = {"name": self.name, "root": str(root)}
            dataset = open_dataset(
                PygGraphPropPredDataset, arguments, root, cache_dir, download, check_raw=self._check_raw
            )
            with allow_pickled_arrays():
                part_M = official_split(dataset, len(dataset))
        stored, slices = dataset._data, dataset.slices
        with reading(folder / "raw", "OGB's molecules"):
            molecules = Molecules(
                atom=stored.x,
                bond=stored.edge_attr,
                edge=stored.edge_index,
                num_atoms=slices["x"].diff(),
                num_bonds=slices["edge_index"].diff(),
            )
            molecules.check()
            graphs = molecules.graphs(bonds=self.bonds)
            for graph, y in zip(graphs, stored.y, strict=True):
                graph.y = y
        role_M = torch.zeros(len(graphs), dtype=torch.int8)
        for number, role in enumerate((Role.TRAIN, Role.VAL, Role.TEST)):
            role_M[part_M == number] = role
        is_number = "classification" not in dataset.task_type
        kind = "numbers" if is_number else "classes" if dataset.num_tasks == 1 else "labels"
        return LoadedGraphs(graphs=graphs, kind=kind, roles=role_M)

    def _check_raw(self, path: Path) -> None:
        """Refuse labels and counts that do not fit, of which OGB's reader would cut or ignore some."""
        if path.name != "edge.csv.gz":  # the list of what is checked lacks the others
            return
        names = ("graph-label", "num-node-list", "num-edge-list")
        label, *counts = (table(path.with_name(f"{name}.csv.gz")) for name in names)
        lengths = [len(label), *map(len, counts)]
        if len(set(lengths)) > 1:
            raise ValueError(f"{', '.join(names)} have {lengths} rows, not one for each graph")
        if self.name not in _OF_NUMBERS:
            check_classes(path.with_name("graph-label.csv.gz"), label)
