"""Every policy loss against values computed by hand, and a user's own loss."""

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from dapo_core.algorithm.covariance import select_tokens
from dapo_core.algorithm.loss import LossTotals, PolicyLoss, policy_loss
from dapo_core.algorithm.loss_tokens import LossTokens
from dapo_core.algorithm.losses import LOSSES, loss_of
from dapo_core.config.algorithm import AlgorithmConfig
from dapo_core.config.losses import LOSS_KINDS
from dapo_core.errors import ConfigError
from tests.batches import random_batch, rows_of
from tests.configs import make_config

# Two responses of 3 and 2 tokens with advantages 1 and -1:
# log-ratio d    0, 0.3, -0.1      | 0.4, -0.5
# ratio r        1, 1.349859, 0.904837 | 1.491825, 0.606531
# old log-prob  -1, -0.5, -2       | -0.7, -1.2
# log-prob      -1, -0.2, -2.1     | -0.3, -1.7
MASK = torch.tensor([[True, True, True], [True, True, False]])
DIFFERENCES = torch.tensor([[0.0, 0.3, -0.1], [0.4, -0.5, 0.0]], dtype=torch.float64)
OLD = torch.tensor([[-1.0, -0.5, -2.0], [-0.7, -1.2, 0.0]], dtype=torch.float64)
CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
CHOSEN = torch.tensor([[False, False, False], [False, True, False]])  # the fifth token


def _loss(**algorithm: Any) -> tuple[PolicyLoss, list[float], list[float]]:
    """Return the loss of the case, the value of each token, and the gradient of the loss."""
    config = AlgorithmConfig.model_validate(algorithm)
    log_probs = (OLD + DIFFERENCES).requires_grad_()
    advantages = torch.tensor([[1.0], [-1.0]], dtype=torch.float64).expand(MASK.shape)
    weights = LossTotals(5, 2).token_weights(MASK, config).double()
    weights = torch.where(MASK, weights, 0.0)
    tokens = LossTokens(OLD, advantages, MASK, weights, rows_of(MASK), is_selected=CHOSEN)
    found = policy_loss(log_probs, None, tokens, config)
    (gradient,) = torch.autograd.grad(found.loss, log_probs)
    values = loss_of(config)(log_probs, tokens, config).value
    return found, values[MASK].tolist(), gradient[MASK].tolist()


