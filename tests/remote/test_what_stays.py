"""What an owner's file says holds whatever a job wraps around the net and however a number is written."""

from pathlib import Path

import pytest
import torch

from fl_lightning.remote.job import memory_of
from fl_lightning.remote.policy import Refused, SitePolicy
from fl_lightning.remote.secure import wrong_weight


@pytest.mark.parametrize("name", ["head.weight", "shared.head.weight", "net.head.shared.bias"])
def test_local_parameters_stay_under_the_names_of_a_wrapped_net(name: str) -> None:
    policy = SitePolicy(min_examples=1, local=["head.*"])
    with pytest.raises(Refused, match=r"would leave, but policy.local keeps it here"):
        policy.check_parameters(["convs.0.weight", name])
    with pytest.raises(Refused, match=r"would leave, but policy.local keeps it here"):
        policy.check_output(f"gradients/{name}", "client")
    policy.check_parameters(["convs.0.weight", "heads.0", "ahead.weight"])


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
