"""Prose: phrases, words and spelling of docstrings, comments, messages and pages."""

import re
from fnmatch import fnmatch
from pathlib import Path

from tables import MODULES, NAMES, FILES, PROTECTED

HERE = Path(__file__).parent

# ------------------------------------------------------------------ spelling
SPELLING: dict[str, str] = {}
for _line in next(HERE.glob("venv/lib/python*/site-packages/codespell_lib/data/dictionary_en-GB_to_en-US.txt")).read_text().splitlines():
    _old, _, _new = _line.partition("->")
    SPELLING[_old.strip().lower()] = _new.strip().rstrip(",").split(",")[0]
for _stem in ("personal", "optim", "summar", "initial", "normal", "general", "decentral", "random", "regular", "symmetr",
              "material", "quant", "vector", "standard", "minim", "maxim", "organ", "categor", "linear", "local", "capital",
              "penal", "parametr", "character", "factor", "final", "real", "recogn", "serial", "synchron", "util", "visual",
              "anonym", "binar", "central", "author", "emphas", "harmon", "idealis", "special", "stabil", "tokenis", "diagonal"):
    for _end in ("e", "ed", "es", "er", "ers", "ing", "ation", "ations", "able"):
        SPELLING.setdefault(f"{_stem}is{_end}", f"{_stem}iz{_end}")
SPELLING |= {
    "learnt": "learned", "unlearnt": "unlearned", "spelt": "spelled", "misspelt": "misspelled", "spoilt": "spoiled",
    "travelled": "traveled", "travelling": "traveling", "unlabelled": "unlabeled", "relabelled": "relabeled",
    "relabelling": "relabeling", "labelling": "labeling", "modelling": "modeling", "programme": "program",
    "quadratic programme": "quadratic program", "towards": "toward", "whilst": "while", "enrolment": "enrollment",
    "enrols": "enrolls", "enrol": "enroll", "judgement": "judgment", "artefact": "artifact", "artefacts": "artifacts",
    "centred": "centered", "uncentred": "uncentered", "cancelled": "canceled", "cancelling": "canceling",
    "neighbours": "neighbors", "neighbour": "neighbor", "neighbouring": "neighboring", "neighbourhood": "neighborhood",
    "neighbourhoods": "neighborhoods", "grey": "gray", "licence": "license", "practise": "practice", "catalogue": "catalog",
    "dialogue": "dialog", "fulfil": "fulfill", "counsellor": "counselor", "backwards": "backward", "forwards": "forward",
    "upwards": "upward", "downwards": "downward", "afterwards": "afterward", "sceptical": "skeptical", "sulphur": "sulfur",
    "likelihoods": "likelihoods", "mould": "mold", "ageing": "aging", "analyse": "analyze", "analysed": "analyzed",
    "analyses": "analyses", "per cent": "percent", "behaviour": "behavior", "behaviours": "behaviors", "favour": "favor",
    "favours": "favors", "favoured": "favored", "honour": "honor", "tumour": "tumor", "metre": "meter", "metres": "meters",
    "defence": "defense", "defences": "defenses", "offence": "offense", "colour": "color", "colours": "colors",
    "coloured": "colored", "colouring": "coloring", "mis-spelt": "misspelled", "modelled": "modeled", "fuelled": "fueled",
    "levelled": "leveled", "signalled": "signaled", "totalled": "totaled", "ploughed": "plowed", "summarise": "summarize",
}
for _keep in ("analyses", "exercise", "advise", "wise", "raise", "noise", "forwards", "backwards", "metre", "practise", "dialogue",
              "dialogues", "afterwards", "storey", "cheque", "tyre", "tyres", "plough", "draught", "artefact"):
    SPELLING.pop(_keep, None)
SPELLING["artefact"] = "artifact"

_PARTS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_WORD = re.compile(r"(?<![A-Za-z])(?:[A-Z]?[a-z]+|[A-Z]{2,})(?![a-z])")


