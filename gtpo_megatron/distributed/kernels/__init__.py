"""The parts under `distributed.vocab_parallel`: tiles of logits, their partial sums, and the fused output layer."""
