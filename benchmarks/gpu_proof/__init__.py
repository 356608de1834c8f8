"""What one GPU has left to say, measured by a single command in parts: ``tools/gpu_proof.sh``, docs/gpu_proof.md.

A machine needs torch, Triton, transformers and pytest; what else is imported lies in the bundle as wheels. Without a
GPU, ``--device cpu --small`` runs the same code with sizes cut down.
"""
