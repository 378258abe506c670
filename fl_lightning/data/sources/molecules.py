"""Sets of molecules in tables with SMILES: a file of your own, AqSolDB and Tox21."""

import csv
import gzip
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fl_lightning.data.columns import Column
from fl_lightning.data.graph_sets import TRAITS, LoadedGraphs
from fl_lightning.data.settings import check_flag, check_text, is_file
from fl_lightning.data.sources.array_file import missing_files_message, reading
from fl_lightning.data.sources.graph_sets import GraphSetSource
from fl_lightning.data.sources.smiles import graphs_of, molecules_of

Kind = Literal["classes", "labels", "numbers"]


class MoleculeSource(GraphSetSource):
    """Molecules of a table (``.csv``, also ``.csv.gz``) with a column of SMILES and one or several of targets.

    Atoms have OGB's features, one-hot (174 of them); RDKit reads the SMILES, which needs the extra ``molecules``. What
    it cannot read, and molecules without any target, are left out with a warning. What is converted is cached.
    Partitioners and splitters know the ``scaffold`` of each molecule (``GroupSplit``).

    Args:
        path: The table; a relative path starts at the folder of the data sets.
        smiles: The column with the SMILES.
        targets: The columns with the targets, empty where missing; None for all columns that are named nowhere else.
        kind: ``classes`` (whole numbers in one column), ``labels`` (0 or 1) or ``numbers``; None: what they look like.
        names: The column with the molecules' names, for the file of predictions; None for their SMILES.
        columns: More columns, by which clients can be made (``GivenPartitioner``, ``SortedPartitioner``).
        clients: One of the columns whose values are the clients, so that no partitioner is needed; None for none.
        bonds: Whether edges have OGB's features of bonds, one-hot (13), as ``edge_attr``, for nets that read them.
    """

    def __init__(
        self,
        path: str,
        smiles: str = "smiles",
        targets: list[str] | None = None,
        kind: Kind | None = None,
        names: str | None = None,
        columns: list[str] | None = None,
        clients: str | None = None,
        bonds: bool = False,
    ) -> None:
        super().__init__()
        check_text("path", path, "molecules/delaney.csv")
        check_text("smiles", smiles, "smiles")
        check_flag("bonds", bonds)
        listed: dict[str, Any] = {"targets": targets, "columns": columns}
        for setting, value in listed.items():
            if value is not None and (isinstance(value, str) or not value or len(set(value)) < len(value)):
                raise ValueError(
                    f"{setting} is {value!r}: give a list of different columns of the table, or leave it out"
                )
        self.files: tuple[str, ...] = (path,)
        self.smiles, self.kind = smiles, kind
        self.target_columns, self.name_column = targets, names
        self.columns = list(dict.fromkeys([*(columns or ()), *([clients] if clients is not None else [])]))
        if taken := sorted({*self.columns} & {*TRAITS, "y", "num_nodes", "examples"}):
            raise ValueError(f"columns has {taken[0]!r}, which graphs have already: rename that column of the table")
        self.clients_by = clients
        self.bonds = bonds
        self._found_targets: list[str] = []  # in the table that was read

    def __str__(self) -> str:
        """With the file."""
        return f"{type(self).__name__}({self.files[0]!r})"

    def given(self) -> dict[str, Any]:
        """Settings that are stored under other names."""
        columns = {"targets": self.target_columns, "names": self.name_column, "clients": self.clients_by}
        return {"path": self.files[0], **columns}

    def identity(self) -> dict[str, Any]:  # noqa: D102
        names = ("smiles", "kind", "target_columns", "columns", "clients_by", "bonds")
        return {**super().identity(), **{name: getattr(self, name) for name in names}}

    def load(self, root: Path, cache_dir: Path | None = None) -> LoadedGraphs:  # noqa: D102
        table = self.table(root)
        smiles = self._column(table, self.smiles)
        named_elsewhere = {self.smiles, self.name_column, *self.columns}
        targets = self.target_columns or [name for name in table if name not in named_elsewhere]
        if not targets:
            raise ValueError(f"{self}: no column is left for targets: name them by targets")
        self._found_targets = targets
        y = torch.stack([self._numbers(name, self._column(table, name)) for name in targets], dim=1)
        molecules = molecules_of(smiles, cache_dir)
        known_M = ~y.isnan().all(dim=1)
        readable_M = molecules.num_atoms > 0
        self._say(smiles, known_M, readable_M)
        kept = (known_M & readable_M).nonzero().flatten().tolist()
        graphs = molecules.graphs(bonds=self.bonds)
        for row in kept:
            graphs[row].y = y[row]
        columns = {"scaffold": molecules.scaffolds, **{name: self._column(table, name) for name in self.columns}}
        if nobody := [row for row in kept if self.clients_by is not None and not columns[self.clients_by][row]]:
            raise ValueError(
                f"{self}: column {self.clients_by!r}, whose values are the clients, is empty in row {nobody[0]}: say "
                "there whose molecule it is, or leave the row out"
            )
        names = self._column(table, self.name_column or self.smiles)
        return LoadedGraphs(
            graphs=[graphs[row] for row in kept],
            columns={name: self._typed(name, [texts[row] for row in kept]) for name, texts in columns.items()},
            names=tuple(names[row] for row in kept),
            kind=self.kind,
            class_names=tuple(targets) if len(targets) > 1 and self.kind != "numbers" else None,
        )

    def table(self, root: Path) -> dict[str, list[str]]:
        """The columns of the file by name.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: It is no table, or empty.
        """
        paths = [root / Path(file).expanduser() for file in self.files]
        path = next(filter(is_file, paths), None)
        if path is None:
            raise FileNotFoundError(missing_files_message(root, self.files, "a table with SMILES and targets"))
        return table_in(path, self.smiles)

    def new_graphs(self, given: Path | Sequence[str]) -> LoadedGraphs:
        """Molecules by their SMILES, or of a table that has some of the columns of this one; others are not read."""
        table = table_in(given, self.smiles) if isinstance(given, Path) else {self.smiles: list(given)}
        smiles = self._column(table, self.smiles)
        targets = self._found_targets
        graphs = graphs_of(smiles, bonds=self.bonds)
        if any(name in table for name in targets):
            nothing = [""] * len(smiles)
            y = torch.stack([self._numbers(name, table.get(name, nothing)) for name in targets], dim=1)
            for graph, y_H in zip(graphs, y, strict=True):
                graph.y = None if bool(y_H.isnan().all()) else y_H
        names = table.get(self.name_column or self.smiles, smiles)
        return LoadedGraphs(graphs=graphs, names=tuple(names))

    def _column(self, table: dict[str, list[str]], name: str) -> list[str]:
        if name not in table:
            raise ValueError(f"{self}: the table has no column {name!r}; it has {', '.join(table)}")
        return table[name]

    def _typed(self, name: str, texts: list[str]) -> Column:
        """A column as numbers if all of its entries are, but for the one that names the clients."""
        if name == self.clients_by:
            return texts
        try:
            numbers = [float(text) for text in texts]
        except ValueError:
            return texts
        if all(number.is_integer() and abs(number) < 2**53 for number in numbers):
            return list(map(int, numbers))  # by which clients can be made
        return numbers

    def _numbers(self, name: str, texts: Sequence[str]) -> Tensor:
        """A column of targets, nan where it is empty."""
        for row, text in enumerate(texts):
            try:
                number = float(text.replace("_", "no digits") or "nan")  # Python reads 1_000 as 1000
                if abs(number) > torch.finfo(torch.float32).max:
                    raise ValueError("it is too large")
            except ValueError:
                raise ValueError(
                    f"{self}: column {name!r} has {text!r} in row {row}, which is no finite number: correct it, or "
                    "name the columns of targets by targets"
                ) from None
        return torch.tensor([float(text or "nan") for text in texts])

    def _say(self, smiles: Sequence[str], known_M: Tensor, readable_M: Tensor) -> None:
        """Warn of what is left out."""
        for sound_M, why in ((readable_M, "which RDKit cannot read"), (known_M, "which have no target")):
            if not bool(sound_M.all()):
                row = int((~sound_M).nonzero()[0])
                warnings.warn(
                    f"{self}: {int((~sound_M).sum()):,} of {len(smiles):,} molecules are left out, {why}; the first is "
                    f"row {row}, {smiles[row]!r}",
                    stacklevel=2,
                )


