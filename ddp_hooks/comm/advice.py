"""Links from errors to the documentation."""

from __future__ import annotations

_PAGE = "docs/troubleshooting.md"


def see(anchor: str, quoted: object = None) -> str:
    """Return the end of an error's message: ``" (see docs/troubleshooting.md#anchor)"``, the section that explains it.

    Return nothing if another error, ``quoted`` at the end of the message, names a section itself.
    """
    return "" if f"(see {_PAGE}#" in str(quoted) else f" (see {_PAGE}#{anchor})"


def wrong_state(hook: str, made_by: str, found: object) -> TypeError:
    """Return the error of ``hook`` with ``found`` in place of the state that the expression ``made_by`` makes."""
    return TypeError(
        f"{hook} got {type(found).__name__} as its state: call ddp.register_comm_hook({made_by}, {hook})"
        f"{see('gradients-were-not-reduced')}"
    )
