"""What tests ask of an engine from inside its process."""

import logging

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality

from gtpo_megatron.rollout.sampled_entropy import REQUEST_KEY, SampledEntropy


def generate_and_count_preemptions(engine, requests, sampling):
    """A batch, and how often vLLM threw a running request's keys and values away to compute them again."""
    scheduler = engine._llm.llm_engine.engine_core.engine_core.scheduler
    before = scheduler._preempt_request
    count = 0

    def counted(*args, **kwargs):
        nonlocal count
        count += 1
        return before(*args, **kwargs)

    scheduler._preempt_request = counted
    try:
        return engine.generate(requests, sampling, seed=0), count
    finally:
        scheduler._preempt_request = before


def entropies_of_a_batch_that_changes(engine):
    """Drives the processor by hand; token ``i`` of response ``r`` has ``p = (1 - q, q)``, ``100 q = 10 r + i + 1``."""
    recorder = SampledEntropy(None, torch.device("cpu"), False)
    outputs = {number: [] for number in range(4)}

    def sample(*batch, returned=True):
        """One step; None is a request whose entropies nobody wants."""
        rows = [0.5 if number is None else (10 * number + len(outputs[number]) + 1) / 100 for number in batch]
        logits = torch.tensor([[1 - q, q] for q in rows]).log()
        same = recorder.apply(logits.clone())
        assert torch.equal(same, logits)
        for number in batch:
            if number is not None and returned:
                outputs[number].append(7)

    def added(row, number):
        wanted = {} if number is None else {REQUEST_KEY: number}
        return (row, SamplingParams(extra_args=wanted), None, [] if number is None else outputs[number])

    def update(added=(), removed=(), moved=()):
        recorder.update_state(BatchUpdate(batch_size=0, removed=removed, added=added, moved=moved))

    update(added=[added(0, 0), added(1, None), added(2, 2)])
    sample(0, None, 2, returned=False)  # prompts that were not yet read to their end: vLLM drops the sample
    sample(0, None, 2)
    update(moved=[(0, 2, MoveDirectionality.SWAP)])
    sample(2, None, 0)
    recorder.update_state(None)
    sample(2, None, 0)
    update(added=[added(2, 1)])  # response 0 is preempted, response 1 takes its row
    sample(2, None, 1)
    update(removed=[1], moved=[(2, 1, MoveDirectionality.UNIDIRECTIONAL)])
    sample(2, 1)
    update(added=[added(2, 0)])  # response 0 is back, with its tokens
    sample(2, 1, 0)
    del outputs[1][1:]  # vLLM takes tokens back (a failed load of keys and values)
    sample(2, 1, 0)
    taken = recorder.log.take([0, 1])
    sample(2, 1, 0)  # one step too many for 0 and 1
    rest, none = recorder.log.take([2]), recorder.log.take([0, 1])
    return taken, rest, none, {number: len(ids) for number, ids in outputs.items()}


def what_sleeping_says(engine):
    """Lines of the log while it is asked to sleep and to wake."""
    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("gtpo_megatron.rollout.vllm_engine")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        engine.sleep(keep_weights=True)
        engine.wake("weights")
        engine.wake("kv_cache")
    finally:
        logger.removeHandler(handler)
    return lines


def tokens_of_cache(engine):
    """Tokens whose keys and values vLLM found room for."""
    cache = engine._llm.llm_engine.vllm_config.cache_config
    return cache.num_gpu_blocks * cache.block_size


def forget_prefixes(engine):
    """Empties the prefix cache."""
    engine.forget_prefixes()
