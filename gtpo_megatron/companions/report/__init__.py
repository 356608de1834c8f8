"""The report page of one or several runs: reading, figures, serving."""