def _like(old: str, new: str) -> str:
    if old.isupper() and len(old) > 1:
        return new.upper()
    return new[:1].upper() + new[1:] if old[:1].isupper() else new


def spell(text: str) -> str:
    """American spelling of every part of every word, also inside identifiers."""
    return _PARTS.sub(lambda m: _like(m[0], SPELLING[m[0].lower()]) if m[0].lower() in SPELLING else m[0], text)


# ------------------------------------------------------------------ names in text
_NAMES = {old: new for old, new in NAMES.items() if "_" in old or re.search(r"[a-z][A-Z]|[A-Z][a-z]+[A-Z]", old)}
_NAME = re.compile(r"(?<![A-Za-z0-9_])(" + "|".join(sorted(map(re.escape, _NAMES), key=len, reverse=True)) + r")(?![A-Za-z0-9_])")
_MODULE = re.compile(r"(?<![\w])(" + "|".join(sorted(map(re.escape, MODULES), key=len, reverse=True)) + r")(?!\w)")
_PATHS = {old: new for old, new in FILES.items()}
_PATHS |= {"fl_lightning/" + o.removeprefix("fl_lightning/") if o.startswith("callbacks/") else o: n for o, n in _PATHS.items()}
_BASES = {Path(o).name: Path(n).name for o, n in FILES.items() if o.endswith((".py", ".yaml")) and Path(o).name not in ("answers.py", "cells.py", "signals.py")}
_PATH = re.compile(r"(?<![\w/.-])((?:\.\./)*)(" + "|".join(sorted(map(re.escape, _PATHS), key=len, reverse=True)) + r")(?![\w-])")
_BASE = re.compile(r"(?<![\w-])(" + "|".join(sorted(map(re.escape, _BASES), key=len, reverse=True)) + r")(?!\w)")
_STEMS = {
    "results/kinship": "results/client_similarity", "results/fedaux_alive": "results/fedaux_settings",
    "results/fedsheafhn_new_clients": "results/fedsheafhn_unseen_clients",
    "results/sheaf_fmtl_starts": "results/sheaf_fmtl_initialization",
    "new_clients.png": "unseen_clients.png", "strategies/decentralised": "strategies/decentralized",
    "strategies.decentralised": "strategies.decentralized", "relations/kinship": "relations/client_similarity",
    "cells.jsonl": "runs.jsonl", "study/cells.py": "study/runs.py", "remote/answers.py": "remote/responses.py",
    "strategies/signals.py": "strategies/client_outputs.py", "``signals.py``": "``client_outputs.py``",
    "study cell ": "study train ", "fl-train study cell": "fl-train study train", "| cell FILE": "| train FILE",
    "chosen/": "best/",
}

BACKTICKED = {
    "inbox": "received", "context.inbox": "context.received", "Context.inbox": "Context.received",
    "memory": "client_state", "Strategy.memory": "Strategy.client_state", "Stage.memory": "Stage.client_state",
    "memory()": "client_state()", "Context.memory": "Context.client_state", "context.memory": "context.client_state",
    "signals": "client_outputs", "Stage.signals": "Stage.client_outputs", "Strategy.signals": "Strategy.client_outputs",
    "signals()": "client_outputs()", "Payload.signals": "Payload.extras", "Work": "StageRequest", "Outcome": "StageResult",
    "Roster": "ClientRegistry", "Slot": "StateSpec", "Signal": "ClientOutput", "admit": "onboard", "admission": "onboarding",
    "hold": "set_client_data", "held": "client_data", "void": "failed_round", "effort": "work_fraction", "Cell": "StudyRun",
    "Cell.data": "StudyRun.data", "figures": "recorded_metrics", "new/": "unseen/", "new/...": "unseen/...",
    "new_...": "unseen_...", "start: global": "start: global", "answers": "responses", "travelling": "communicated",
    "personalised": "personalized", "mend": "mend", "figure": "metric", "roster": "registry", "client.work": "client.cost",
}
_TICK = re.compile(r"(`{1,2})([A-Za-z_.]+(?:\(\))?(?:/|/\.\.\.)?)\1")