class AqSolDB(MoleculeSource):
    """Solubility in water of 9,982 molecules (log mol/l), as nine laboratories collected it: each is a client.

    File: ``aqsoldb/curated-solubility-dataset.csv.gz`` (or ``.csv``). The first letter of a molecule's ``ID`` is its
    laboratory's; ``MolWt`` and ``Group`` are columns that clients can be made by as well. Needs the extra
    ``molecules``.

    Args:
        bonds: Whether edges have OGB's features of bonds, one-hot (13), as ``edge_attr``, for nets that read them.

    Source: Sorkun, Khetan, Er, "AqSolDB, a curated reference set of aqueous solubility and 2D descriptors for a diverse
    set of compounds", Scientific Data, 2019.
    """

    def __init__(self, bonds: bool = False) -> None:
        path = "aqsoldb/curated-solubility-dataset.csv"
        columns = ["MolWt", "Group"]
        super().__init__(path, "SMILES", ["Solubility"], "numbers", "ID", columns, clients="laboratory", bonds=bonds)
        self.files = (f"{path}.gz", path)

    def __str__(self) -> str:
        """The name of the set."""
        return "AqSolDB"

    def table(self, root: Path) -> dict[str, list[str]]:
        """The columns, with the laboratories."""
        table = super().table(root)
        return {**table, "laboratory": [name[:1] for name in self._column(table, "ID")]}


