"""Run ``python -m ddp_hooks plan``."""

from ddp_hooks.planning.command import main

if __name__ == "__main__":
    main()