OS_SIGNAL = ("fl_lightning/data/sources/activity.py", "fl_lightning/command_line.py", "fl_lightning/run/interruption.py",
             "fl_lightning/executors/time_limit.py", "fl_lightning/executors/storage.py", "fl_lightning/study/*",
             "fl_lightning/cli.py", "docs/how-to/devices.md", "docs/reference/commands.md", "fl_lightning/report/page.py",
             "fl_lightning/run/result.py", "callbacks/checkpoint.py", "fl_lightning/deferred.py", "fl_lightning/run/assembly.py",
             "tests/run/*", "tests/cli/*", "tests/campaign/*", "docs/how-to/resume.md", "fl_lightning/round_loop.py", "fl_lightning/trainer.py",
             "tests/test_trainer.py", "tests/executors/test_time_limit.py", "tests/study/*", "callbacks/result_table.py", "README.md",
             "fl_lightning/data/sources/tasks.py", "tests/data/*", "docs/how-to/data.md", "Makefile")
MEMORY = ("fl_lightning/round/context.py", "fl_lightning/round/stage.py", "fl_lightning/strategies/base.py",
          "fl_lightning/strategies/mixing/moon.py", "docs/tutorials/your-algorithm.md", "docs/explanation/the-round.md",
          "fl_lightning/round/local_program.py")
REMOTE = ("fl_lightning/remote/*", "tests/remote/*", "docs/explanation/threat-model.md", "docs/explanation/what-leaves-a-client.md",
          "docs/how-to/real-federation.md", "tests/wrong_messages.py", "tests/sites.py", "SECURITY.md", "docs/how-to/whose-files.md")
PLOTS = ("callbacks/pictures.py", "callbacks/topology.py", "fl_lightning/report/pictures.py", "fl_lightning/report/theme.py",
         "fl_lightning/report/templates/*", "examples/*", "tests/callbacks/test_topology_logger.py", "fl_lightning/remote/sum_member.py",
         "tests/report/test_theme.py", "callbacks/similarity.py")
STUDY = ("fl_lightning/study/*", "studies/*", "tests/study*", "docs/how-to/studies.md", "docs/results.md", "docs/explanation/*.md", "README.md",
         "benchmarks/*", "docs/reference/files.md", "docs/reference/commands.md", "docs/how-to/sweeps.md", "Makefile", "fl_lightning/completion_command.py")
NOT_STUDY = ("docs/explanation/threat-model.md",)

A = r"(?<![A-Za-z`_/-])"  # begins a word
Z = r"(?![A-Za-z`_-])"


def _rule(pattern: str, new: str, files: tuple[str, ...] = ("*",)) -> tuple[re.Pattern[str], str, tuple[str, ...]]:
    return re.compile(pattern), new, files


def _both(old: str, new: str, files: tuple[str, ...] = ("*",)) -> list:
    """A phrase and the same with a capital; blanks match line ends with their comment signs and quotes."""
    gap = r"(?P<g>\s+(?:#:? )?)"
    parts = old.split(" ")
    found = []
    for cap in (False, True):
        first = parts[0][:1].upper() + parts[0][1:] if cap else parts[0]
        body = A + re.escape(first) + "".join(rf"(\s+(?:#:?\ )?){re.escape(p)}" for p in parts[1:]) + Z
        words = (new[:1].upper() + new[1:] if cap else new).split(" ")
        found.append((re.compile(body), words, len(parts) - 1, files, max(parts, key=len).lower()))
    return found


PHRASES: list = []


def phrase(old: str, new: str, *files: str) -> None:
    PHRASES.extend(_both(old, new, files or ("*",)))


