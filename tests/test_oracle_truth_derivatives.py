"""The truth's gradients against central differences of its loss, and against closed forms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fsdp_engine.contract.case import Case, LossMode
from fsdp_engine.contract.model import Model
from fsdp_engine.workload.batches import MicroBatch, global_batch
from oracles.arrays import Float64, float64_of
from oracles.evaluation import Evaluator
from oracles.truth import truth
from tests.small_cases import exact_case, small_case
from tests.test_oracle_truth import MODES

MODELS: dict[str, Model] = {
    "linear": Model(width=3, vocab=2, bias=True, buffers=True),
    "mlp": Model(family="mlp", width=3, hidden=4, vocab=2, bias=True, optional="parameter"),
    "embedding": Model(family="embedding", units=2, width=3, hidden=4, vocab=5, optional="unit"),
    "tied": Model(family="embedding", width=3, hidden=4, vocab=5, tied=True),
    "frozen": Model(family="mlp", units=2, width=3, hidden=4, vocab=2, frozen="first_unit"),
    "adapter": Model(family="mlp", width=3, hidden=4, vocab=2, lora_rank=2, lora_alpha=3),
    "llama": Model(family="llama", width=4, hidden=4, vocab=5),
    "qwen2": Model(family="qwen2", width=4, hidden=4, vocab=5, tied=True),
    "mixtral": Model(family="mixtral", width=4, hidden=4, vocab=5),
    "llama with adapter": Model(family="llama", width=4, hidden=4, vocab=5, lora_rank=1),
}
STEP = 2.0**-19


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        (name, mode)
        for name, model in MODELS.items()
        # A mode changes weights of tokens alone: two of them are enough for models that cost more.
        for mode in (MODES[::3] if model.is_language else MODES)
    ],
)
def test_equals_central_differences(name: str, mode: LossMode) -> None:
    """Along one direction per parameter: a wrong element shows whichever it is.

    The error falls with the square of the step, to 1e-12 at this one and 1e-8 where a norm sits on
    small activations; roundoff is u / step, 1e-10.
    """
    case = small_case(shape=(2,), model=MODELS[name], policy="fp64", loss_mode=mode)
    evaluator = Evaluator(case)
    predicted = truth(evaluator, 0, evaluator.weights)
    gen = torch.Generator().manual_seed(5)
    scale = max(float(np.abs(gradient).max()) for gradient in predicted.gradients.values())
    for parameter, weight in evaluator.weights.items():
        gradient = predicted.gradients[parameter]
        if parameter not in evaluator.trainable:
            assert not gradient.any()
            continue
        direction = torch.randn(weight.shape, generator=gen, dtype=torch.float64)
        losses = [
            truth(evaluator, 0, evaluator.weights | {parameter: weight + moved * direction}).loss
            for moved in (STEP, -STEP)
        ]
        slope = float((float64_of(direction) * gradient).sum())
        difference = (losses[0] - losses[1]) / (2 * STEP)
        assert abs(difference - slope) < 1e-7 * scale, parameter
        assert slope != 0.0


@pytest.mark.parametrize("mode", MODES)
def test_linear_model_with_squared_loss_in_closed_form(mode: LossMode) -> None:
    """Loss 1/2 |V relu(W x) - y|^2: dV = e h^T and dW = (V^T e where W x > 0) x^T, e = V h - y.

    On dyadic data, where no operation rounds, so equal in every bit.
    """
    case = exact_case(shape=(4,), model=Model(width=3, vocab=2))
    case = replace(case, engine=replace(case.engine, loss_mode=mode))
    evaluator = Evaluator(case)
    predicted = truth(evaluator, 0, evaluator.weights)
    inner, outer = (
        float64_of(evaluator.weights[name]) for name in ("layers.0.linear.weight", "head.weight")
    )
    batch = _everything(case)
    inputs, targets = float64_of(batch.inputs["features"]), float64_of(batch.targets)
    hidden = np.maximum(inputs @ inner.T, 0.0)
    weights = _weights(batch, mode)[..., None]
    errors = hidden @ outer.T - targets
    back = (errors @ outer) * (inputs @ inner.T > 0)
    assert predicted.loss == float((weights * errors**2).sum() / 2)
    assert (predicted.gradients["head.weight"] == _outer(weights * errors, hidden)).all()
    wanted = _outer(weights * back, inputs)
    assert wanted.any()
    assert (predicted.gradients["layers.0.linear.weight"] == wanted).all()


@pytest.mark.parametrize("mode", MODES)
def test_the_head_under_cross_entropy_in_closed_form(mode: LossMode) -> None:
    """Gradient dV = (softmax(V h) - onehot) h^T, h = x + down(relu(up(x))), x from the table."""
    model = Model(family="embedding", width=3, hidden=4, vocab=5)
    case = small_case(shape=(2,), model=model, policy="fp64", loss_mode=mode)
    evaluator = Evaluator(case)
    predicted = truth(evaluator, 0, evaluator.weights)
    table, up, down, head = (
        float64_of(evaluator.weights[name])
        for name in ("embed.weight", "layers.0.up.weight", "layers.0.down.weight", "head.weight")
    )
    batch = _everything(case)
    rows = table[batch.inputs["input_ids"].numpy()]
    hidden = rows + np.maximum(rows @ up.T, 0.0) @ down.T
    scores = np.exp(hidden @ head.T)
    chances = scores / scores.sum(-1, keepdims=True)
    onehot = np.eye(model.vocab)[batch.targets.numpy()]
    weights = _weights(batch, mode)
    loss = -(weights * np.log((chances * onehot).sum(-1))).sum()
    assert predicted.loss == pytest.approx(loss, rel=1e-14)
    wanted = _outer(weights[..., None] * (chances - onehot), hidden)
    off = np.abs(predicted.gradients["head.weight"] - wanted).max()
    assert off < 1e-14 * np.abs(wanted).max()


def _everything(case: Case) -> MicroBatch:
    everything = global_batch(case, 0)
    return everything.select(range(len(everything)))


def _weights(batch: MicroBatch, mode: LossMode) -> Float64:
    """What each token's loss counts, `[sequences, tokens]`, token by token."""
    mask: NDArray[np.bool_] = batch.loss_mask.numpy()
    weights = np.zeros(mask.shape)
    bearing = sum(1 for row in mask if row.any())
    for sequence, token in np.argwhere(mask):
        in_sequence = int(mask[sequence].sum())
        weights[sequence, token] = {
            "token-mean": 1 / int(mask.sum()),
            "token-sum": 1.0,
            "seq-mean-token-sum": 1 / bearing,
            "seq-mean-token-mean": 1 / (bearing * in_sequence),
        }[mode]
    return weights


def _outer(left: Float64, right: Float64) -> Float64:
    """Sum over sequences and tokens of `left right^T`."""
    result: Float64 = np.einsum("sti,stj->ij", left, right)
    return result
