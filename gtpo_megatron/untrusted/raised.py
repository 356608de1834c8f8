"""What an exception of somebody's code says."""


def text_of(error: BaseException) -> str:
    """Its text; of a group of exceptions also what each of them is and says, of which its own text tells nothing."""
    if not isinstance(error, BaseExceptionGroup):
        return str(error)
    inner = "; ".join(f"{type(one).__name__}: {text_of(one)}" for one in error.exceptions)
    return f"{error}: {inner}"
