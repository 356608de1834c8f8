"""A judge over HTTP: asked once per question, within a budget, by all grading processes of a run."""
