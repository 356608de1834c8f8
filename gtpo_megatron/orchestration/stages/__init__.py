"""What a step is made of, whoever runs it: the protocols of its stages, memory turns, the opening of a push."""
