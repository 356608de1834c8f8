"""The driver's loop: steps, their sampling, what is saved between them."""
