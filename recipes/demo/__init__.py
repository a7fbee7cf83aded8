"""Demo: plain DDP and DeAR side by side. ``python -m recipes.demo``"""
