"""Tiles of logits on one device: softmax sums and gradients, in torch and in Triton."""
