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


def wrong_state(hook: str, made_by: str, found: object) -> TypeError:
    """The error of a communication hook that DDP was given another state for.

    Args:
        hook: its name.
        made_by: the expression that makes its state.
        found: what it was given.
    """
    return TypeError(
        f"{hook} got {type(found).__name__} as its state: call ddp.register_comm_hook({made_by}, {hook})"
        f"{see('gradients-were-not-reduced')}"
    )
