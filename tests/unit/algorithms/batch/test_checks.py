"""Every check says what, got and expected."""

import pytest
import torch

from gtpo_megatron.algorithms.batch import checks
from gtpo_megatron.errors import ShapeError


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (lambda: checks.check_tensor(x=3), "x: expected a tensor, got int"),
        (lambda: checks.check_shape((2,), x=torch.zeros(3)), r"x: got shape \(3,\), expected \(2,\)"),
        (lambda: checks.check_num_dims(1, x=torch.zeros(3, 1)), r"x: got 2 dimensions \(3, 1\), expected 1"),
        (lambda: checks.check_mask(x=torch.zeros(3)), "x: got torch.float32, expected torch.bool"),
        (lambda: checks.check_full_precision(x=torch.zeros(3).half()), "x: got torch.float16"),
        (lambda: checks.check_labels(x=torch.zeros(3, dtype=torch.bool)), "x: got torch.bool, expected torch.int64"),
    ],
)
def test_wrong(check, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        check()


def test_right() -> None:
    checks.check_shape((2, 1), a=torch.zeros(2, 1), b=torch.ones(2, 1))
    checks.check_num_dims(2, a=torch.zeros(2, 1))
    checks.check_mask(a=torch.zeros(2, dtype=torch.bool))
    checks.check_full_precision(a=torch.zeros(1), b=torch.zeros(1).double())
    checks.check_labels(a=torch.zeros(1, dtype=torch.int32), b=torch.zeros(1, dtype=torch.int64))
