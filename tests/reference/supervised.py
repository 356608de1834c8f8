"""Supervised fine-tuning's loss, token by token."""


def mean_nll(logprobs, loss_mask):
    """``-(1 / N) sum_i sum_t log pi(o_it)`` over the ``N`` trained tokens of all conversations of the batch."""
    total, count = 0.0, 0
    for row, mask in zip(logprobs, loss_mask, strict=True):
        for logprob, is_trained in zip(row, mask, strict=True):
            if is_trained:
                total -= logprob
                count += 1
    return total / count
