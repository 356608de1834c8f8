"""The stages of a step: their protocols, sharing of GPU memory, opening of the link for pushes."""
