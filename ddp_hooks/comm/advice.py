"""Where the documentation explains an error."""

from __future__ import annotations

_PAGE = "docs/troubleshooting.md"


def see(anchor: str, quoted: object = None) -> str:
    """The end of an error's message: the place in the documentation that explains it.

    Args:
        anchor: of a section of ``docs/troubleshooting.md``, which says what the error means and what to do.
        quoted: another error that the message ends with. If that one names its place, which is nearer to the cause,
            the message gets no second one.

    Returns:
        ``" (see docs/troubleshooting.md#anchor)"``, or nothing.
    """
    return "" if f"(see {_PAGE}#" in str(quoted) else f" (see {_PAGE}#{anchor})"
