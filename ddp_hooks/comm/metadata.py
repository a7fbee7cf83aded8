"""Table of contents of a ``torch.distributed.checkpoint``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any


def read_metadata(path: str | os.PathLike[str]) -> tuple[Mapping[str, Any], str | None]:
    """Return the metadata of every entry by name, and the problem of reading them, or None.

    Every rank reads for itself, and one of them may find a damaged file: compare the problem over the ranks
    (:func:`~ddp_hooks.comm.agree`) before any collective.
    """
    from torch.distributed.checkpoint import FileSystemReader  # takes a while to import, and few need it

    try:
        return FileSystemReader(path).read_metadata().state_dict_metadata, None
    except Exception as error:  # absent, cut off in the middle, or of something else
        return {}, f"cannot read {os.path.join(path, '.metadata')}: {type(error).__name__}: {error}"