# --- reports, tables, messages
phrase("chosen round", "best round")
phrase("chosen rounds", "best rounds")
phrase("each client's own round", "per-client model selection")
phrase("let every client choose its own round on its own validation examples", "select the best round of each client on its own validation examples")
phrase("chosen on test: not a result", "for reference only: selected on test data")
phrase("it is chosen on test and is no result", "it is selected on test data and is for reference only")
phrase("chosen on test, no result", "for reference only: selected on test data")
phrase("written anew by", "regenerate with")
phrase("writes the page anew", "regenerates the page")
phrase("writes it anew", "regenerates it")
phrase("write the pages of runs anew", "regenerate the pages of runs")
phrase("it is written anew", "it is regenerated")
phrase("laid over each other", "merged, where later files override earlier ones")
phrase("is laid over", "overrides")
phrase("errors in thousandths", "MSE × 10⁻³")
phrase("accuracy in per cent and errors in thousandths", "accuracy in percent and MSE × 10⁻³")
phrase("thousandths of an error", "MSE × 10⁻³")
phrase("in thousandths", "× 10⁻³")
phrase("with what keeps its generator alive", "with what prevents the collapse of its generator")
phrase("keeps its generator alive", "prevents the collapse of its generator")
phrase("keep its generator alive", "prevent the collapse of its generator")
phrase("what keeps it alive", "what prevents its collapse")
phrase("the generator alive", "the generator from collapsing")
phrase("a generator is alive if they do worse", "a generator has not collapsed if they do worse")
# --- unseen clients
phrase("a newcomer of its own", "an unseen client")
phrase("newcomers join those that have many neighbours", "each new node joins those that have many neighbors")
phrase("edges of each newcomer", "edges of each new node")
phrase("a newcomer's", "an unseen client's")
phrase("a newcomer", "an unseen client")
phrase("each newcomer", "each unseen client")
phrase("newcomers'", "unseen clients'")
phrase("newcomers", "unseen clients")
phrase("newcomer", "unseen client")
phrase("new clients'", "unseen clients'")
phrase("new clients", "unseen clients")
phrase("a new client", "an unseen client")
phrase("new client", "unseen client")
# --- rounds
phrase("void rounds in a row", "failed rounds in a row")
phrase("a void round", "a failed round")
phrase("void round", "failed round")
phrase("is not called, and the round is void", "is not called, and the round fails (below quorum)")
phrase("rounds were void", "rounds failed")
phrase("round was void", "round failed")
phrase("a round is void", "a round fails")
phrase("make a round void", "make a round fail")
phrase("round would be void", "round would fail")
phrase("the sum is void", "the secure sum failed")
phrase("where it is void", "where it failed")
phrase("else it is void", "else it fails")
phrase("otherwise the sum is void", "otherwise the sum fails")
phrase("a sum is void", "a sum failed")
phrase("can void a secure sum", "can make a secure sum fail")
phrase("wrong shares make it void", "wrong shares make it fail")
phrase("with fewer is void", "with fewer fails")
phrase("is void: the server takes nothing in", "fails: the server discards what arrived")
phrase("is void", "fails")
phrase("are void", "fail")
phrase("void and says why", "fails and says why")
phrase("answers nothing", "does not respond")
phrase("the server takes in nothing of the stage", "the server aggregates nothing of the stage")
phrase("the server takes nothing in", "the server aggregates nothing")
phrase("the server took nothing in", "the server aggregated nothing")
phrase("the server then takes nothing more in", "the server then aggregates nothing more")
phrase("the server has taken in", "the server has aggregated")
phrase("are taken in", "are aggregated")
phrase("is taken in", "is aggregated")
phrase("taken in", "aggregated", "fl_lightning/callback.py")
phrase("send, work, answer, take in", "send, train, respond, aggregate")
phrase("take in the clients' answers", "aggregate the clients' updates")
phrase("take in what newcomers answered", "onboard unseen clients from what they sent")
phrase("takes in what came back", "aggregates what came back")
phrase("take in the figures of a round", "record the metrics of a round")
phrase("takes in nobody else", "affects nobody else")
phrase("sending and taking in", "sending and aggregating")
phrase("only of the clients that answered well", "only of the clients that succeeded")
phrase("the answers of all processes", "the updates of all processes")
phrase("what everyone is given until somebody has answered", "what every client is given until some client has responded")
# --- kept local
for _verb, _new in {"stay at home": "are kept local", "stays at home": "is kept local", "stayed at home": "was kept local"}.items():
    phrase(_verb, _new)
