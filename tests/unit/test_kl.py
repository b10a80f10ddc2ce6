"""KL to the reference model: estimators, gradients, reward penalty, adaptive coefficient."""

import math
from dataclasses import replace

import pytest
import torch

from dapo_core.algorithm.batch import build_batch
from dapo_core.algorithm.kl import KLController, kl_estimate, reward_penalties
from dapo_core.config.algorithm import KLConfig
from tests.batches import make_group

LN2, NAN = math.log(2), float("nan")
ESTIMATORS = ("kl", "abs", "mse", "low_var_kl")


@pytest.mark.parametrize(
    ("estimator", "difference", "value", "gradient"),
    [
        ("kl", LN2, LN2, 1.0),
        ("kl", -LN2, -LN2, 1.0),
        ("kl", 50.0, 50.0, 1.0),
        ("abs", LN2, LN2, 1.0),
        ("abs", -LN2, LN2, -1.0),
        ("mse", LN2, LN2**2 / 2, LN2),  # d^2 / 2, derivative d
        ("mse", -LN2, LN2**2 / 2, -LN2),
        ("low_var_kl", 0.0, 0.0, 0.0),
        ("low_var_kl", LN2, LN2 - 0.5, 0.5),  # 1/2 - 1 + ln 2, derivative 1 - 1/2
        ("low_var_kl", -LN2, 1 - LN2, -1.0),  # 2 - 1 - ln 2, derivative 1 - 2
        ("low_var_kl", -3.0, 10.0, 0.0),  # e^3 - 1 - 3 = 16.09, above 10
        ("low_var_kl", 50.0, 10.0, 0.0),  # e^-20 - 1 + 20 = 19, above 10
        ("low_var_kl", -50.0, 10.0, 0.0),  # finite, though e^50 is 5e21
    ],
)
def test_estimators(estimator: str, difference: float, value: float, gradient: float) -> None:
    for suffix, slope in (("", gradient), ("+", difference)):  # k2's derivative is d
        log_probs = torch.tensor(difference - 1.0, dtype=torch.float64, requires_grad=True)
        estimate = kl_estimate(
            log_probs, torch.tensor(-1.0, dtype=torch.float64), estimator + suffix
        )
        estimate.backward()
        assert log_probs.grad is not None
        assert estimate.item() == pytest.approx(value, abs=1e-12)
        assert log_probs.grad.item() == pytest.approx(slope, abs=1e-12)


LOGITS, REFERENCE = (0.3, -0.2, 1.1), (0.5, 0.3, 0.2)


def _mean_gradient(estimator: str | None) -> torch.Tensor:
    """Return the expected gradient by a three-token policy's logits; None: of KL itself."""
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    log_probs = logits.log_softmax(0)
    ref_log_probs = torch.tensor(REFERENCE, dtype=torch.float64).log()
    if estimator is None:
        mean = (log_probs.exp() * (log_probs - ref_log_probs)).sum()
    else:
        mean = (log_probs.exp().detach() * kl_estimate(log_probs, ref_log_probs, estimator)).sum()
    (gradient,) = torch.autograd.grad(mean, logits)
    return gradient


@pytest.mark.parametrize("estimator", ["mse", *(f"{name}+" for name in ESTIMATORS)])
def test_the_mean_gradient_of_k2_and_plus_estimators_is_that_of_kl(estimator: str) -> None:
    torch.testing.assert_close(_mean_gradient(estimator), _mean_gradient(None))


def test_the_mean_gradients_of_k1_and_k3_are_zero_and_reverse_kl() -> None:
    # sum p dlog p = d sum p = 0; and the gradient of KL(reference || policy) by the logits is p -
    # reference
    policy = torch.tensor(LOGITS, dtype=torch.float64).softmax(0)
    torch.testing.assert_close(_mean_gradient("kl"), torch.zeros_like(policy))
    torch.testing.assert_close(
        _mean_gradient("low_var_kl"), policy - torch.tensor(REFERENCE, dtype=torch.float64)
    )


