"""Sees which processes of a run or of a grading worker have ended, and ends what is left of them."""