phrase("a learned α stays at home", "a learned α is kept local")
phrase("may stay at home", "may be kept local")
phrase("keeps normalisation layers at home", "keeps normalization layers local")
phrase("keeps them at home", "keeps them local")
phrase("keeps the heads at home", "keeps the heads local")
phrase("vectors at home", "vectors kept local")
phrase("of training at home", "of local training")
phrase("training at home", "training locally")
phrase("neighbours at home", "local neighbors")
phrase("at home they differ", "kept local, they differ")
phrase("at home", "local")
# --- communicated
phrase("nothing travelled", "nothing was communicated")
phrase("what travelled", "what was communicated")
phrase("that travelled", "that were communicated")
phrase("they travelled so", "they were communicated so")
phrase("that travels under", "that is communicated under")
phrase("parameters travel as", "parameters are communicated as")
phrase("travel as one row", "are communicated as one row")
phrase("then travel flat", "are then communicated flat")
phrase("that travel flat", "that are communicated flat")
phrase("that travel as they are", "that are communicated as they are")
phrase("that travel in the exchange", "that are communicated in the exchange")
phrase("that travel", "that are communicated")
phrase("that travels", "that is communicated")
phrase("what travels", "what is communicated")
phrase("never travels", "is never communicated")
phrase("travels once", "is communicated once")
phrase("then travels as", "is then communicated as")
phrase("travel in one instance", "are passed in one instance")
phrase("as they travel in one object", "as they are passed in one object")
phrase("these may travel", "these may be communicated")
phrase("no parameters travel", "no parameters are communicated")
phrase("and travel or stay as", "and are communicated or kept local as")
phrase("and travel under", "and are sent under")
phrase("and travel with", "and are communicated with")
phrase("the models travel along", "the models are sent along")
phrase("numbers travel when", "numbers are communicated when")
phrase("parameters travel", "parameters are communicated")
phrase("two models travel each way", "two models are communicated each way")
# --- similar clients
phrase("fedavg and its kin", "FedAvg and its variants")
PHRASES.extend(_both("FedAvg and its kin", "FedAvg and its variants"))
phrase("among clients that have kin", "among clients that have similar clients")
phrase("clients that have kin", "clients that have similar clients")
phrase("where clients have kin", "where clients have similar clients")
phrase("nobody has kin", "no client has similar clients")
phrase("kin have in common", "similar clients have in common")
phrase("with n kin alike", "with n similar clients")
phrase("where the kin tell all", "where similar clients tell all")
phrase("believes kin too much who have", "trusts similar clients too much that have")
phrase("believes kin too much", "trusts similar clients too much")
phrase("by their kin's, left one out", "by those of similar clients, left one out")
phrase("knowing one's kin", "knowing the similar clients")
phrase("told who is kin", "told which clients are similar")
phrase("takes clients to be kin", "takes clients to be similar")
phrase("a client's kin are itself alone", "a client is similar to itself alone")
phrase("one, its kin and somebody else", "one, a similar client and another")
phrase("a client with no kin", "a client with no similar clients")
phrase("without kin", "without similar clients")
phrase("what is not kinship at all", "what is not client similarity at all")
phrase("not kinship", "not client similarity")
phrase("the kinship", "client similarity")
phrase("about kinship", "about client similarity")
phrase("what kinship is worth", "what client similarity is worth")
phrase("the kin's", "those of similar clients")
phrase("what the kin know", "what similar clients know")
phrase("shared by kin", "shared by similar clients")
phrase("the share of kin", "the share of similar clients")
phrase("the kin", "the similar clients")
phrase("kinship", "client similarity")
phrase("their kin", "the clients similar to them")
# --- masked averaging
phrase("mixing of moved numbers", "masked averaging")
phrase("moved numbers alone", "masked averaging alone")
phrase("moved numbers", "coordinates that were updated")
phrase("moved-only", "masked averaging")
phrase("only moved numbers are mixed", "only updated coordinates are averaged")
# --- missing-neighbor generation
phrase("clients mend their graphs with generated neighbours", "clients complete their graphs with generated neighbors")
phrase("the mended graph", "the completed graph")
phrase("on mended graphs", "on completed graphs")
phrase("mends the graphs it is trained on", "completes the graphs it is trained on")
phrase("a newcomer mends by itself", "an unseen client completes its graph by itself")
phrase("where they mend a graph on its own", "where they complete a graph on its own")
phrase("with each other's neighbours, and mend", "with each other's neighbors, and complete the graphs")
phrase("validation mends", "validation corrects")
phrase("remove_self_loops mend another", "remove_self_loops change another")
phrase("is mended by", "is fixed by")
phrase("version alone is mended", "version alone is fixed")
phrase("names what was mended", "names what was fixed")
phrase("is named: mend it", "is named: fix it")
phrase("mend it", "fix it")
phrase("how to mend", "how to fix")
phrase("mended", "completed")
# --- initialization
phrase("restriction maps that are stored element by element", "restriction maps that are stored element by element")
phrase("standard normal start", "standard normal initialization")
# --- work fraction
phrase("the effort must be in", "the work fraction must be in")
phrase("all for effort 1", "all for a work fraction of 1")
phrase("share of the work that the client manages", "fraction of the work that the client does")
# --- registry
phrase("the roster", "the registry")
phrase("a roster", "a registry")
phrase("roster", "registry")
# --- client state and outputs
phrase("optimiser state and lasting memory", "optimizer state and lasting client state")
phrase("optimiser state and memory", "optimizer state and client state")
phrase("of the client's memory", "of the client's state")
phrase("of a client's memory", "of a client's state")
phrase("keeps no memory of clients", "keeps no client state")
phrase("other anchors or memory", "other anchors or client state")
phrase("anchor or memory", "anchor or client state")
phrase("move anchor and memory", "move the anchor and the client state")
phrase("its memory", "its client state", "fl_lightning/strategies/mixing/moon.py")
phrase("memory that changes with every step", "client state that changes with every step")
phrase("an inbox that clients read but do not take over", "further tensors that clients receive but do not load")
phrase("and an inbox", "and tensors to be received")
phrase("in its inbox", "that it received")
phrase("w is the inbox's, if there is one", "w is the received one, if there is one")
phrase("what clients signal", "what clients send")
phrase("compute their signals, and answer", "compute their outputs, and respond")
phrase("invented signals", "forged outputs")
phrase("an invented signal", "a forged output")
phrase("the signals that the server sent beside parameters", "the tensors that the server sent beside parameters")
phrase("signals that the server sent", "tensors that the server sent")
phrase("as a signal to clients", "as further tensors to clients")
# --- studies
phrase("a cell of every method", "a run of every method")
phrase("let W&B agents take cells", "let W&B agents take runs")
# --- other words of the house
phrase("rooms by what they are for", "packages by what they are for")
phrase("rooms whose code computes", "packages whose code computes")
phrase("the figures", "the metrics")