class Tox21(MoleculeSource):
    """Whether 7,831 molecules are toxic in twelve assays: labels with gaps, or the classes of one assay.

    File: ``molecules/tox21.csv`` with the columns ``smiles`` and one of each assay. Needs the extra ``molecules``. For
    a client of each assay, give ``ManyGraphSets`` a source of each, with ``own_outputs: true``; a molecule is then in
    several clients, where it may have other roles.

    Args:
        assays: Which assays; None for all. A single one makes a task of two classes.
        bonds: Whether edges have OGB's features of bonds, one-hot (13), as ``edge_attr``, for nets that read them.

    Source: Wu et al., "MoleculeNet: a benchmark for molecular machine learning", Chemical Science, 2018.
    """

    names = (
        "NR-AR",
        "NR-AR-LBD",
        "NR-AhR",
        "NR-Aromatase",
        "NR-ER",
        "NR-ER-LBD",
        "NR-PPAR-gamma",
        "SR-ARE",
        "SR-ATAD5",
        "SR-HSE",
        "SR-MMP",
        "SR-p53",
    )

    def __init__(self, assays: list[str] | None = None, bonds: bool = False) -> None:
        chosen: Any = list(self.names) if assays is None else assays
        if isinstance(chosen, str) or not chosen or (unknown := sorted(set(chosen) - set(self.names))):
            wrong = repr(chosen) if isinstance(chosen, str) or not chosen else repr(unknown[0])
            raise ValueError(f"assays has {wrong}, which is not one of {', '.join(self.names)}")
        kind: Kind = "labels" if len(chosen) > 1 else "classes"
        super().__init__("molecules/tox21.csv", "smiles", chosen, kind, bonds=bonds)

    def given(self) -> dict[str, Any]:
        """Settings that are stored under other names."""
        return {"assays": self.target_columns}

    def __str__(self) -> str:
        """The name of the set, with the assay if there is one."""
        assays = self.target_columns or []
        return f"Tox21 {assays[0]}" if len(assays) == 1 else "Tox21"


def table_in(path: Path, smiles: str) -> dict[str, list[str]]:
    """The columns of a file by name.

    Args:
        path: The file, ``.csv`` or ``.csv.gz``.
        smiles: The column with the SMILES, for messages.

    Raises:
        ValueError: It is no table, or empty.
    """
    with reading(path, f"a table with a header and a column {smiles!r} of SMILES"):
        opened: Any = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
            header, *rows = csv.reader(file)
        for number, row in enumerate(rows, start=2):
            if len(row) != len(header):
                raise ValueError(f"line {number} has {len(row)} entries for {len(header)} columns")
        if not rows:
            raise ValueError("it has no rows")
        if twice := [name for name in header if header.count(name) > 1]:
            raise ValueError(f"it has several columns named {twice[0]!r}")
    return {name: [row[place].strip() for row in rows] for place, name in enumerate(header)}
