"""What the maths knows of the batch: flat tokens, a table of the responses, and the ranks."""