WORDS: list[tuple[re.Pattern[str], object, tuple[str, ...]]] = []


def word(pattern: str, new: str, *files: str) -> None:
    def change(match: re.Match[str]) -> str:
        return _like(match[0], match.expand(new))

    WORDS.append((re.compile(A + pattern + Z, re.IGNORECASE), change, files or ("*",)))


# answers
_WHO = r"(clients?|client's|those|who|whoever|nobody|somebody|it|they|everyone|everybody|members|ends|sites?|others?|server|user|did not|does not|do not|must|may|to|has|have|that|not|just|or|whom|Python|all of a cluster's members have)"
word(rf"({_WHO}) answered", r"\1 responded")
word(rf"({_WHO}) answers", r"\1 responds")
word(rf"({_WHO}) answer", r"\1 respond")
word(r"answers a mistake", "reports a mistake")
word(r"answers at once what", "handles at once what", "fl_lightning/command_line.py")
word(r"are answered in a fraction", "are handled in a fraction", "fl_lightning/command_line.py")
word(r"you are answered within", "you get a reply within")
word(r"is answered again", "gets the same response again")
word(r"is answered with the same", "gets the same")
word(r"answered", "responded", *REMOTE)
word(r"answers", "responses", *REMOTE)
word(r"an answer", "a response", *REMOTE)
word(r"answer", "response", *REMOTE)
word(r"answers messages", "responds to messages")
word(r"answer tasks", "handle tasks")
word(r"answers go", "results go", "fl_lightning/study/*")
word(r"the clients answer", "the clients respond")
word(r"an answer", "an update")
word(r"answers", "updates")
word(r"answer", "update")
word(r"answered", "responded")
# figures, but not those of papers and plots
WORDS.append((re.compile(A + r"([Ff])igure(s?)" + Z + r"(?!\s*(\d|and \d|\{))"), lambda m: ("M" if m[1] == "F" else "m") + "etric" + m[2], tuple(f"!{f}" for f in PLOTS) + ("*",)))
# signals
word(r"signals", "client outputs", *(f"!{f}" for f in OS_SIGNAL), "*")
word(r"a signal", "a client output", *(f"!{f}" for f in OS_SIGNAL), "*")
word(r"signal", "client output", *(f"!{f}" for f in OS_SIGNAL), "*")
word(r"memory", "client state", *MEMORY)
word(r"inbox", "received tensors")
word(r"effort", "work fraction")
word(r"rooms", "packages", "README.md", "fl_lightning/*", "tests/*")
word(r"void", "failed", "docs/*", "tests/*", "fl_lightning/*", "callbacks/*")
# studies: a cell is a run
word(r"a cell's", "a run's", *(f"!{f}" for f in NOT_STUDY), *STUDY)
word(r"cells", "runs", *(f"!{f}" for f in (*NOT_STUDY, "benchmarks/suite.py", "fl_lightning/study/table.py")), *STUDY)
word(r"cell", "run", *(f"!{f}" for f in (*NOT_STUDY, "benchmarks/suite.py", "docs/explanation/panacea.md")), *STUDY)

