"""Private and version-dependent names of torch 2.11 to 2.14; no other module of ``ddp_hooks`` uses any.

There is no public name for what a function does, unless it says so. A frame of torch's code is recognised by the names
of its module and function, where torch has no way to ask. FSDP2's private names are in :mod:`fsdp_ext.compat`.
"""
