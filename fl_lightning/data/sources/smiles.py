"""Molecules as graphs: atoms and bonds with the features of the Open Graph Benchmark, made from SMILES by RDKit.

Hu et al., "Open Graph Benchmark: Datasets for Machine Learning on Graphs", NeurIPS 2020. OGB numbers the categories of
nine properties of an atom (element, chirality, degree, charge, hydrogens, radical electrons, hybridization, aromatic,
in a ring) and three of a bond (type, stereo, conjugated). Here each is one-hot, one after another, so that a linear
layer on them is OGB's encoder, which adds up an embedding of each property.

Shape legend: M molecules, N atoms and E directed bonds of all of them.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data

from fl_lightning.data.cached import load, save
from fl_lightning.data.sources.folders import cache_folder
from fl_lightning.data.sources.ogb import no_version_check
from fl_lightning.extras import require

_FORMAT = 2
_FIELDS = ("atom", "bond", "edge", "num_atoms", "num_bonds", "scaffolds")


#: What stands for the scaffold of molecules without rings.
ACYCLIC = "acyclic"


@dataclass(frozen=True, kw_only=True)
class Molecules:
    """Molecules, one after another.

    Attributes:
        atom: OGB's numbers of the properties of atoms, int16 (N, 9).
        bond: Those of bonds, int16 (E, 3).
        edge: Atoms that each bond joins, numbered within their molecule, int32 (2, E); both directions.
        num_atoms: int64 (M,); 0 where RDKit cannot read the SMILES.
        num_bonds: Directed bonds, int64 (M,).
        scaffolds: The SMILES of each molecule's Bemis-Murcko scaffold, its rings and what links them, without
            chirality; :data:`ACYCLIC` where there are no rings. Empty where they are not known.
    """

    atom: Tensor
    bond: Tensor
    edge: Tensor
    num_atoms: Tensor
    num_bonds: Tensor
    scaffolds: Sequence[str] = ()

    def check(self) -> None:
        """Refuse what are no molecules, such as those of a damaged file.

        Raises:
            ValueError: A tensor has another type or shape, or a number is out of range; names which.
        """
        counts = {"num_atoms": self.num_atoms, "num_bonds": self.num_bonds}
        tables = {"atom": (self.atom, _dims()[0]), "bond": (self.bond, _dims()[1])}
        for name, tensor in {**counts, "atom": self.atom, "bond": self.bond, "edge": self.edge}.items():
            if not isinstance(tensor, Tensor) or tensor.dtype not in (torch.int16, torch.int32, torch.int64):
                raise ValueError(f"{name} holds {getattr(tensor, 'dtype', type(tensor).__name__)}, no whole numbers")
            if tensor.dim() != (1 if name in counts else 2):
                raise ValueError(f"{name} is of shape {tuple(tensor.shape)}")
        for name, (number, dims) in tables.items():
            if number.shape[1] != len(dims):
                raise ValueError(f"{name} has {number.shape[1]} properties of each, not {len(dims)}")
            if bool((outside := (number < 0) | (number >= torch.tensor(dims))).any()):
                row, place = outside.nonzero()[0].tolist()
                raise ValueError(f"property {place} of {name} {row} is {int(number[row, place])}, of {dims[place]}")
        sizes = [int(count.sum()) if bool((count >= 0).all()) else -1 for count in counts.values()]
        if sizes != [len(self.atom), len(self.bond)] or self.edge.shape != (2, len(self.bond)):
            raise ValueError(
                f"there are {len(self.atom)} atoms, {len(self.bond)} bonds and edges {tuple(self.edge.shape)} where "
                f"the molecules have {sizes[0]} and {sizes[1]}"
            )
        if len(self.num_atoms) != len(self.num_bonds) or len(self.scaffolds) not in (0, len(self.num_atoms)):
            raise ValueError("the numbers of molecules differ")
        size_E = self.num_atoms.repeat_interleave(self.num_bonds)
        if bool((outside := (self.edge < 0) | (self.edge >= size_E)).any()):
            raise ValueError(f"bond {int(outside.any(dim=0).nonzero()[0])} leads out of its molecule")

    def graphs(self, *, bonds: bool) -> list[Data]:
        """A graph of each molecule, of those that cannot be read without nodes.

        Args:
            bonds: Whether edges have the features of bonds as ``edge_attr``.
        """
        atom_dims, bond_dims = _dims()
        atoms = torch.split(one_hot(self.atom, atom_dims), self.num_atoms.tolist())
        edges = torch.split(self.edge.long(), self.num_bonds.tolist(), dim=1)
        if not bonds:
            return [Data(x=x, edge_index=edge, num_nodes=len(x)) for x, edge in zip(atoms, edges, strict=True)]
        attrs = torch.split(one_hot(self.bond, bond_dims), self.num_bonds.tolist())
        parts = zip(atoms, edges, attrs, strict=True)
        return [Data(x=x, edge_index=edge, edge_attr=attr, num_nodes=len(x)) for x, edge, attr in parts]


def one_hot(number: Tensor, dims: Sequence[int]) -> Tensor:
    """Numbers of categories (N, P) as one-hot codes one after another, float32 (N, sum of dims).

    Example:
        >>> one_hot(torch.tensor([[1, 0]]), (2, 3)).tolist()
        [[0.0, 1.0, 1.0, 0.0, 0.0]]
    """
    return torch.cat([F.one_hot(number[:, place].long(), dim) for place, dim in enumerate(dims)], dim=1).float()


def graphs_of(smiles: Sequence[str], *, bonds: bool) -> list[Data]:
    """A graph of each molecule.

    Raises:
        MissingExtra: RDKit is not installed.
        ValueError: RDKit cannot read a SMILES.
    """
    result = molecules_of(smiles)
    if len(unreadable := (result.num_atoms == 0).nonzero().flatten().tolist()):
        raise ValueError(
            f"RDKit cannot read {len(unreadable):,} of {len(smiles):,} SMILES, the first is {smiles[unreadable[0]]!r} "
            f"in row {unreadable[0]}: correct them, or leave them out"
        )
    return result.graphs(bonds=bonds)


def molecules_of(smiles: Sequence[str], cache_dir: Path | None = None) -> Molecules:
    """Convert SMILES, or read what an earlier call has converted.

    Args:
        smiles: One for each molecule.
        cache_dir: None for the default cache folder.

    Raises:
        MissingExtra: RDKit is not installed.
    """
    require("molecules", "A source of molecules")
    key = {"smiles": list(smiles), "format": _FORMAT, "versions": {name: version(name) for name in ("ogb", "rdkit")}}
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    path = cache_folder(cache_dir) / "molecules" / f"{digest}.pt"
    if (known := load(path, "The cached file of molecules", lambda state: _checked(state, len(smiles)))) is not None:
        return known
    result = _convert(smiles)
    save(path, {name: getattr(result, name) for name in _FIELDS})
    return result


def _checked(state: dict[str, Any], count: int) -> Molecules:
    """The molecules in a cached file, if there are as many."""
    result = Molecules(**{name: state[name] for name in _FIELDS})
    result.check()
    if {len(result.num_atoms), len(result.scaffolds)} != {count}:
        raise ValueError(f"it holds {len(result.num_atoms)} molecules, not {count}")
    if not all(isinstance(scaffold, str) for scaffold in result.scaffolds):
        raise ValueError("a scaffold is no text")
    return result


def _convert(smiles: Sequence[str]) -> Molecules:
    from rdkit.rdBase import BlockLogs

    atoms: list[list[int]] = []
    bonds: list[list[int]] = []
    pairs: list[tuple[int, int]] = []
    counts: list[tuple[int, int]] = []
    scaffolds: list[str] = []
    _silence = BlockLogs()  # RDKit's messages about what it cannot read, of which the caller tells
    for text in smiles:
        own_atoms, own_bonds, own_pairs, scaffold = _molecule(text)
        atoms += own_atoms
        bonds += own_bonds
        pairs += own_pairs
        counts.append((len(own_atoms), len(own_pairs)))
        scaffolds.append(scaffold)
    num_atoms, num_bonds = torch.tensor(counts, dtype=torch.int64).view(-1, 2).unbind(dim=1)
    return Molecules(
        atom=torch.tensor(atoms, dtype=torch.int16).view(-1, 9),
        bond=torch.tensor(bonds, dtype=torch.int16).view(-1, 3),
        edge=torch.tensor(pairs, dtype=torch.int32).view(-1, 2).t().contiguous(),
        num_atoms=num_atoms.contiguous(),
        num_bonds=num_bonds.contiguous(),
        scaffolds=scaffolds,
    )


def _molecule(text: str) -> tuple[list[list[int]], list[list[int]], list[tuple[int, int]], str]:
    """Properties of atoms and of bonds, what these join, and the scaffold; nothing of what cannot be read."""
    from rdkit import Chem
    from rdkit.Chem.Scaffolds.MurckoScaffold import MurckoScaffoldSmiles

    with no_version_check():
        from ogb.utils.features import atom_to_feature_vector, bond_to_feature_vector
    molecule: Any = Chem.MolFromSmiles(text)
    if molecule is None:
        return [], [], [], ""
    atoms = [atom_to_feature_vector(atom) for atom in molecule.GetAtoms()]
    bonds, pairs = [], []
    for bond in molecule.GetBonds():
        start, end = bond.GetBeginAtomIdx(), bond.GetEndAtomIdx()
        pairs += [(start, end), (end, start)]
        bonds += [bond_to_feature_vector(bond)] * 2
    scaffold_of: Any = MurckoScaffoldSmiles
    return atoms, bonds, pairs, scaffold_of(mol=molecule, includeChirality=False) or ACYCLIC


def _dims() -> tuple[list[int], list[int]]:
    """The numbers of categories of the properties of atoms and of bonds."""
    with no_version_check():
        from ogb.utils.features import get_atom_feature_dims, get_bond_feature_dims
    return get_atom_feature_dims(), get_bond_feature_dims()