def test_reward_penalties() -> None:
    # d: 0.5, -0.1, 0.2 | 1.0 | none. Sums 0.6, 1.0, 0; token means 0.2 and 1.0, mean over the two
    # 0.6
    mask = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    old = torch.tensor([[-0.5, -1.1, -0.8], [-1.0, NAN, NAN], [NAN, NAN, NAN]])
    ref = torch.tensor([[-1.0, -1.0, -1.0], [-2.0, NAN, 0.0], [NAN, 0.0, float("-inf")]])
    sums, mean = reward_penalties(old, ref, mask, KLConfig(place="reward", estimator="kl"))
    assert sums.dtype == torch.float64
    assert sums.tolist() == pytest.approx([0.6, 1.0, 0.0], abs=1e-6)
    assert mean == pytest.approx(0.6, abs=1e-6)
    # low_var_kl at ln 2: ln 2 - 1/2, twice; a plus changes no value
    old, ref, mask = torch.zeros(1, 2), torch.full((1, 2), -LN2), torch.ones(1, 2, dtype=torch.bool)
    for estimator in ("low_var_kl", "low_var_kl+"):
        sums, mean = reward_penalties(
            old, ref, mask, KLConfig.model_validate({"estimator": estimator})
        )
        assert [*sums.tolist(), mean] == pytest.approx([2 * LN2 - 1, LN2 - 0.5], abs=1e-6)
    sums, mean = reward_penalties(old, ref, ~mask, KLConfig())
    assert (sums.tolist(), mean) == ([0.0], 0.0)  # without a token


def _adaptive() -> KLController:
    kl = {
        "place": "reward",
        "controller": "adaptive",
        "coefficient": 0.01,
        "target": 0.1,
        "horizon": 10_000,
    }
    return KLController(KLConfig.model_validate(kl))


@pytest.mark.parametrize(
    ("kl_per_token", "num_responses", "factor"),
    [
        (0.1, 1000, 1.0),  # on target
        (0.11, 1000, 1.01),  # 1 + 0.1 * 1000 / 10000
        (0.095, 2000, 0.99),  # 1 - 0.05 * 0.2
        (0.5, 1000, 1.02),  # the error 4 is clipped to 0.2
        (0.0, 1000, 0.98),  # the error -1 is clipped to -0.2
        (-0.3, 1000, 0.98),  # k1 can be negative
        (0.5, 40_000, 1.8),  # a step of four horizons
    ],
)
def test_the_adaptive_coefficient(kl_per_token: float, num_responses: int, factor: float) -> None:
    controller = _adaptive()
    controller.update(kl_per_token, num_responses)
    assert controller.coefficient == pytest.approx(0.01 * factor, rel=1e-12)


def test_the_adaptive_coefficient_compounds_and_resumes() -> None:
    first, second = _adaptive(), _adaptive()
    first.update(0.5, 1000)
    second.coefficient = first.coefficient
    for controller in (first, second):
        controller.update(0.5, 1000)
        assert controller.coefficient == pytest.approx(0.01 * 1.02**2, rel=1e-12)
    fixed = KLController(KLConfig(place="reward", coefficient=0.01))
    fixed.update(5.0, 100_000)
    assert fixed.coefficient == 0.01


def test_masked_responses_are_penalised_like_their_siblings() -> None:
    group = make_group([1.0, -1.0], num_response_tokens=[3, 2])
    group.rollouts[1] = replace(group.rollouts[1], finish_reason="length")
    batch = build_batch([group], mask_truncated=True)
    batch = replace(
        batch, old_log_probs=batch.rollout_log_probs, ref_log_probs=batch.rollout_log_probs - 0.5
    )
    controller = KLController(KLConfig(place="reward", estimator="kl", coefficient=0.1))
    penalised, metrics = controller.penalise(batch)
    # KL 0.5 a token: 1 - 0.1 * 3 * 0.5 and -1 - 0.1 * 2 * 0.5
    assert penalised.rewards.tolist() == pytest.approx([0.85, -1.1])
    assert metrics == {
        "actor/reward_kl_penalty": pytest.approx(0.5),
        "actor/reward_kl_penalty_coeff": 0.1,
    }
    assert KLController(KLConfig(place="loss")).penalise(batch) == (batch, {})


@pytest.mark.parametrize("unused", [{"refresh_every": 5}, {"reference_path": "elsewhere"}])
def test_reference_keys_without_kl_are_refused(unused: dict[str, object]) -> None:
    with pytest.raises(
        ValueError,
        match=r"algorithm\.kl\.place=off loads no reference model; set algorithm\.kl\.place",
    ):
        KLConfig.model_validate(unused)
