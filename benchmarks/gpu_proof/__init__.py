"""What one GPU has left to say, measured by a single command in parts: ``tools/gpu_proof.sh``, docs/gpu_proof.md.

A machine needs torch, Triton, transformers and pytest; archives bring what else is imported. Without a
GPU, ``--device cpu --small`` runs the same code with sizes cut down.
"""