#: Names of arguments at the head of a line of a docstring.
_ARGUMENT = re.compile(r"(?m)^(\s+)(effort|inbox|roster|holds|memory|signals|figure|fewest_answers|held)(?=: )")
_ARGUMENTS = {
    "effort": "work_fraction", "inbox": "received", "roster": "registry", "holds": "client_data", "held": "client_data",
}


def _argument(match: re.Match[str], file: str) -> str:
    name = match[2]
    if name == "memory":
        new = "client_state"
    elif name == "signals":
        new = "extras" if file.endswith("payload.py") else "client_outputs"
    elif name == "figure":
        new = "metric" if file.startswith(("fl_lightning/study/", "tests/study/")) and "pictures" not in file else "figure"
    else:
        new = _ARGUMENTS.get(name, name)
    return match[1] + new


_TRIGGER = re.compile(r"answer|figure|signal|memory|inbox|effort|rooms|void|cell", re.IGNORECASE)


def names(text: str) -> str:
    """Identifiers, modules and paths in text."""
    for old, new in _STEMS.items():
        text = text.replace(old, new)
    text = _PATH.sub(lambda m: m[1] + _PATHS[m[2]], text)
    text = _MODULE.sub(lambda m: MODULES[m[1]], text)
    text = _NAME.sub(lambda m: _NAMES[m[1]], text)
    return _BASE.sub(lambda m: _BASES[m[1]], text)


