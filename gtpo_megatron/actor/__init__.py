"""The Megatron side of a run, and the only importer of megatron.core."""
