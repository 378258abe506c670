"""What a method says about itself: the metrics ``server/...`` and the matrices over the clients, in words.

Each entry says what is measured and what good values look like; the names are shell-style patterns, of which the first
that fits counts. A metric of a method of your own needs no entry: it is shown by its name.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TypeVar

Entry = TypeVar("Entry")

#: Words for a metric ``server/...``, and a sentence or two on it.
METRICS: Mapping[str, tuple[str, str]] = {
    "update_norm": (
        "Length of the updates",
        "Mean norm of what the clients changed. Good: falls and levels off; growth without end means divergence.",
    ),
    "spread": (
        "Spread of the generated models",
        "0: every client is given the same model, and nothing is personal; 1: as far apart as the trained ones. "
        "Good: well above 0.",
    ),
    "captured_share": (
        "Share of the updates that the generator captures",
        "Good: near 1; 0 means that generated models are as far from the trained ones as before the update, and "
        "negative values that they are farther.",
    ),
    "explained": (
        "Variance of the trained models that the generator explains",
        "Good: near 1; 0 is what the same mean model for all would explain.",
    ),
    "transfer": (
        "Transfer between similar clients",
        "Whether clients with similar embeddings predict each other's updates. Good: near 1; 0 is no better than the "
        "mean of all clients, and negative values mislead.",
    ),
    "generator_active_units": ("Active units of the generator", "Share of units that are not dead. Good: far from 0."),
    "generator_attention_entropy": (
        "Entropy of the attention",
        "1: uniform, so that attention chooses nothing. Good: below 1, and not at 0, where each client sees one other.",
    ),
    "generator_input_spread": (
        "Spread of the client embeddings",
        "Distance from their mean as a share of their norm. Good: above 0; at 0 all clients look alike.",
    ),
    "generator_ridge": (
        "Ridge of the closed form",
        "λ of the fit. Good: levels off; very large values fit nothing but the mean.",
    ),
    "strength/*": (
        "Strength of the personalization",
        "How far from the mean this tensor is generated. 0: the same for all. Good: between 0 and 1, as validation "
        "has it.",
    ),
    "strength_factor": (
        "Factor on the strengths",
        "As validation chose it: 0 the same model for all, up to 1 personal, above 1 with a share of the client's own.",
    ),
    "personal": (
        "Own models instead of generated ones",
        "1 where validation gives each client its own model back. Good: 0, for then collaboration pays.",
    ),
    "mixing_breadth": (
        "Breadth of the mixing",
        "How many clients contribute to a model, as a share of all: 1 is FedAvg, 1/N is Local. Good: in between, "
        "if only some clients are similar.",
    ),
    "similarity_*": (
        "Similarities of different clients",
        "Good: smallest and largest apart; where all are alike, mixing cannot tell clients from each other.",
    ),
    "self_weight": (
        "Weight of a client's own model",
        "On average over clients. 1: nobody learns from others. Good: below 1, and above 1/N where clients differ.",
    ),
    "common_share/*": (
        "Share that is common to all",
        "Of this tensor, as estimated. 1: an average of all clients; 0: similar clients alone. Good: steady.",
    ),
    "masked_averaging": (
        "Masked averaging",
        "1 where validation averages each coordinate over the clients that updated it.",
    ),
    "similarity_temperature": (
        "Temperature of the similarities",
        "As validation chose it: high values mix similar clients only, 0 mixes all alike.",
    ),
    "common_share": ("Share that is common to all", "As validation chose it: 1 is an average of all clients."),
    "factors_apart": (
        "Distance of the factors' mixings",
        "Share of a client's weight that differs from the first factor's. Good: above 0; at 0 one factor is enough.",
    ),
    "clusters": (
        "Clusters",
        "Of clients that share a model. Good: levels off well below the number of clients, where everybody is alone.",
    ),
    "mean_update": (
        "Norm of the largest cluster's mean update",
        "A cluster is split where this is small and its longest update is not. Good: falls.",
    ),
    "longest_update": (
        "Longest update of the largest cluster",
        "Good: falls with the mean update; a long one beside a short mean says that clients pull apart.",
    ),
    "accepted_clients": (
        "Accepted clients",
        "How many others a client averages with. Good: above 0; all of them is plain averaging.",
    ),
    "confidence_spread": ("Spread of the confidences", "0: all clients count alike. Good: moderate and steady."),
    "dual_norm": (
        "Norm of the correction h",
        "Good: levels off; growth without end says that local steps are too few or too long.",
    ),
    "own_mixtures": (
        "Mixtures with the client's own model",
        "Share of the evaluated ones whose client responded in this round. Good: as high as the share that takes part.",
    ),
    "share": (
        "Share of the shared model",
        "In the blended prediction, mean over clients: 1 is the global model alone, 0 the personal one. "
        "Good: in between, where both know something.",
    ),
    "shared_routes": (
        "Routes through the global model",
        "Share of examples and layers. Good: away from 0 and 1, where the policy is stuck.",
    ),
    "prototypes": ("Prototypes in the queue", "Good: fills up and stays full."),
    "classes": ("Classes with a prototype", "Good: all classes that the clients train on."),
    "proxy_drift": ("Movement of the proxies", "From round to round, mean over classes. Good: falls."),
    "matched": (
        "Matched nodes",
        "Share of nodes that have a counterpart at another client. At 0 this is FedAvg: the clients lack common ids.",
    ),
    "drawn": ("Neighbors drawn", "For a matched node, on average. Good: near the number that was asked for."),
    "generated_neighbors": (
        "Generated neighbors",
        "Of a client, on average. Good: near the neighbors that the partition cut off; at 0 nothing is added.",
    ),
    "count_error": ("Error of the number of neighbors", "Mean over nodes. Good: falls well below 1."),
    "feature_error": ("Error of the generated features", "Mean over nodes whose neighbors were hidden. Good: falls."),
    "pseudo_loss": ("Loss on the pseudo graph", "Of the clients' models, whose classes it has to show. Good: falls."),
    "disagreement": (
        "Disagreement of teachers and student",
        "On the pseudo graph. Good: falls as the global model learns what the clients' models know.",
    ),
    "kept_accuracy": ("Validation accuracy of the kept model", "Good: rises; the second phase builds on its best."),
    "adapting_clients": ("Clients in the second phase", "Good: all of them at the end."),
    "mean_length": ("Length of the common mean", "Of the representations. Good: levels off."),
    "coupling": (
        "Coupling of neighbors' models",
        "The objective's part without the local losses. Good: levels off; 0 means that no model is held by another.",
    ),
    "relation_loss": (
        "Loss of the relation",
        "How badly the embeddings tell which clients are related. Good: falls below 0.69, which is chance.",
    ),
    "*_loss": (
        "Loss",
        "A term of the clients' objective, after training, mean over clients. Good: falls.",
    ),
    "divergence": ("Divergence from the teacher", "After training, mean over clients. Good: falls."),
    "reliance": ("Reliance on the teacher", "Share of nodes. Good: neither 0 nor 1."),
}

#: The same of a matrix over the clients.
MATRICES: Mapping[str, str] = {
    "adjacency": "Which clients exchange messages. Good: connected, and blocks where clients are alike.",
    "embedding": "Cosines of what the server knows of the clients. Good: blocks of similar clients stand out; "
    "a matrix of one color means that all clients look alike.",
    "similarity": "Similarities of the clients as the method measures them. Good: blocks of similar clients stand out; "
    "one color means that it cannot tell them apart.",
    "mixing*": "Row i: whose models client i is given, by weight. Good: similar clients have large weights; equal rows "
    "are an average for all, and a diagonal is training alone.",
    "relation*": "Which clients are known to be related before training.",
    "map_norms": "Norms of the maps between neighbors. Good: away from 0, where neighbors do not hear each other.",
    "cosines of *": "Whether the clients pull in one direction. Good: above 0; blocks are groups that agree, and "
    "negative entries are clients that undo each other's steps.",
}


def metric(name: str) -> tuple[str, str]:
    """Words for a metric, by its name without ``server/``, and what good values are; the bare name if it has none."""
    words = name.replace("_", " ").replace("/", ", ")
    title, text = _of(METRICS, name) or (words[:1].upper() + words[1:], "")
    tail = name.partition("/")[2] or (name.rpartition("_")[2] if name.startswith("similarity_") else "")
    return (f"{title}: {tail}" if tail and text else title), text


def matrix(name: str) -> str:
    """What a matrix is and what good ones look like; empty where that is not known."""
    return _of(MATRICES, name) or ""


def _of(table: Mapping[str, Entry], name: str) -> Entry | None:
    return table.get(name) or next((entry for key, entry in table.items() if fnmatchcase(name, key)), None)
