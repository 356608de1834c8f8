"""The batch as the credit functions see it: flat tokens, a table of the responses, reductions over ranks."""