# Weights: token-mean 1/5 for each token; seq-mean-token-mean 1/6 for the first response's, 1/4 for
# the second's. A gradient is the weight times the derivative of the token's value.
@pytest.mark.parametrize(
    ("algorithm", "values", "loss", "gradient", "num_clipped"),
    [
        # -r, clipped at 1.28 where A = 1; r, at least 0.8 where A = -1
        (
            {"loss": "dapo"},
            [-1, -1.28, -0.904837, 1.491825, 0.8],
            -0.17860254,
            [-0.2, 0, -0.180967, 0.298365, 0],
            2,
        ),
        # s = exp((0 + 0.3 - 0.1) / 3) = 1.068939 and exp((0.4 - 0.5) / 2) = 0.951229
        (
            {"loss": "gspo"},
            [-1.068939] * 3 + [0.951229] * 2,
            -0.05885484,  # (-1.068939 + 0.951229) / 2
            [-0.178157] * 3 + [0.237807] * 2,
            0,
        ),
        # -clamp(r, 0.8, 1.28) A log-prob: 1.28 * 0.2 = 0.256; 0.904837 * 2.1 = 1.900159; 1.28 *
        # -0.3 = -0.384; 0.8 * -1.7 = -1.36; the gradient is the factor of the log-prob / 5
        (
            {"loss": "cispo"},
            [1, 0.256, 1.900159, -0.384, -1.36],
            0.28243172,
            [-0.2, -0.256, -0.180967, 0.256, 0.16],
            3,
        ),
        # tau 1 and 1.05: sigmoid(0) * 4 = 2; sigmoid(0.349859) * 4 = 2.346333; sigmoid(1.05 *
        # 0.491825) * 4 / 1.05 = 2.38594
        (
            {"loss": "sapo"},
            [-2, -2.346333, -1.904909, 2.38594, 1.516795],
            -0.06618986,
            [-0.166667, -0.21823, -0.150465, 0.349156, 0.145342],
            0,
        ),
        # clipped log-ratios 0, 0.28, -0.1 | 0.4, -0.2: exp(0.06) = 1.061837 and exp(0.1) = 1.105171
        (
            {"loss": "gmpo"},
            [-1.061837] * 3 + [1.105171] * 2,
            0.02166719,
            [-0.176973, 0, -0.176973, 0.276293, 0],
            2,
        ),
        # as dapo, and 0 for the fifth token
        (
            {"loss": "clip-cov"},
            [-1, -1.28, -0.904837, 1.491825, 0],
            -0.33860254,
            [-0.2, 0, -0.180967, 0.298365, 0],
            1,
        ),
        # -A r; the fifth 0.606531 + |-0.5| = 1.106531, its derivative 0.606531 - 1 = -0.393469
        (
            {"loss": "kl-cov", "kl_cov": {"coefficient": 1.0}},
            [-1, -1.349859, -0.904837, 1.491825, 1.106531],
            -0.13126817,
            [-0.2, -0.269972, -0.180967, 0.298365, -0.078694],
            0,
        ),
        # -(A log-prob - 0.25 d^2): 0.2 + 0.0225, 2.1 + 0.0025, -0.3 + 0.04, -1.7 + 0.0625
        (
            {"loss": "dro", "dro": {"beta": 0.5}},
            [1, 0.2225, 2.1025, -0.26, -1.6375],
            0.2855,
            [-0.2, -0.17, -0.21, 0.24, 0.15],
            0,
        ),
        # the second token's probability rises by exp(-0.2) - exp(-0.5) = 0.2122, above 0.15; the
        # last falls by exp(-1.2) - exp(-1.7) = 0.1185, within
        (
            {"loss": "dppo-tv", "dppo_tv": {"low": 0.15, "high": 0.15, "ratio_max": 10.0}},
            [1, 0, 1.900159, -0.447547, -1.031102],
            0.28430181,
            [-0.2, 0, -0.180967, 0.298365, 0.121306],
            1,
        ),
        ({"loss": "reinforce"}, [1, 0.2, 2.1, -0.3, -1.7], 0.26, [-0.2, -0.2, -0.2, 0.2, 0.2], 0),
    ],
    ids=lambda given: given["loss"] if isinstance(given, dict) else None,
)
def test_each_loss_has_its_published_value_and_gradient(
    algorithm: dict[str, Any],
    values: list[float],
    loss: float,
    gradient: list[float],
    num_clipped: int,
) -> None:
    clips = CLIP if "clip_ratio_low" in LOSS_KINDS[algorithm["loss"]].reads else {}
    found, per_token, slope = _loss(**algorithm, **clips)
    assert per_token == pytest.approx(values, abs=1e-6)
    assert found.loss.item() == pytest.approx(loss, abs=1e-7)
    assert slope == pytest.approx(gradient, abs=1e-6)
    assert found.sums.clipped == num_clipped


def test_gmpo_clips_nothing_without_an_advantage() -> None:
    tokens = LossTokens(OLD, torch.zeros_like(OLD), MASK, MASK.double(), rows_of(MASK))
    clipped = LOSSES["gmpo"](OLD + DIFFERENCES, tokens, AlgorithmConfig(loss="gmpo")).is_clipped
    assert clipped is not None
    assert not clipped.any()


def test_every_loss_has_an_entry_in_all_tables() -> None:
    names = set(get_args(AlgorithmConfig.model_fields["loss"].annotation))
    assert set(LOSS_KINDS) == names == {*LOSSES, "custom"}


def _selected(loss: str, **settings: Any) -> list[int]:
    batch = replace(
        random_batch(1, 2),
        old_log_probs=OLD + DIFFERENCES,
        response_mask=MASK,
        advantages=torch.tensor([1.0, -1.0]),
    )
    algorithm = AlgorithmConfig.model_validate({"loss": loss, loss.replace("-", "_"): settings})
    chosen = select_tokens(batch, algorithm, 0, 1, 0, 0).is_selected
    assert chosen is not None
    assert not (chosen & ~MASK).any()
    return torch.nonzero(chosen[MASK]).flatten().tolist()


def test_tokens_are_selected_by_covariance_over_the_mini_batch() -> None:
    # mean A = (3 - 2) / 5 = 0.2, mean log-prob = -5.3 / 5 = -1.06: covariances 0.8 * 0.06 = 0.048,
    # 0.8 * 0.86 = 0.688, 0.8 * -1.04 = -0.832, -1.2 * 0.76 = -0.912, -1.2 * -0.64 = 0.768
    assert _selected("kl-cov", ratio=0.2) == [4]
    assert _selected("kl-cov", ratio=1e-9) == [4]  # at least one
    assert _selected("kl-cov", ratio=0.4) == [1, 4]
    assert _selected("clip-cov", ratio=1.0, low=0.0, high=0.7) == [0, 1]
    assert _selected("clip-cov", ratio=1.0, low=5.0, high=6.0) == []
    (one,) = _selected("clip-cov", ratio=0.2, low=0.0, high=0.8)
    assert one in (0, 1, 4)


