"""Sends and receives under NCCL's rules, one step at a time.

A pair of ranks has one communicator: opening it blocks both until the other one comes, and what either of them sends or
receives runs in the order in which it was started. A transfer needs both sides. With one queue (CUDA's
``CUDA_DEVICE_MAX_CONNECTIONS=1``, which Megatron asks for) all transfers of a rank run in the order in which they were
started, whatever the pair.
"""

from collections import Counter, defaultdict, deque


class Simulation:
    """Programs of ranks that run until all are done, or none can go on.

    A program yields ``("open", partner)``, ``("start", transfer)`` and ``("wait", transfers)``; a transfer is
    ``(sender, receiver, what)``, and both sides start it.

    Attributes:
        pairs: that were opened.
        done: how often each transfer ran.
        rounds: per round of openings, how many pairs opened.
    """

    def __init__(self, programs, *, one_queue):
        self.one_queue = one_queue
        self.pairs, self.done, self.rounds = set(), Counter(), []
        self._programs = dict(programs)
        self._now = {rank: next(program, None) for rank, program in self._programs.items()}
        self._queues = defaultdict(deque)

    def run(self):
        """The ranks that cannot go on, with what each waits for; empty if all are done."""
        self._open_all()
        ready = deque(self._programs)
        while ready:
            rank = ready.popleft()
            for other in self._go_on(rank):
                ready.append(other)
        return {rank: step for rank, step in self._now.items() if step is not None}

    def _open_all(self):
        """Openings come first; a pair opens if each side's next step is the other."""
        while True:
            met = {
                (rank, step[1])
                for rank, step in self._now.items()
                if step is not None and step[0] == "open" and self._now[step[1]] == ("open", rank)
            }
            if not met:
                return
            self.rounds.append(len(met) // 2)
            self.pairs |= {(min(pair), max(pair)) for pair in met}
            for rank, _ in met:
                self._now[rank] = next(self._programs[rank], None)

    def _go_on(self, rank):
        """Runs a program until it must wait; returns the ranks that a transfer of it may have set free."""
        freed = []
        while (step := self._now[rank]) is not None:
            kind, what = step
            if kind == "start":
                sender, receiver, _ = what
                assert (min(sender, receiver), max(sender, receiver)) in self.pairs
                self._queues[self._queue(rank, what)].append(what)
                freed += self._transfer(what)
            elif kind == "open" or any(transfer not in self.done for transfer in what):
                break
            self._now[rank] = next(self._programs[rank], None)
        return freed

    def _queue(self, rank, transfer):
        sender, receiver, _ = transfer
        return rank if self.one_queue else (rank, min(sender, receiver), max(sender, receiver))

    def _transfer(self, first):
        """Runs a transfer if it is the next on both sides, and then those that were behind it."""
        freed, waiting = [], [first]
        while waiting:
            transfer = waiting.pop()
            queues = [self._queues[self._queue(rank, transfer)] for rank in transfer[:2]]
            if all(queue and queue[0] == transfer for queue in queues):
                self.done[transfer] += 1
                freed += transfer[:2]
                for queue in queues:
                    queue.popleft()
                    waiting += [queue[0]] if queue else []
        return freed
