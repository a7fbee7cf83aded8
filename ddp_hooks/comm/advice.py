"""Links from errors to the documentation."""

from __future__ import annotations

_PAGE = "docs/troubleshooting.md"


def see(anchor: str, quoted: object = None) -> str:
    """Return the end of an error's message, which names the section that explains the error.

    Args:
        anchor: section of ``docs/troubleshooting.md``.
        quoted: another error at the end of the message. If it names a section itself, the message gets no second one.

    Returns:
        ``" (see docs/troubleshooting.md#anchor)"``, or nothing.
    """
    return "" if f"(see {_PAGE}#" in str(quoted) else f" (see {_PAGE}#{anchor})"


def wrong_state(hook: str, made_by: str, found: object) -> TypeError:
    """Return the error of a communication hook that was registered with a wrong state.

    Args:
        hook: name of the hook.
        made_by: expression that makes its state.
        found: the wrong state.
    """
    return TypeError(
        f"{hook} got {type(found).__name__} as its state: call ddp.register_comm_hook({made_by}, {hook})"
        f"{see('gradients-were-not-reduced')}"
    )