def test_the_old_log_probs_are_computed_first_where_tokens_are_selected() -> None:
    single = {"train": {"train_prompts": 4, "mini_prompts": 4}}
    anchored = {
        name: make_config(algorithm={"loss": name}, **single).anchors_before_updates
        for name in LOSSES
    }
    assert {name for name, is_anchored in anchored.items() if is_anchored} == {"clip-cov", "kl-cov"}


def test_defaults_follow_the_loss_unless_set() -> None:
    gspo = AlgorithmConfig.model_validate({"loss": "gspo"})
    assert (gspo.clip_ratio_low, gspo.clip_ratio_high) == (3e-4, 4e-4)
    assert gspo.loss_aggregation == "seq-mean-token-mean"
    assert AlgorithmConfig.model_validate(gspo.model_dump()) == gspo
    chosen = {"loss": "gspo", "loss_aggregation": "token-mean", "clip_ratio_high": 0.28}
    changed = AlgorithmConfig.model_validate(chosen)
    assert (changed.loss_aggregation, changed.clip_ratio_high) == ("token-mean", 0.28)
    assert AlgorithmConfig().loss_aggregation == "token-mean"


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"loss": "gpso"}, "Input should be 'dapo', 'gspo'"),
        (
            {"loss": "gspo", "sapo": {"tau_negative": 2.0}},
            r"algorithm\.sapo would be ignored by algorithm\.loss=gspo; .* algorithm\.loss to sapo",
        ),
        (
            {"loss": "reinforce", "clip_ratio_high": 0.3},
            r"clip_ratio_high=0\.3 would be ignored by algorithm\.loss=reinforce; .* to dapo or ",
        ),
        ({"loss": "reinforce", "old_log_probs": "engine"}, "turn off the weights of stale tokens"),
        ({"loss": "gspo", "clip_ratio_dual": 3.0}, r"clip_ratio_dual=3\.0 would be ignored"),
        ({"loss": "custom"}, r"needs a file; set algorithm\.custom_loss\.path"),
        ({"loss": "dro", "custom_loss": {"path": "loss.py"}}, "custom_loss would be ignored"),
        ({"custom_loss": {"name": "mine"}}, "custom_loss would be ignored"),
        ({"loss": "clip-cov", "clip_cov": {"low": 5, "high": 1}}, "no token would be chosen"),
    ],
)
def test_settings_that_the_loss_does_not_read_are_refused(
    algorithm: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        AlgorithmConfig.model_validate(algorithm)


HEAD = (
    "import torch\n"
    "def compute_loss(log_probs, old_log_probs, advantages, response_mask, responses):\n    "
)


def _custom(folder: Path, body: str) -> dict[str, Any]:
    (folder / "loss.py").write_text(HEAD + body + "\n")
    return {"custom_loss": {"path": str(folder / "loss.py")}}


def test_a_users_loss_trains_like_the_same_built_in_one(tmp_path: Path) -> None:
    custom = _custom(
        tmp_path,
        "mean = responses.mean(log_probs - old_log_probs, response_mask)\n"
        "    return -advantages * (log_probs - log_probs.detach() + mean).exp()",
    )
    config = AlgorithmConfig.model_validate(custom)
    assert (config.loss, config.loss_aggregation) == ("custom", "token-mean")
    mean = {"loss_aggregation": "seq-mean-token-mean"}
    found, values, gradient = _loss(**custom, **mean)
    wanted, same, slope = _loss(loss="gspo", **CLIP)  # which clips nothing in this case
    assert (found.loss.item(), values, gradient) == (wanted.loss.item(), same, slope)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 1 / 0", r"compute_loss raised ZeroDivisionError: division by zero"),
        ("return (-advantages * log_probs).sum()", r"returned \(\) instead of a tensor .* \(5,\)"),
        ("return 0.5", "returned float instead of a tensor"),
        ("return log_probs * float('nan')", "returned NaN or infinity for 5 of 5 tokens"),
        ("return -advantages * log_probs.detach()", "does not depend on log_probs"),
    ],
)
def test_a_faulty_loss_is_refused_before_training(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loss_of(AlgorithmConfig.model_validate(_custom(tmp_path, body)))


def test_a_loss_that_fails_later_names_its_file(tmp_path: Path) -> None:
    body = "return log_probs * (float('nan') if len(log_probs) == 2 else 1)"
    with pytest.raises(ConfigError, match=r"loss\.py: compute_loss returned NaN .* 5 of 5"):
        _loss(**_custom(tmp_path, body))


def test_a_file_without_the_function_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loss.py").write_text("def compute_loss(log_probs): return log_probs")
    custom = {"custom_loss": {"path": str(tmp_path / "loss.py")}}
    with pytest.raises(ConfigError, match="cannot be called as compute_loss"):
        loss_of(AlgorithmConfig.model_validate(custom))