def applies(file: str, patterns: tuple[str, ...]) -> bool:
    hit = False
    for pattern in patterns:
        if pattern.startswith("!"):
            if fnmatch(file, pattern[1:]):
                return False
        elif fnmatch(file, pattern):
            hit = True
    return hit


_CONTEXT_ATTRIBUTES = (
    (re.compile(r"\b(context|Context)\.inbox\b"), r"\1.received"),
    (re.compile(r"\b(context|Context|Strategy|Stage|strategy)\.memory\b"), r"\1.client_state"),
    (re.compile(r"\b(stage|Stage|Strategy|strategy)\.signals\b"), r"\1.client_outputs"),
    (re.compile(r"\b(payload|Payload|upload)\.signals\b"), r"\1.extras"),
    (re.compile(r"\brun\.roster\b"), "run.registry"),
)


_CODE = re.compile(r"(?m)^\s*[\"']*\s*(import \w[\w., ]*$|from [\w.]+ import )|^[\"']*import ")


def prose(text: str, file: str) -> str:
    """The whole treatment of a text."""
    text = names(text)
    if _CODE.search(text):
        return text
    for pattern, new in _CONTEXT_ATTRIBUTES:
        text = pattern.sub(new, text)

    def tick(match: re.Match[str]) -> str:
        inner = match[2]
        if inner in ("memory",) and file.startswith("fl_lightning/executors/stack"):
            return match[0]
        return match[1] + BACKTICKED.get(inner, inner) + match[1]

    text = _TICK.sub(tick, text)
    text = _ARGUMENT.sub(lambda m: _argument(m, file), text)
    lower = text.lower()
    for pattern, words, gaps, files, mark in PHRASES:
        if mark in lower and applies(file, files):
            text = pattern.sub(lambda m: _fill(m, words, gaps), text)
    if _TRIGGER.search(text):
        for pattern, new, files in WORDS:
            if applies(file, files):
                text = pattern.sub(new, text)
    return spell(text)


def _fill(match: re.Match[str], words: list[str], gaps: int) -> str:
    """New words with the old blanks between them, so that line ends stay about where they were."""
    blanks = [match[1 + i] for i in range(gaps)]
    if any("\n" in blank for blank in blanks):
        at = next(i for i, blank in enumerate(blanks) if "\n" in blank)
        place = min(at, len(words) - 2)
        if place < 0:
            return " ".join(words) + blanks[at]
        return " ".join(words[: place + 1]) + blanks[at] + " ".join(words[place + 1 :])
    return " ".join(words)


def word_only(text: str, file: str) -> str:
    """A string without blanks: names and paths; no spelling, which may be data."""
    return names(text)


_TEST_WORDS = {
    "newcomers": "unseen_clients", "newcomer": "unseen_client", "kin": "similar_clients", "void": "failed", "answers": "updates",
    "answered": "responded", "figures": "metrics", "figure": "metric", "signals": "outputs", "signal": "output", "inbox": "received_tensors",
    "mended": "completed", "rooms": "packages", "cells": "runs", "cell": "run", "effort": "work_fraction", "travel": "are_communicated",
    "travels": "is_communicated", "told": "reported",
}
_TEST_KEPT = ("test_the_installed_command_ends_by_sigterm", "test_no_signal")


def test_name(name: str) -> str:
    """The name of a test in the new words."""
    if "without_kin" in name or "a_signal_may_not" in name:
        pass
    name = name.replace("test_kin_", "test_Kin_")
    parts = name.split("_")
    new = "_".join(_TEST_WORDS.get(part, part) for part in parts)
    new = new.replace("_at_home", "_local").replace("a_unseen", "an_unseen").replace("moved_numbers", "updated_coordinates")
    return spell(new).replace("test_Kin_", "test_kin_")
