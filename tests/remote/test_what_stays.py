"""What an owner's file says holds whatever a job wraps around the net and however a number is written."""

from pathlib import Path

import pytest
import torch
from sites import make_sites

from fl_lightning import ClientModule
from fl_lightning.remote import LoopbackChannel, federate
from fl_lightning.remote.job import memory_of
from fl_lightning.remote.policy import Refused, SitePolicy
from fl_lightning.remote.secure import wrong_weight
from fl_lightning.strategies import FedIIH


@pytest.mark.parametrize("name", ["head.weight", "shared.head.weight", "net.head.shared.bias"])
def test_local_parameters_stay_under_the_names_of_a_wrapped_net(name: str) -> None:
    policy = SitePolicy(min_examples=1, local=["head.*"])
    with pytest.raises(Refused, match=r"would leave, but policy.local keeps it here"):
        policy.check_parameters(["convs.0.weight", name])
    with pytest.raises(Refused, match=r"would leave, but policy.local keeps it here"):
        policy.check_output(f"gradients/{name}", "client")
    policy.check_parameters(["convs.0.weight", "heads.0", "ahead.weight"])


@pytest.mark.parametrize("local", [["head.*"], ["body.*", "conv2.*"]])
def test_a_pattern_that_keeps_nothing_here_is_refused(local: list[str]) -> None:
    names = ["body.weight", "heads.0", "heads.1"]
    with pytest.raises(Refused) as caught:
        SitePolicy(local=local).for_net(names, [])
    assert str(caught.value) == (
        f"policy.local has {local[-1]!r}, which matches none of the net's parameters: body.weight, heads.0, heads.1"
    )


@pytest.mark.parametrize("prefix", ["", "shared."])
def test_the_last_layer_stays_whatever_its_name(prefix: str) -> None:
    """``head.*`` stands for it, as in a job's ``personal``."""
    policy = SitePolicy(local=["body.*", "head.*"]).for_net(["body.weight", "heads.0", "heads.1"], ["heads.0"])
    with pytest.raises(Refused, match=rf"^{prefix}heads\.0 would leave, but policy.local keeps it here"):
        policy.check_parameters(["heads.1", f"{prefix}heads.0"])
    with pytest.raises(Refused, match=r"^gradients/heads\.0 would leave"):
        policy.check_output("gradients/heads.0", "client")


def test_a_site_refuses_a_net_without_what_stays(graphs, make_trainer, tmp_path: Path) -> None:
    """Of its net with ``heads.0`` and ``heads.1``, ``head.*`` kept nothing."""
    sites = make_sites(graphs[:1], tmp_path, lambda: (ClientModule(), FedIIH()), SitePolicy(local=["head.*"]))
    trainer, strategy = make_trainer(num_rounds=1), FedIIH()
    nothing = r"policy.local has 'head\.\*', which matches none of the net's parameters: .*, heads\.0, heads\.1"
    with pytest.raises(ValueError, match=nothing):
        trainer.fit(ClientModule(), federate(trainer, LoopbackChannel(sites), strategy), strategy)


@pytest.mark.parametrize(("written", "expected"), [("8", 8.0), ("'8'", 8.0), ("null", None)])
def test_memory_is_bounded_however_the_number_is_written(written: str, expected: float | None, tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text(f"policy:\n  max_memory_gib: {written}\n")
    assert memory_of(tmp_path / "site.yaml") == expected


@pytest.mark.parametrize("written", [".inf", "true", "much", "-1"])
def test_a_bound_that_is_none_is_refused(written: str, tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text(f"policy:\n  max_memory_gib: {written}\n")
    with pytest.raises(ValueError, match=r"policy.max_memory_gib is .*: give a number of GiB, or null"):
        memory_of(tmp_path / "site.yaml")


@pytest.mark.parametrize("weight", [0.0, -5.0, 2.5])
def test_a_sum_of_no_weight_fails_alone(weight: float) -> None:
    assert "is not a number of examples" in wrong_weight(torch.tensor([1.0, weight]), 4)
    assert not wrong_weight(torch.tensor([1.0, 4.0]), 4)
