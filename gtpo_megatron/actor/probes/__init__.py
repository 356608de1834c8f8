"""What a preflight measures of the trainer, beside the stages of a step."""
